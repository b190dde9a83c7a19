"""TRL's side of a GPU case: its trainer's own `training_step` on replayed tokens; a line in, a JSON line out.

argv: the folder of the case, and the dtype of the weights. The rollout and its scoring count in a whole step only.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
WORK = json.loads((FOLDER / "work.json").read_text())
WHOLE = WORK["name"] == "grpo_whole_step"  # completions are sampled, and go on to the longest length
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the trainer prints is not an answer

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl_arguments import step_arguments  # noqa: E402


def model() -> Any:
    """Random weights, as on our side."""
    torch.manual_seed(0)
    dtype = getattr(torch, sys.argv[2])
    torch.set_default_dtype(dtype)
    end, kind = None if WHOLE else 0, WORK.get("model_type", "qwen2")
    config = AutoConfig.for_model(kind, vocab_size=WORK["vocabulary"], eos_token_id=end, **WORK["shape"])
    with torch.device(WORK.get("device", "cuda")):
        made = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    if WORK["name"] == "dpo_step":  # which loads its reference by the model's name
        made.save_pretrained(FOLDER / "model")
        made.config._name_or_path = str(FOLDER / "model")
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    """The word `t7` is token 7."""
    vocabulary = {"</s>": WORK["vocabulary"] if WHOLE else 0, "<pad>": 1} | {
        f"t{n}": n for n in range(2, WORK["vocabulary"])
    }
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")


def settings(rows: int) -> dict[str, Any]:
    arguments = step_arguments(FOLDER, WORK["micro_batch"], rows)
    if "device" in WORK:  # a rehearsal without a GPU
        arguments |= {"use_cpu": True}
    return arguments | {"bf16": True, "gradient_checkpointing": True, "max_grad_norm": 1e9}


def lora() -> Any:
    if not WORK["lora_r"]:
        return None
    from peft import LoraConfig

    targets = {"target_modules": WORK.get("lora_modules", "all-linear")}
    targets |= {"target_parameters": WORK["lora_parameters"]} if "lora_parameters" in WORK else {}
    return LoraConfig(r=WORK["lora_r"], lora_alpha=32, task_type="CAUSAL_LM", **targets)


def grpo_trainer() -> Any:
    from trl import GRPOConfig, GRPOTrainer

    rows, size = WORK["rows"], len(WORK["rows"][0]["completions"])
    reward_of = {tuple(c): r for row in rows for c, r in zip(row["completions"], row["rewards"], strict=True)}

    def replay(prompts: list[str], trainer: Any) -> dict[str, Any]:
        chosen = [rows[int(prompt[1:]) - 2] for prompt in prompts]
        return {
            "prompt_ids": [row["prompt"] for row in chosen],
            "completion_ids": [row["completions"][n % size] for n, row in enumerate(chosen)],
            "logprobs": None,
        }

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [reward_of[tuple(ids)] for ids in completion_ids]

    longest = max(len(ids) for row in rows for ids in row["completions"])
    config = GRPOConfig(
        **settings(size * len(rows)), num_generations=size, max_completion_length=longest, shuffle_dataset=False
    )
    prompts = Dataset.from_list([{"prompt": f"t{n + 2}"} for n in range(len(rows))])
    return GRPOTrainer(
        model(), reward, args=config, train_dataset=prompts, rollout_func=replay, processing_class=tokenizer(),
        peft_config=lora(),
    )  # fmt: skip


def whole_trainer() -> Any:
    from trl import GRPOConfig, GRPOTrainer

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [sum(ids) % 101 / 100 for ids in completion_ids]

    size = WORK["completions"]
    config = GRPOConfig(
        **settings(size * len(WORK["rows"])), num_generations=size, max_completion_length=WORK["new_tokens"]
    )
    prompts = Dataset.from_list([{"prompt": " ".join(f"t{token}" for token in row["prompt"])} for row in WORK["rows"]])
    return GRPOTrainer(
        model(), reward, args=config, train_dataset=prompts, processing_class=tokenizer(), peft_config=lora()
    )


def dpo_trainer() -> Any:
    from trl import DPOConfig, DPOTrainer

    def text(ids: list[int]) -> str:
        return " ".join("</s>" if token == 0 else f"t{token}" for token in ids)

    rows = [{key: text(ids) + " " * (key == "prompt") for key, ids in row.items()} for row in WORK["rows"]]
    config = DPOConfig(**settings(len(rows)), model_init_kwargs=None)
    return DPOTrainer(
        model(), args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), peft_config=lora()
    )


class OnDemand(TrainerCallback):
    """Starts a step when a line comes in; answers when its metrics are logged."""

    seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        while (asked := sys.stdin.readline()) == "rest\n":
            torch.cuda.empty_cache()
        if not asked:
            os._exit(0)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        OnDemand.seconds = 0.0

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        answer = {
            "s": OnDemand.seconds,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "loss": logs["loss"],
            "grad_norm": logs["grad_norm"],
        }
        print(json.dumps(answer), file=ANSWERS, flush=True)


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock(trainer: Any, method: str, sign: int) -> None:
    inner = getattr(trainer, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        wait_for_gpu()
        start = time.perf_counter()
        result = inner(*args, **kwargs)
        wait_for_gpu()
        OnDemand.seconds += sign * (time.perf_counter() - start)
        return result

    setattr(trainer, method, timed)


def main() -> None:
    trainer = {"grpo_step": grpo_trainer, "dpo_step": dpo_trainer, "grpo_whole_step": whole_trainer}[WORK["name"]]()
    clock(trainer, "training_step", 1)
    if WORK["name"] == "grpo_step":
        clock(trainer, "_generate_and_score_completions", -1)
    trainer.add_callback(OnDemand())
    trainer.train()


main()
