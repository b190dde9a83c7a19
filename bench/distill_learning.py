"""Held-out KL of students of one teacher at equal steps: on policy, and SFT on the teacher's answers; JSON lines.

python -m bench.distill_learning --folder MODEL_FOLDER [--gguf FILE] [--steps N] [--keep FOLDER]

The teacher is the model after SFT on sums in words, answered as GSM8K does. Students begin with the model itself, see
the same prompts in the same order, and differ in one key: who writes the answers, and what is learned from them.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, HELD_OUT, NEW_TOKENS = 8, 24, 32
RATE = 1e-4
UPPER = r"model\.layers\.2\d\."  # of SmolLM2: the upper third, as in the demo
COMMON: dict[str, Any] = {
    "chat_template": "tokenizer_default_fallback_chatml", "micro_batch_size": BATCH, "gradient_accumulation_steps": 1,
    "learning_rate": RATE, "lr_scheduler": "constant", "warmup_steps": 0, "max_grad_norm": 1.0, "logging_steps": 1,
    "unfrozen_parameters": [UPPER], "seed": 1,
}  # fmt: skip
STUDENTS: dict[str, dict[str, Any]] = {
    "on_policy": {"on_policy": 1, "divergence": "reverse_kl"},
    "sft": {"on_policy": 0, "seq_kd": True, "coef": 0, "ce_coef": 1},
    "off_policy": {"on_policy": 0, "seq_kd": True, "divergence": "forward_kl"},
}
# Who writes the held-out answers that are compared: the student that is measured, or the teacher.
MEASURES: dict[str, dict[str, Any]] = {
    "reverse_kl": {"on_policy": 1},
    "forward_kl": {"on_policy": 0, "seq_kd": True},
}
NAMES = ("Anna", "Tom", "Mary", "Sam", "Lucy", "Ben", "Rosa", "Omar")
THINGS = ("apples", "books", "coins", "pens", "stamps", "cards", "shells", "nuts")


def row(draw: random.Random) -> dict[str, Any]:
    """A sum in words with an answer in GSM8K's form, worded in one of two ways."""
    name, thing, a, b = draw.choice(NAMES), draw.choice(THINGS), draw.randint(11, 40), draw.randint(2, 9)
    event, sign, result = draw.choice(
        [("buys {b} more", "+", a + b), ("gives {b} away", "-", a - b), ("then gets {b} times as many", "*", a * b)]
    )
    question = f"{name} has {a} {thing} and {event.format(b=b)}. How many {thing} is that?"
    worked = draw.choice([f"{name} has {a} {sign} {b} = {result} {thing}.", f"{a} {sign} {b} = {result} {thing}."])
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": f"{worked}\n#### {result}"}]
    return {"messages": talk}


def write_rows(folder: Path) -> None:
    draw = random.Random(0)
    rows = {json.dumps(row(draw)): None for _ in range(3000)}
    lines = list(rows)
    prompts = [json.dumps({"prompt": json.loads(line)["messages"][:1]}) for line in lines]
    parts = {"rows": lines[HELD_OUT:], "prompts": prompts[HELD_OUT:], "held_out": prompts[:HELD_OUT]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in part))


def upweight(command: str, folder: Path, name: str, **keys: Any) -> str:
    """What `upweight COMMAND` prints for these keys."""
    file = folder / f"{name}.json"  # JSON is YAML
    content = {**COMMON, "output_dir": str(folder / name), "dataset_prepared_path": str(folder / "prepared"), **keys}
    file.write_text(json.dumps(content))
    arguments = [sys.executable, "-m", "upweight", command, str(file)]
    done = subprocess.run(arguments, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def distilled(folder: Path, block: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The keys of a student, or of its measurement."""
    return {
        "rl": "distill", "distill": {"teacher": str(folder / "teacher"), **block}, **model,
        "trl": {"max_completion_length": NEW_TOKENS}, "datasets": [{"path": str(folder / "prompts.jsonl")}],
    }  # fmt: skip


def measured(folder: Path, name: str, model: dict[str, Any]) -> dict[str, float]:
    """Both KLs of a student from the teacher on held-out prompts, in nats a token."""
    values: dict[str, float] = {}
    for measure, block in MEASURES.items():
        held_out = {"test_datasets": [{"path": str(folder / "held_out.jsonl")}]}
        text = upweight("evaluate", folder, f"{name}_{measure}", **distilled(folder, block, model), **held_out)
        answer = json.loads(text[text.index("{") :])
        values[measure] = round(answer[f"eval_distill/{measure}"], 4)
        print(f"{name}: {values}", file=sys.stderr, flush=True)
        values["agreement"] = round(answer["eval_distill/agreement"], 3)  # the last: on the teacher's answers
    return values


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.distill_learning", description=__doc__)
    parser.add_argument("--folder", required=True, help="the model's folder or hub id")
    parser.add_argument("--gguf", help="its weights, where they are in one GGUF file")
    parser.add_argument("--steps", type=int, default=12, help="of each student")
    parser.add_argument("--teacher-steps", type=int, default=12)
    parser.add_argument("--points", type=int, default=3, help="of each curve, counted from its end")
    parser.add_argument("--only", choices=STUDENTS, action="append", help="train these students")
    parser.add_argument("--keep", type=Path, help="folder for runs and rows; models that are there are used")
    asked = parser.parse_args()
    start = {"base_model": asked.folder, **({"gguf_file": asked.gguf} if asked.gguf else {})}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(folder)
        began = time.perf_counter()
        if not (folder / "teacher" / "model.safetensors").is_file():
            data = {"datasets": [{"path": str(folder / "rows.jsonl"), "type": "chat_template"}]}
            options = {"max_steps": asked.teacher_steps, "save_strategy": "no"}
            upweight("train", folder, "teacher", **start, **data, **options)
        if asked.points > 1:
            print(json.dumps({"case": "start", **measured(folder, "start", start)}), flush=True)
        every = max(asked.steps // 3, 1)
        for name in asked.only or STUDENTS:
            options = {"max_steps": asked.steps, "save_steps": every, "eval_strategy": "no", "save_only_model": True}
            if not (folder / name / f"checkpoint-{asked.steps}").is_dir():
                upweight("train", folder, name, **distilled(folder, STUDENTS[name], start), **options)
            for step in range(every, asked.steps + 1, every)[-asked.points :]:
                values = measured(folder, name, {"base_model": str(folder / name / f"checkpoint-{step}")})
                print(json.dumps({"case": name, "step": step, **values}), flush=True)
        print(json.dumps({"seconds": round(time.perf_counter() - began)}), flush=True)


if __name__ == "__main__":
    main()
