"""TRL's side of a case with images: its trainers' own `training_step`; a line in, a JSON line out.

argv: the folder of the case, the dtype of the weights, and the threads of a CPU (0: on a GPU, in bfloat16). Completions
are replayed, and reading prompts is not counted, except in a whole step, which samples with `generate`.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

FOLDER, GPU = Path(sys.argv[1]), sys.argv[3] == "0"
WORK = json.loads((FOLDER / "work.json").read_text())
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the trainer prints is not an answer

import torch  # noqa: E402
from bench.vision_parts import adapter, model, pair_rows, processor, prompt_rows  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer  # noqa: E402  # pyright: ignore
from trl_arguments import step_arguments  # noqa: E402

ROLLOUT = "_generate_and_score_completions"
if not GPU:
    torch.set_num_threads(int(sys.argv[3]))


def policy() -> Any:
    made = model(WORK, "cuda" if GPU else "cpu", getattr(torch, sys.argv[2]))
    if WORK["name"] == "vlm_dpo_step" and not WORK["lora_r"]:  # its reference is loaded by the model's name
        made.save_pretrained(FOLDER / "model")
        made.config._name_or_path = str(FOLDER / "model")
    return made


def settings(rows: int) -> dict[str, Any]:
    arguments = step_arguments(FOLDER, WORK["micro_batch"], rows)
    return arguments | {"use_cpu": not GPU, "bf16": GPU, "gradient_checkpointing": GPU, "max_grad_norm": 1e9}


def grpo_trainer() -> Any:
    rows, size, whole = WORK["rows"], WORK["completions"], WORK["name"] == "vlm_grpo_whole"
    reads = processor(WORK)
    prompts = prompt_rows(WORK)
    number_of = {row["prompt"][0]["content"]: number for number, row in enumerate(prompts)}
    reward_of = {tuple(c): r for row in rows for c, r in zip(row["completions"], row["rewards"], strict=True)}

    def replay(messages: list[Any], trainer: Any) -> dict[str, Any]:
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        ids = [reads.apply_chat_template(one, **options)["input_ids"] for one in messages]
        numbers = [number_of[next(p["text"] for p in one[0]["content"] if p["type"] == "text")] for one in messages]
        return {
            "prompt_ids": [one[0] if isinstance(one[0], list) else one for one in ids],
            "completion_ids": [rows[number]["completions"][n % size] for n, number in enumerate(numbers)],
            "logprobs": None,
        }

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [sum(ids) % 101 / 100 if whole else reward_of[tuple(ids)] for ids in completion_ids]

    lengths = {"num_generations": size, "max_completion_length": WORK["new_tokens"]}
    config = GRPOConfig(**settings(size * len(rows)), **lengths, shuffle_dataset=False)
    given = {"processing_class": reads, "peft_config": adapter(WORK)} | ({} if whole else {"rollout_func": replay})
    return GRPOTrainer(policy(), reward, args=config, train_dataset=Dataset.from_list(prompts), **given)


def dpo_trainer() -> Any:
    config = DPOConfig(**settings(len(WORK["rows"])), max_length=None, train_sampling_strategy="sequential")
    given = {"processing_class": processor(WORK), "peft_config": adapter(WORK)}
    return DPOTrainer(policy(), args=config, train_dataset=Dataset.from_list(pair_rows(WORK)), **given)


class OnDemand(TrainerCallback):
    """Starts a step when a line comes in; answers when its metrics are logged."""

    seconds = cpu = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        while (asked := sys.stdin.readline()) == "rest\n":
            torch.cuda.empty_cache()
        if not asked:
            os._exit(0)
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        OnDemand.seconds = OnDemand.cpu = 0.0

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        peak = torch.cuda.max_memory_allocated() if GPU else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer = {"s": OnDemand.seconds, "cpu_s": OnDemand.cpu, "peak_gib": peak / 2**30}
        print(
            json.dumps(answer | {key: kwargs["logs"][key] for key in ("loss", "grad_norm")}), file=ANSWERS, flush=True
        )


def clock(trainer: Any, method: str, sign: int) -> None:
    inner = getattr(trainer, method)
    wait = torch.cuda.synchronize if GPU else lambda: None

    def timed(*args: Any, **kwargs: Any) -> Any:
        wait()
        start, cpu = time.perf_counter(), time.process_time()
        result = inner(*args, **kwargs)
        wait()
        OnDemand.seconds += sign * (time.perf_counter() - start)
        OnDemand.cpu += sign * (time.process_time() - cpu)
        return result

    setattr(trainer, method, timed)


def main() -> None:
    trainer = dpo_trainer() if WORK["name"] == "vlm_dpo_step" else grpo_trainer()
    clock(trainer, "training_step", 1)
    if WORK["name"] == "vlm_grpo_step":
        clock(trainer, ROLLOUT, -1)
    trainer.add_callback(OnDemand())
    trainer.train()


main()
