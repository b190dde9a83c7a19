"""TRL's side of a case, run by TRL's own Python: one trainer step for each line on stdin, one JSON line on stdout.

The clock runs over `training_step` (forward, loss, backward), less the replayed rollout inside it; in a whole step the
rollout is sampled, and counts. The learning rate is zero: every step sees the same weights.
"""

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
WORK = json.loads((FOLDER / "work.json").read_text())
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the trainer prints is not an answer

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl_arguments import step_arguments  # noqa: E402

torch.set_num_threads(int(sys.argv[2]))
ROLLOUT = "_generate_and_score_completions"


class OnDemand(TrainerCallback):
    """Starts a step when a line comes in; answers with its seconds when its metrics are logged."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = self.rollout_s = 0.0

    def clock(self, trainer: Any, method: str, sign: int) -> None:
        """Count (sign 1) or discount (sign -1) the time that a method of the trainer takes; 0: it is counted."""
        inner = getattr(trainer, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            result = inner(*args, **kwargs)
            self.wall_s += sign * (time.perf_counter() - wall)
            self.cpu_s += sign * (time.process_time() - cpu)
            if method == ROLLOUT:
                self.rollout_s += time.perf_counter() - wall
            return result

        setattr(trainer, method, timed)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not sys.stdin.readline():
            sys.exit(0)
        self.wall_s = self.cpu_s = self.rollout_s = 0.0

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        metrics = {key: kwargs["logs"][key] for key in ("loss", "grad_norm")}
        metrics["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if WORK["new_tokens"]:
            tokens = kwargs["logs"]["completions/mean_length"] * len(WORK["rows"]) * WORK["completions"]
            metrics |= {"rollout_s": self.rollout_s, "training_s": self.wall_s - self.rollout_s, "tokens": tokens}
        print(json.dumps({"wall_s": self.wall_s, "cpu_s": self.cpu_s} | metrics), file=ANSWERS, flush=True)


def settings(rows_per_step: int) -> dict[str, Any]:
    """Trainer arguments that both methods share; float32, no checkpointing, as on our side."""
    arguments = step_arguments(FOLDER, WORK["micro_batch"], rows_per_step)
    return arguments | {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}


def text(ids: list[int]) -> str:
    return " ".join("</s>" if token == 0 else f"t{token}" for token in ids)


def grpo_trainer() -> Any:
    """A GRPOTrainer that replays the case's completions and rewards; the prompts are their row numbers."""
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    rows = WORK["rows"]
    size = len(rows[0]["completions"])
    reward_of = {tuple(c): r for row in rows for c, r in zip(row["completions"], row["rewards"], strict=True)}

    def replay(prompts: list[str], trainer: Any) -> dict[str, Any]:
        of_prompts = [rows[int(prompt)] for prompt in prompts]
        return {
            "prompt_ids": [row["prompt"] for row in of_prompts],
            "completion_ids": [row["completions"][n % size] for n, row in enumerate(of_prompts)],
            "logprobs": None,
        }

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [reward_of[tuple(ids)] for ids in completion_ids]

    longest = max(len(ids) for row in rows for ids in row["completions"])
    config = GRPOConfig(
        **settings(size * len(rows)), num_generations=size, max_completion_length=longest, shuffle_dataset=False
    )
    prompts = Dataset.from_list([{"prompt": str(n)} for n in range(len(rows))])
    return GRPOTrainer(str(FOLDER / "model"), reward, args=config, train_dataset=prompts, rollout_func=replay)


def sampling_trainer() -> Any:
    """A GRPOTrainer that samples with `generate`; completions go on to the longest length, as on our side."""
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [sum(ids) % 101 / 100 for ids in completion_ids]

    config = GRPOConfig(
        **settings(WORK["completions"] * len(WORK["rows"])),
        num_generations=WORK["completions"],
        max_completion_length=WORK["new_tokens"],
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER / "model", padding_side="left")
    prompts = Dataset.from_list([{"prompt": text(row["prompt"])} for row in WORK["rows"]])
    return GRPOTrainer(str(FOLDER / "model"), reward, args=config, train_dataset=prompts, processing_class=tokenizer)


def distillation_trainer() -> Any:
    """A DistillationTrainer whose student samples with `generate`, up to the longest length."""
    from trl import DistillationConfig, DistillationTrainer  # pyright: ignore[reportMissingImports]

    config = DistillationConfig(
        **settings(len(WORK["rows"])),
        max_completion_length=WORK["new_tokens"],
        model_init_kwargs={"dtype": "float32"},
        teacher_model_init_kwargs={"dtype": "float32"},
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER / "model", padding_side="left")
    prompts = Dataset.from_list([{"prompt": text(row["prompt"])} for row in WORK["rows"]])
    models = str(FOLDER / "model"), str(FOLDER / "teacher")
    return DistillationTrainer(*models, args=config, train_dataset=prompts, processing_class=tokenizer)


def gkd_trainer() -> Any:
    """A GKDTrainer on the case's completions, in their order; its loss is JSD with the mean of both."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer  # pyright: ignore[reportMissingImports]

    rows = [
        {
            "prompt": text(row["prompt"]),
            "input_ids": row["prompt"] + row["completion"],
            "completion_mask": [0] * len(row["prompt"]) + [1] * len(row["completion"]),
        }
        for row in WORK["rows"]
    ]
    config = GKDConfig(
        **settings(len(rows)),
        lmbda=0.0,
        train_sampling_strategy="sequential",
        model_init_kwargs={"dtype": "float32"},
        teacher_model_init_kwargs={"dtype": "float32"},
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER / "model")
    models = str(FOLDER / "model"), str(FOLDER / "teacher")
    return GKDTrainer(*models, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


OFFLINE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dpo_step": ("trl", "DPO", {}),
    "kto_step": ("trl", "KTO", {}),
    "orpo_step": ("trl.experimental.orpo", "ORPO", {}),
    "simpo_step": ("trl.experimental.cpo", "CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "reward_step": ("trl", "Reward", {}),
    "moe_step": ("trl", "DPO", {}),
}


def offline_trainer() -> Any:
    """A trainer on the case's rows, in their order."""
    module, name, options = OFFLINE[WORK["name"]]
    library = importlib.import_module(module)
    rows = [
        {key: ids if key == "label" else text(ids) + " " * (key == "prompt") for key, ids in row.items()}
        for row in WORK["rows"]
    ]
    config = getattr(library, f"{name}Config")(
        **settings(len(rows)), train_sampling_strategy="sequential", disable_dropout=True, **options
    )
    # AutoTokenizer would take the model's kind for the tokenizer's.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER / "model")
    return getattr(library, f"{name}Trainer")(
        str(FOLDER / "model"), args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


def main() -> None:
    online = {"grpo_step": grpo_trainer, "grpo_whole_step": sampling_trainer}
    online["distillation_whole_step"] = distillation_trainer
    trainer = (gkd_trainer if WORK["name"] == "gkd_step" else online.get(WORK["name"], offline_trainer))()
    on_demand = OnDemand()
    on_demand.clock(trainer, "training_step", 1)
    if WORK["name"] in online:
        on_demand.clock(trainer, ROLLOUT, 0 if WORK["new_tokens"] else -1)
    trainer.add_callback(on_demand)
    trainer.train()


main()
