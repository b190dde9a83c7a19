"""GRPO in the parity script: completions that are replayed instead of sampled, what rewards say of them, and the cases.

Every rollout feeds two steps unless a case says otherwise, so that ratios leave 1 and clips take hold.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch

LONGEST = 9  # tokens of a completion
BASE: dict[str, Any] = {
    "per_device_train_batch_size": 8, "num_generations": 4, "num_iterations": 2, "max_completion_length": LONGEST,
    "max_steps": 4, "learning_rate": 0.2, "shuffle_dataset": False,
}  # fmt: skip


def grpo(*rewards: str, ours: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """`ours` holds where its value differs, `lora`, `env_mask`; the rest is the trainer's config."""
    own = {"lora": False, "env_mask": False}
    chosen = {name: options.pop(name, default) for name, default in own.items()}
    config = BASE | {"reward_weights": [1.0, 0.6][: len(rewards)]} | options
    return {"trainer": "GRPO", "rows": "prompts", "config": config, "rewards": rewards, "ours": ours or {}, **chosen}


def one(**options: Any) -> dict[str, Any]:
    return grpo("sums", **options)


def two(**options: Any) -> dict[str, Any]:
    return grpo("sums", "lengths", **options)


def rloo(*rewards: str, **options: Any) -> dict[str, Any]:
    return grpo(*(rewards or ("sums",)), **options) | {"trainer": "RLOO"}


# TRL shuffles a rollout before it cuts it; `replaying` seeds it so that each half keeps its completions.
CUT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
HALVES = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
PLAIN = ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "luspo", "vespo")
# The cap of cispo's weight is epsilon_high in TRL, one more here.
CAP = {"loss_type": "cispo", "epsilon_high": 1.1, "ours": {"epsilon_high": 0.1}}
GRPO_CASES: dict[str, dict[str, Any]] = {
    **{f"grpo {name}": one(loss_type=name) for name in PLAIN},
    "grpo cispo": one(**CAP),
    **{f"grpo {name}, on policy": one(loss_type=name, num_iterations=1) for name in ("grpo", "dapo", "sapo", "vespo")},
    **{f"grpo {name}, cut": one(loss_type=name, **CUT) for name in PLAIN if name != "bnpo"},
    "grpo cispo, cut": one(**CAP, **CUT),
    **{f"grpo {name}, two steps": one(loss_type=name, num_iterations=1, **HALVES) for name in PLAIN},
    "grpo two steps twice": one(**HALVES),
    **{f"grpo {name}, beta": one(loss_type=name, beta=0.3) for name in PLAIN},
    "grpo cispo, beta": one(**CAP, beta=0.3),
    **{
        f"grpo {name}, plain kl": one(loss_type=name, beta=0.3, use_bias_correction_kl=False)
        for name in ("grpo", "dapo", "luspo")
    },
    **{f"grpo {name}, sequence": one(loss_type=name, importance_sampling_level="sequence") for name in PLAIN},
    "grpo cispo, sequence": one(**CAP, importance_sampling_level="sequence"),
    "grpo sequence, beta": one(loss_type="grpo", importance_sampling_level="sequence", beta=0.3),
    "grpo two rewards": two(),
    "grpo two rewards, beta": two(beta=0.3),
    **{f"grpo scaled by {name}": two(scale_rewards=name) for name in ("group", "batch", "none")},
    "grpo normalize_then_sum": two(multi_objective_aggregation="normalize_then_sum"),
    "grpo normalize_then_sum, beta": two(multi_objective_aggregation="normalize_then_sum", beta=0.3),
    "grpo normalize_then_sum, cut": two(multi_objective_aggregation="normalize_then_sum", **CUT),
    "grpo a reward that does not apply to all": grpo("lengths"),
    "grpo clip higher": one(epsilon=0.05, epsilon_high=0.4),
    "grpo two-sided clip": one(delta=1.05, epsilon=0.01),
    **{
        f"grpo {name}, truncated": one(loss_type=name, mask_truncated_completions=True)
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
    },
    "grpo truncated, beta": one(mask_truncated_completions=True, beta=0.3),
    "grpo top entropy": one(top_entropy_quantile=0.4),
    "grpo top entropy, beta": one(loss_type="grpo", top_entropy_quantile=0.4, beta=0.3),
    **{f"grpo {name}, entropy bonus": one(loss_type=name, entropy_coef=0.2) for name in ("grpo", "dapo")},
    "grpo entropy bonus of the top": one(entropy_coef=0.2, top_entropy_quantile=0.4),
    "grpo off-policy mask": one(off_policy_mask_threshold=0.05, vllm_importance_sampling_correction=False),
    "grpo temperature": one(temperature=0.7, beta=0.3),
    **{f"grpo {name}, environment": one(loss_type=name, env_mask=True) for name in ("grpo", "dapo", "vespo")},
    "grpo environment, truncated": one(env_mask=True, mask_truncated_completions=True),
    "grpo lora": one(lora=True),
    "grpo lora, beta": one(lora=True, beta=0.3),
    "rloo": rloo(),
    "rloo without a reference": rloo(beta=0.0),
    "rloo, strong pull": rloo(beta=0.5, num_generations=2),
    "rloo, on policy": rloo(num_iterations=1),
    "rloo, cut": rloo(**CUT),
    "rloo, two steps": rloo(num_iterations=1, **HALVES),
    "rloo two rewards": rloo("sums", "lengths"),
    "rloo a reward that does not apply to all": rloo("lengths"),
    "rloo, clip higher": rloo(epsilon=0.05, epsilon_high=0.4),
    "rloo, normalised": rloo(normalize_advantages=True),
    "rloo, normalised, some unscored": rloo("lengths", normalize_advantages=True),
    "rloo, clipped rewards": rloo(reward_clip_range=[0.5, 1.2]),
    "rloo, temperature": rloo(temperature=0.7),
    "rloo lora": rloo(lora=True),
}  # fmt: skip
GRPO_DIFFERENT: dict[str, dict[str, Any]] = {
    "rloo, truncated": rloo(mask_truncated_completions=True),
    "grpo cispo, the same cap": one(loss_type="cispo"),
    "grpo bnpo, cut": one(loss_type="bnpo", **CUT),
    "grpo top entropy, cut": one(top_entropy_quantile=0.4, **CUT),
    "grpo entropy bonus, cut": one(entropy_coef=2.0, **CUT),
    "grpo off-policy mask, correction unset": one(off_policy_mask_threshold=0.05),
}


def replaying(case: dict[str, Any], end: Any) -> dict[str, Any]:
    """The trainer's `rollout_func` and `reward_funcs`."""
    rollouts = itertools.count()

    def replay(prompts: list[str], trainer: Any) -> dict[str, Any]:
        torch.manual_seed(_seed_that_keeps_halves(len(prompts)))
        rng = random.Random(f"rollout {next(rollouts)}")
        completions = [_completion(rng, end) for _ in prompts]
        found = {
            "prompt_ids": [list(prompt.encode()) for prompt in prompts],
            "completion_ids": completions,
            "logprobs": [[rng.uniform(-7, -4) for _ in ids] for ids in completions],
        }
        masks = [[1] + [rng.randrange(2) for _ in ids[1:]] for ids in completions]
        return found | {"env_mask": masks} if case["env_mask"] else found

    # Made here: functions of a module run in a process of their own, which these do not need.
    def sums(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [sum(ids) % 11 / 5 for ids in completion_ids]

    def lengths(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        return [None if ids[0] % 3 == 0 else len(ids) / LONGEST for ids in completion_ids]

    known: dict[str, Callable[..., Any]] = {"sums": sums, "lengths": lengths}
    return {"rollout_func": replay, "reward_funcs": [known[name] for name in case["rewards"]]}


def _completion(rng: random.Random, end: int) -> list[int]:
    ids = [rng.randrange(256) for _ in range(rng.randint(3, LONGEST))]
    return [*ids[:-1], end] if rng.random() < 0.7 else ids


def _seed_that_keeps_halves(count: int) -> int:
    """A seed after which torch shuffles `count` things without moving one from one half to the other."""
    first = set(range(count // 2))
    for seed in itertools.count():
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        if set(order[: count // 2].tolist()) == first:
            return seed
    raise AssertionError
