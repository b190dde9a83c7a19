"""Unsloth's side of a GPU case: the `training_step` of its trainer on the same tokens; a line in, a JSON line out.

argv: the folder of the case. It runs in an environment of its own, where Unsloth, TRL and bitsandbytes are installed.
An answer has the tokens that the step gave the model: `tokens` without padding, `padded_tokens` with it. Of a step that
samples too, `training_s` is what is left without sampling and scoring.
"""

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
WORK = json.loads((FOLDER / "work.json").read_text())
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is not an answer
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
if find_spec("unsloth") is None:
    sys.exit("unsloth is not installed in this environment; UNSLOTH_PYTHON names the Python that has it")

from unsloth import FastLanguageModel  # noqa: E402  # isort: skip  # before the libraries that it changes

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl_arguments import step_arguments  # noqa: E402
from unsloth_gpu_words import LINEAR, word_tokenizer  # noqa: E402


def model() -> Any:
    """The case's weights, with Unsloth's adapter and its checkpointing."""
    loaded, _ = FastLanguageModel.from_pretrained(
        WORK["model"], max_seq_length=WORK["longest"], dtype=torch.bfloat16, load_in_4bit=WORK["quantised"]
    )
    rank = {"r": WORK["lora_r"], "lora_alpha": 32, "lora_dropout": 0, "target_modules": LINEAR}
    return FastLanguageModel.get_peft_model(loaded, **rank, use_gradient_checkpointing="unsloth")


def tokenizer() -> Any:
    return word_tokenizer(WORK["vocabulary"])


def text(ids: list[int]) -> str:
    return " ".join("</s>" if token == 0 else f"t{token}" for token in ids)


def settings(rows: int) -> dict[str, Any]:
    arguments = step_arguments(FOLDER, WORK["micro_batch"], rows)
    return arguments | {"bf16": True, "gradient_checkpointing": True, "max_grad_norm": 1e9}


def dpo_trainer() -> Any:
    from trl import DPOConfig, DPOTrainer

    rows = [{key: text(ids) + " " * (key == "prompt") for key, ids in row.items()} for row in WORK["rows"]]
    config = DPOConfig(**settings(len(rows)), max_length=WORK["longest"])
    return DPOTrainer(model(), args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())


def sft_trainer() -> Any:
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": text(row["input_ids"])} for row in WORK["rows"]]
    config = SFTConfig(**settings(len(rows)), max_length=WORK["longest"], dataset_text_field="text")
    return SFTTrainer(model(), args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())


def grpo_trainer() -> Any:
    """A whole step: sampling, scoring and training."""
    from trl import GRPOConfig, GRPOTrainer

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [sum(ids) % 101 / 100 for ids in completion_ids]

    size = WORK["completions"]
    lengths = {"max_completion_length": WORK["new_tokens"]}
    config = GRPOConfig(**settings(size * len(WORK["rows"])), **lengths, num_generations=size)
    prompts = Dataset.from_list([{"prompt": text(row["prompt"])} for row in WORK["rows"]])
    return GRPOTrainer(model(), reward, args=config, train_dataset=prompts, processing_class=tokenizer())


class OnDemand(TrainerCallback):
    """Starts a step when a line comes in; answers when its metrics are logged."""

    seconds, sampling, tokens, padded = 0.0, 0.0, 0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        while (asked := sys.stdin.readline()) == "rest\n":
            torch.cuda.empty_cache()
        if not asked:
            os._exit(0)
        torch.cuda.reset_peak_memory_stats()
        OnDemand.seconds, OnDemand.sampling, OnDemand.tokens, OnDemand.padded = 0.0, 0.0, 0, 0

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        answer = {
            "s": OnDemand.seconds,
            **({"training_s": OnDemand.seconds - OnDemand.sampling} if OnDemand.sampling else {}),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "loss": logs["loss"],
            "grad_norm": logs["grad_norm"],
            "tokens": OnDemand.tokens,
            "padded_tokens": OnDemand.padded,
        }
        print(json.dumps(answer), file=ANSWERS, flush=True)


def clock(trainer: Any, method: str, counter: str) -> None:
    inner = getattr(trainer, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = inner(*args, **kwargs)
        torch.cuda.synchronize()
        setattr(OnDemand, counter, getattr(OnDemand, counter) + time.perf_counter() - start)
        return result

    setattr(trainer, method, timed)


def count_tokens(trained: Any) -> None:
    """Count what goes through the embeddings with gradients: a reference, sampling and scoring are not training."""
    embeddings = trained.get_input_embeddings()

    def count(module: Any, args: Any) -> None:
        if torch.is_grad_enabled() and trained.training:
            OnDemand.tokens += int((args[0] != 1).sum())
            OnDemand.padded += args[0].numel()

    embeddings.register_forward_pre_hook(count)


def main() -> None:
    trainer = {"dpo_step": dpo_trainer, "sft_step": sft_trainer, "grpo_whole_step": grpo_trainer}[WORK["name"]]()
    count_tokens(trainer.model)
    clock(trainer, "training_step", "seconds")
    if WORK["name"] == "grpo_whole_step":
        clock(trainer, "_generate_and_score_completions", "sampling")
    trainer.add_callback(OnDemand())
    trainer.train()


main()
