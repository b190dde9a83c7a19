"""Run folders as a run leaves them, written by hand: no training needed."""

import json
from pathlib import Path

import yaml

CONFIG = {
    "rl": "grpo", "base_model": "tiny", "datasets": [{"path": "rows.jsonl"}], "learning_rate": 1e-4, "max_steps": 40,
    "micro_batch_size": 8, "gradient_accumulation_steps": 2, "wandb_api_key": "s3cret",
    "trl": {"reward_funcs": ["rewards.correct", "length"], "reward_weights": [2.0, 0.5], "num_generations": 2},
}  # fmt: skip
VERDICT = {
    "name": "kl explosion", "level": "alarm", "step": 7, "metric": "kl", "value": 2.5, "relation": "above",
    "threshold": 2.0, "steps": 5, "meaning": "the policy has left the reference behind", "remedy": "raise `trl.beta`",
}  # fmt: skip


def as_lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def metrics(step: int) -> dict:
    """What an online run logs in a step."""
    return {
        "step": step, "loss": 0.01, "reward": step / 100, "reward_std": 0.2, "rewards/correct/mean": 0.5,
        "rewards/correct/std": 0.1, "rewards/length/mean": 0.3, "rewards/length/std": 0.1, "kl": 0.01 * step,
        "completions/mean_length": 9.0, "completions/min_length": 2.0, "completions/max_length": 16.0, "mine": 1.0,
        "tokens_per_second": 123.4, "epoch": 0.1,
    }  # fmt: skip


def with_pictures(run: Path, step: int) -> None:
    """Two completions of a step: both with a red image in their prompt, the first with a blue one of a tool."""
    from PIL import Image

    for name in ("red", "blue"):
        Image.new("RGB", (60, 30), name).save(run.parent / f"{name}.png")
    red, blue = ([{"digest": name, "path": str(run.parent / f"{name}.png")}] for name in ("red", "blue"))
    rows = [completion(step, 0, images=red, observed_images=blue), completion(step, 1, images=red)]
    (run / "completions" / f"step_{step:05d}.jsonl").write_text(as_lines(rows))


def completion(step: int, place: int = 0, **keys) -> dict:
    return {
        "step": step, "rollout": step, "version": step, "row": place // 2, "answer": "Rome",
        "prompt": [{"role": "user", "content": f"question {place // 2}"}], "completion": f"answer {place}",
        "tokens": 2, "finished": True, "rewards": {"correct": 1.0, "length": None}, "advantage": 0.5, **keys,
    }  # fmt: skip


def write_run(folder: Path, *, steps: int = 10, record: dict | None = None, rows=None, config: dict | None = None):
    """A run folder with so many steps, three files of completions, an evaluation at each end and a verdict."""
    (folder / "completions").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config or CONFIG))
    first, last = ({"step": at, "eval_reward": 0.1 + at, "eval_rewards/correct/mean": 0.5} for at in (0, steps))
    (folder / "metrics.jsonl").write_text(as_lines(rows or [first, *map(metrics, range(1, steps + 1)), last]))
    (folder / "health.jsonl").write_text(as_lines([VERDICT]))
    (folder / "run.json").write_text(json.dumps(record or {"state": "done", "started": 1e9, "ended": 1e9 + 60}))
    for name, step in (("step", 1), ("step", steps), ("eval_step", 0), ("eval_step", steps)):
        file = folder / "completions" / f"{name}_{step:05d}.jsonl"
        file.write_text(as_lines(completion(step, place) for place in range(4)))
    return folder
