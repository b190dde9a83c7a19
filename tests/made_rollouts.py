"""Online trainers around tiny models, for tests of rollouts in the loop."""

import functools
import json
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import TrainingArguments

from light_rewards import even_tokens, short
from made_runs import largest_difference, weights_of
from made_tokenizers import byte_tokenizer
from tiny_models import tiny
from upweight.config.config import SECTIONS, Config
from upweight.config.sections.model import ModelSection
from upweight.config.sections.rollout import RolloutSection
from upweight.config.sections.run import RunSection
from upweight.config.sections.training import OptimSection, ShardingSection
from upweight.methods import GRPO
from upweight.models.load import disable_dropout
from upweight.rewards.load import as_rewards
from upweight.train.assemble import TrainerParts
from upweight.train.objects import Objects
from upweight.train.online.assemble import build_rollouts
from upweight.train.online.feed import SaveRollouts
from upweight.train.policy import make_policy
from upweight.train.trainer import MethodTrainer

STILL = ("seconds", "runtime", "per_second", "idle", "step_time")  # in names of metrics that depend on the clock
WORDS = ("a", "be", "cat", "dogs", "zebra")


def prompts(tokenizer, count: int = 5, words=WORDS) -> Dataset:
    """Prompt rows as prepared data has them, with an answer column."""
    texts = [f"say {words[n % len(words)]}{'!' * (n // len(words))} " for n in range(count)]
    return Dataset.from_list(
        [
            {
                "prompt_ids": tokenizer.encode(text, add_special_tokens=False),
                "prompt": text,
                "answer": words[n % len(words)],
            }
            for n, text in enumerate(texts)
        ]
    )


def chat_model(tokenizer, **options):
    """A tiny model for the tokenizer."""
    model = tiny("llama", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id,
                 eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **options)  # fmt: skip
    disable_dropout(model)
    return model


def online_trainer(
    folder,
    *,
    method=None,
    rewards=(even_tokens, short),
    section=None,
    rows: int = 5,
    step: int = 8,
    wanted: int | None = None,
    iterations: int = 1,
    adapter: bool = False,
    model=None,
    words=WORDS,
    rollout_func=None,
    evaluation: int = 0,
    budget: int = 4096,
    world: int = 1,
    seed: int = 5,
    context=None,
    env_setup=None,
    template: str | None = None,
    tokenizer=None,
    data=None,
    **options,
):
    """A trainer of a tiny model with plain SGD; `options` are those of TrainingArguments."""
    method = method or GRPO(**{"num_generations": 4, "max_completion_length": 6})
    tokenizer = tokenizer or byte_tokenizer("chatml", template)
    model = chat_model(tokenizer) if model is None else model
    model = adapted(model) if adapter else model
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{
            "use_cpu": True, "per_device_train_batch_size": step, "per_device_eval_batch_size": step,
            "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
            "max_steps": 3, "logging_steps": 1, "logging_nan_inf_filter": False, "disable_tqdm": True,
            "report_to": "none", "save_strategy": "no", "remove_unused_columns": False, "seed": seed,
            "ignore_data_skip": True, **options,
        },
    )  # fmt: skip
    sharding = "fsdp" if arguments.fsdp else "deepspeed" if arguments.deepspeed else "none"
    policy = make_policy(
        model,
        method,
        torch.float32,
        torch.device("cpu"),
        longest=128,
        tokenizer=tokenizer,
        optim=OptimSection(token_budget=budget),
        section=ModelSection(),
        context=context,
        sharding=sharding,
    )
    processes, size = PartialState().num_processes, 1 if context is None else context.size
    config = made_config(
        method,
        optim=OptimSection(token_budget=budget, micro_batch_size=step * world * size // processes, seed=seed),
        rollout=RolloutSection(
            num_iterations=iterations, generation_batch_size=(wanted or step) * world, **(section or {})
        ),
        run=RunSection(output_dir=str(folder)),
        sharding=ShardingSection(context_parallel_size=size),
    )
    rows = prompts(tokenizer, rows, words) if data is None else data
    names = env_setup.environment.reward_names if env_setup else ()
    scored = as_rewards([_here(reward) for reward in rewards], environment=names)
    rollouts = build_rollouts(config, Objects(rollout_func=rollout_func), policy, rows, scored, env_setup=env_setup)
    held = held_out(tokenizer, data, evaluation) if evaluation else None
    parts = TrainerParts(policy, arguments, rollouts.producer.rows, held, rollouts=rollouts)
    trainer = MethodTrainer(parts)
    trainer.add_callback(SaveRollouts(rollouts))
    return trainer


def made_config(method, **sections) -> Config:
    """A config of this method with these sections, and defaults elsewhere."""
    plain = {name: kind() for name, kind in SECTIONS.items()}
    return Config(**plain | sections, method=method, set_keys={}, folder=Path())


def held_out(tokenizer, data, count: int) -> Dataset:
    """Rows to evaluate on: the first of those given, or prompts."""
    return prompts(tokenizer, count) if data is None else data.select(range(count))


def logged(trainer):
    """What a run logged, without what depends on the clock."""
    return [
        {name: value for name, value in row.items() if not any(word in name for word in STILL)}
        for row in trainer.state.log_history
        if "loss" in row
    ]


def resumed_as_whole(make, folder: Path, steps: int, at: int, **options):
    """A run of `steps` by `make`, after one that was taken up again at a checkpoint was found to be the same."""
    options |= {"save_strategy": "steps", "save_steps": at}
    whole = make(folder / "whole", max_steps=steps, **options)
    whole.train()
    make(folder / "broken", max_steps=at, **options).train()
    resumed, checkpoint = make(folder / "broken", max_steps=steps, **options), folder / "broken" / f"checkpoint-{at}"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert logged(resumed)[at:] == logged(whole)[at:]
    assert largest_difference(weights_of(resumed), weights_of(whole)) == 0
    assert json.loads((checkpoint / "rollouts.json").read_text())["producer"]["rollouts"] >= 1
    return whole


def taught(tokenizer, texts, letters: str, length: int = 3, steps: int = 60):
    """A model that goes on with random letters, so that sampling starts at chance and not in the whole vocabulary."""
    model = chat_model(tokenizer)
    known = torch.tensor([tokenizer.encode(letter, add_special_tokens=False)[0] for letter in letters])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        loss = torch.zeros(())
        for text in texts:
            drawn = known[torch.randint(len(known), (8, length), generator=generator)]
            ids = torch.cat([torch.tensor(text).expand(8, -1), drawn, torch.full((8, 1), tokenizer.eos_token_id)], 1)
            logits = model(input_ids=ids).logits[:, len(text) - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, len(text) :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def adapted(model):
    """The model under a LoRA adapter that is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def _here(reward):
    """A reward that runs in this process, which starts sooner than a worker that imports this file."""

    @functools.wraps(reward)
    def call(**given):
        return reward(**given)

    call.__module__ = "__main__"
    return call
