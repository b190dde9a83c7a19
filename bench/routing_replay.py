"""How often sampler and trainer choose other experts, with and without replay: `python -m bench.routing_replay`.

A random Qwen3-MoE in bfloat16 samples completions of random prompts. One JSON line for each way of training on them:
the share of tokens with other experts and the log-prob gap at equal weights, then after one AdamW step on random
advantages the log-ratios of new to old policy, and how many ratios lie outside of 0.8 to 1.2, where GRPO clips.

With `--rounds N` the model learns instead: N times it samples, and takes `--updates` steps of the clipped loss on each
sample, with float32 masters. The reward is the share of tokens from the lower half of the vocabulary.
"""

import argparse
import json
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from upweight.engine import Engine
from upweight.engine.packing import build_batch
from upweight.models.precision import set_up_precision
from upweight.rollout.units import units_of_groups
from upweight.sampler.in_process import InProcess
from upweight.types import Batch, Group, Outputs, Sampling

PROMPTS, PROMPT_TOKENS, VOCABULARY = 4, 16, 256
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.08,
}


def made_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG), dtype=torch.bfloat16)


def sampled_batch(model: Any, engine: Engine, count: int, tokens: int, seed: int) -> Batch:
    """Return completions with their experts and random advantages as one packed row."""
    random = np.random.default_rng(seed)
    prompts = random.integers(3, VOCABULARY, (PROMPTS, PROMPT_TOKENS)).tolist()
    sampler = InProcess(model, engine=engine, end_ids=(), records=True)
    out = sampler.generate(prompts, count, Sampling(max_new_tokens=tokens, seed=seed))
    groups = [
        Group(number, {}, prompt, completions, advantage_S=torch.from_numpy(random.normal(size=count)))
        for number, (prompt, completions) in enumerate(zip(prompts, out, strict=True))
    ]
    return build_batch(units_of_groups(groups, mask_truncated=False, sampler_logps=False))


def measured(replay: bool, rate: float, **sizes: int) -> dict[str, Any]:
    """Return the differences at equal weights, and the ratios after one step."""
    model = made_model(sizes["seed"]).train()
    engine = Engine(model)
    batch = sampled_batch(model, engine, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    old = engine(model, batch, replay=replay)
    assert old.logps_T is not None
    assert batch.advantage_S is not None
    (-batch.advantage_S[batch.sequence_T].float() * old.logps_T).mean().backward()
    optimizer.step()
    with torch.no_grad():
        new = engine(model, batch, replay=replay)
    gap_T = logps_of(old) - (logps_of(old) if batch.drawn_logps_T is None else batch.drawn_logps_T)
    log_ratio_T = logps_of(new) - logps_of(old)
    outside_T = (log_ratio_T.exp() < 0.8) | (log_ratio_T.exp() > 1.2)
    return {
        "tokens": len(gap_T),
        "rerouted_tokens": rerouted(old),
        "logp_gap": float(gap_T.abs().mean()),
        "rerouted_tokens_after_step": rerouted(new),
        "log_ratio": float(log_ratio_T.abs().mean()),
        "log_ratio_max": float(log_ratio_T.abs().max()),
        "outside_clip": float(outside_T.float().mean()),
    }


def learned(replay: bool, rate: float, rounds: int, updates: int, **sizes: int) -> dict[str, Any]:
    """Return the rewards of first and last rounds, and how far policies moved in the steps on one sample."""
    seed = sizes.pop("seed")
    model = made_model(seed).train()
    copies = set_up_precision(model, torch.bfloat16)
    engine = Engine(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    assert copies is not None
    copies.follow(optimizer)
    rewards, sums = [], torch.zeros(4)
    for number in range(rounds):
        batch = sampled_batch(model, engine, **sizes, seed=1000 * seed + number)
        hits_T = (batch.target_T < VOCABULARY // 2).float()
        reward_S = torch.zeros(int(batch.sequence_T.max()) + 1).index_add(0, batch.sequence_T, hits_T) / sizes["tokens"]
        groups = reward_S.view(PROMPTS, -1)
        advantage_T = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()[
            batch.sequence_T
        ]
        rewards.append(float(reward_S.mean()))
        with torch.no_grad():
            old_T = logps_of(engine(model, batch, replay=replay))
        drawn_T = old_T if batch.drawn_logps_T is None else batch.drawn_logps_T
        for update in range(updates):
            out = engine(model, batch, replay=replay)
            assert out.logps_T is not None
            ratio_T = (out.logps_T.float() - old_T).exp()
            clipped_T = ratio_T.clamp(0.8, 1.2)
            optimizer.zero_grad()
            (-torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)).mean().backward()
            optimizer.step()
            if update == updates - 1:
                outside = (ratio_T.detach() != clipped_T.detach()).float().mean()
                kl = (ratio_T.detach() - 1 - ratio_T.detach().log()).mean()
                gap = (old_T - drawn_T).abs().mean()
                sums += torch.stack([gap, outside, kl, torch.tensor(rerouted(out))])
    last = max(1, rounds // 5)
    names = ("logp_gap", "outside_clip", "kl_of_last_update", "rerouted_tokens")
    means = dict(zip(names, (sums / rounds).tolist(), strict=True))
    return {"reward_first": rewards[0], "reward_last": sum(rewards[-last:]) / last} | means


def logps_of(out: Outputs) -> torch.Tensor:
    assert out.logps_T is not None
    return out.logps_T.detach().float()


def rerouted(out: Outputs) -> float:
    assert out.router_changes_4 is not None
    return float(out.router_changes_4[1] / out.router_changes_4[3])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing_replay", description=__doc__)
    parser.add_argument("--count", type=int, default=4, help="completions of each of 4 prompts")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3e-5, help="learning rate of the step")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=0, help="learn for so many rounds of sampling")
    parser.add_argument("--updates", type=int, default=4, help="steps on one sample")
    options = parser.parse_args()
    for replay in (False, True):
        for seed in range(options.seeds):
            sizes = {"count": options.count, "tokens": options.tokens, "seed": seed}
            if options.rounds:
                line = learned(replay, options.rate, options.rounds, options.updates, **sizes)
            else:
                line = measured(replay, options.rate, **sizes)
            print(json.dumps({"name": "routing_replay", "replay": replay, "seed": seed} | line), flush=True)


if __name__ == "__main__":
    main()
