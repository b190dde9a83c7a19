"""EBFT trainers around tiny models, with rows as prepared data has them."""

import torch
from datasets import Dataset
from transformers import TrainingArguments

from made_rollouts import adapted, chat_model
from made_tokenizers import byte_tokenizer
from upweight.config.rollout import RolloutSection
from upweight.methods import EBFT
from upweight.rollout.plan import Plan
from upweight.rollout.strided import with_blocks
from upweight.train.build import trainer_parts
from upweight.train.matching import matching_of
from upweight.train.online import make_rollouts
from upweight.train.rollouts import KeepRollouts
from upweight.train.trainer import MethodTrainer

ANSWERS = ("the quick dog", "a fox", "jumps over the lazy answer", "dogs")
POLICY = {"num_generations": 4, "max_completion_length": 8}
BLOCKS = {"mode": "strided", "stride": 5, "context_length": 3, "generate_max_len": 4, "n_samples_per_prompt": 4}


def answered(tokenizer, count: int = 5, answers=ANSWERS, turns: int = 1) -> Dataset:
    """Prompts with their true answers; with `turns` above 1, conversations."""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    rows = []
    for number in range(count):
        prompt, answer = f"say {'!' * number} ", answers[number % len(answers)]
        truth = [[*ids(answer), tokenizer.eos_token_id]]
        for turn in range(1, turns):
            truth += [ids(f" and {turn}? "), [*ids(answer[::-1]), tokenizer.eos_token_id]]
        rows.append({"prompt": prompt, "prompt_ids": ids(prompt), "ground_truth": answer, "truth_ids": truth})
    return Dataset.from_list(rows)


def documents(tokenizer, texts=ANSWERS, prompt: int = 1) -> Dataset:
    """Whole texts, of which everything behind the prompt counts."""
    each = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return Dataset.from_list(
        [{"ids": ids, "scored": [n >= prompt for n in range(len(ids))], "prompt_length": prompt} for ids in each]
    )


def matching_trainer(
    folder,
    method: EBFT,
    rows=None,
    *,
    section=None,
    step: int = 8,
    wanted: int | None = None,
    iterations: int = 1,
    adapter: bool = False,
    model=None,
    evaluation: int = 0,
    budget: int = 4096,
    world: int = 1,
    seed: int = 5,
    **options,
):
    """A trainer of a tiny model with plain SGD; `options` are those of TrainingArguments."""
    tokenizer = byte_tokenizer("chatml")
    model = chat_model(tokenizer) if model is None else model
    model = adapted(model) if adapter else model
    strided = method.mode == "strided"
    if rows is None:
        rows = documents(tokenizer, [text * 3 for text in ANSWERS]) if strided else answered(tokenizer)
    rows = with_blocks(rows, method, "training") if strided else rows
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
    parts = trainer_parts(model, method, torch.float32, torch.device("cpu"), longest=128, budget=budget)
    rollouts = make_rollouts(
        model,
        parts["engine"],
        tokenizer,
        method,
        rows=rows,
        plan=Plan.fitting((wanted or step) * world, method.group_size, step * world, iterations),
        section=RolloutSection(**(section or {})),
        rewards=(),
        seed=seed,
        matching=matching_of(method, model, torch.float32, parts["reference"]),
    )
    trainer = MethodTrainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows.select(range(evaluation)) if evaluation else None,
        processing_class=tokenizer,
        rollouts=rollouts,
        **parts,
    )
    trainer.add_callback(KeepRollouts(rollouts))
    return trainer
