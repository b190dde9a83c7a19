"""Held-out cross-entropy of supervised fine-tuning and of EBFT, in both modes, at equal steps: one JSON line each.

python -m bench.gpu_ebft --folder MODEL_FOLDER --gguf FILE --rows GSM8K.jsonl [--steps N] [--only CASE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HELD_OUT = 64
BATCH = 32
COMMON: dict[str, Any] = {
    "chat_template": "tokenizer_default_fallback_chatml", "val_set_size": HELD_OUT, "micro_batch_size": BATCH,
    "gradient_accumulation_steps": 1, "lr_scheduler": "constant", "warmup_steps": 0, "max_grad_norm": 1.0,
    "logging_steps": 5, "save_strategy": "no", "eval_on_start": True, "sequence_len": 512,
}  # fmt: skip
TRL = {"num_generations": 4, "max_completion_length": 256, "temperature": 0.7}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 1e-5},
    "structured": {"learning_rate": 5e-6, "rl": "ebft", "ebft": {"ce_coef": 0.03}, "trl": TRL},
    "strided": {
        "learning_rate": 5e-6,
        "rl": "ebft",
        "ebft": {"mode": "strided", "use_whitening": True, "ce_coef": 0.03},
    },
}
TYPES = {
    "sft": "chat_template",
    "structured": "ebft_chat_multiturn.transform",
    "strided": "ebft_strided_chat.transform",
}


def run(name: str, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One training from the same weights on the same rows: what the held-out answers cost before and after."""
    rows = folder / "rows.jsonl"
    entry = {"path": str(rows), "type": TYPES[name]}
    content = {
        **COMMON, **CASES[name], "base_model": asked.folder, "datasets": [entry], "max_steps": asked.steps,
        "eval_steps": max(asked.steps // 5, 1), "output_dir": str(folder / name),
        "dataset_prepared_path": str(folder / "prepared"), **({"gguf_file": asked.gguf} if asked.gguf else {}),
    }  # fmt: skip
    file = folder / f"{name}.json"  # JSON is YAML
    file.write_text(json.dumps(content))
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "upweight", "train", str(file)], check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    key = "eval_loss" if name == "sft" else "eval_ebft/ce_loss"
    held_out = {line["step"]: round(line[key], 4) for line in lines if key in line}
    features = [line for line in lines if "ebft/cfm_loss" in line]
    return {
        "case": name,
        "steps": asked.steps,
        "held_out_cross_entropy": held_out,
        "cfm_loss": [round(line["ebft/cfm_loss"], 4) for line in features],
        "alignment": [round(line["ebft/alignment"], 4) for line in features],
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_ebft", description=__doc__)
    parser.add_argument("--folder", required=True, help="the model's folder or hub id")
    parser.add_argument("--gguf", help="its weights, where they are in one GGUF file")
    parser.add_argument("--rows", required=True, help="JSON lines of question and answer")
    parser.add_argument("--count", type=int, default=2000, help="rows to take")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", choices=CASES)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = [json.loads(line) for line in Path(asked.rows).read_text().splitlines()[: asked.count]]
        talks = [
            [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            for row in rows
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        for name in CASES:
            if asked.only in (None, name):
                print(json.dumps(run(name, asked, folder)), flush=True)


if __name__ == "__main__":
    main()
