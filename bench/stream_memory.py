"""Memory of training on streams of different sizes, summed over all processes: it should not grow with the stream.

    python -m bench.stream_memory --megabytes 10 1000 --steps 60      # rows of about 1 kB
    python -m bench.stream_memory --rows 5000000 --steps 200          # small rows; memory early and late in the run
    python -m bench.stream_memory --rows 5000000 --steps 200 --batch 256 --kill    # then again, killed and resumed
    python -m bench.stream_memory --megabytes 10 1000 --drain         # every row is read and encoded, none trained on
    python -m bench.stream_memory --megabytes 10 1000 --drain --text unbroken --format parquet
    python -m bench.stream_memory --megabytes 10 1000 --drain --workers 1          # one process encodes the rows
    python -m bench.stream_memory --megabytes 10 10000 --drain --minutes 60        # ends there, and says how far it got

Prints one JSON line for each stream, with the largest memory in each tenth of its time, and the difference between the
largest and the smallest.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from bench.__main__ import ROOT
from bench.data_prepare import write_tokenizer

SECONDS_BETWEEN = 0.2
WORDS = 400


def made_texts(words: int) -> list[str]:
    """Return a thousand texts of so many words."""
    rng = random.Random(0)
    known = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(WORDS)]
    return [" ".join(rng.choices(known, k=words)) for _ in range(1000)]


def made_rows(megabytes: int | None, rows: int | None, text: str) -> Iterator[str]:
    """Yield texts of about 1 kB up to a size, or so many small ones."""
    texts = made_texts(160 if megabytes else 5)
    written = number = 0
    while written < megabytes << 20 if megabytes else number < (rows or 0):
        words = texts[number % 1000]
        if text == "new":  # half of the words stand in no other row
            words = " ".join(f"{word}{number:x}" if place % 2 else word for place, word in enumerate(words.split()))
        made = f"{number} {words}"
        yield made.replace(" ", "漢") if text == "unbroken" else made
        written, number = written + len(made), number + 1


def write_stream(file: Path, texts: Iterator[str]) -> int:
    """Write texts as JSON lines, or as a parquet file of one row group; return how many there are."""
    if file.suffix == ".jsonl":
        with file.open("w") as out:
            return sum(1 for text in texts if out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n"))
    rows = pa.table({"text": list(texts)})
    pyarrow.parquet.write_table(rows, file, row_group_size=max(len(rows), 1), use_dictionary=False)
    return len(rows)


def write_model(folder: Path) -> None:
    """Write a model of one small layer and a byte-level tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder, made_texts(160))
    size = len(AutoTokenizer.from_pretrained(folder))
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=size, num_key_value_heads=4, **shape)).save_pretrained(folder)


def config_of(
    folder: Path, file: Path, steps: int, batch: int = 16, *, save_steps: int | None = None, workers: int = 2
) -> dict[str, Any]:
    """Return the config of a run on a stream."""
    saved = {"save_strategy": "no"} if save_steps is None else {"save_steps": save_steps}
    return {
        "base_model": str(folder / "model"), "datasets": [{"path": str(file), "type": "completion"}],
        "streaming": True, "max_steps": steps, "micro_batch_size": batch, "sequence_len": 256, "logging_steps": 10,
        "output_dir": str(folder / f"out-{file.stem}"), "dataset_num_proc": workers, **saved,
    }  # fmt: skip


def train(config: Path, *, resume: bool = False) -> None:
    """Train what a config describes, in this process."""
    from upweight.config import load_config
    from upweight.train.run import train as run

    run(load_config(config), resume=resume)


def drain(config: Path, minutes: float) -> None:
    """Read and encode the rows of a config's stream, all or those of so many minutes, in this process."""
    from upweight.config import load_config
    from upweight.data.stream.build import build_feed
    from upweight.models.tokenizer import load_tokenizer

    loaded = load_config(config)
    feed = build_feed(loaded, load_tokenizer(loaded.model), None).feed
    (source,) = feed.sources
    began, rows = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < minutes * 60 and source.next() is not None:
        rows += 1
    print(json.dumps({"rows_read": rows, "rows_per_second": round(rows / seconds)}), flush=True)
    feed.close()


def tree_memory(root: int) -> int:
    """Return the bytes of a process and all below it; pages that they share count once."""
    total, waiting = 0, [root]
    while waiting:
        process = Path("/proc") / str(waiting.pop())
        try:
            lines = (process / "smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
            waiting += [
                int(one) for task in (process / "task").iterdir() for one in (task / "children").read_text().split()
            ]
        except (OSError, StopIteration):  # it has ended
            continue
    return total


def started(config: Path, mode: str, minutes: float = math.inf) -> subprocess.Popen[str]:
    """Start a mode in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.stream_memory", "--run", mode, str(config), "--minutes", str(minutes)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def losses(metrics: Path) -> dict[int, float]:
    """Return the losses that a run has logged so far, by step."""
    text = metrics.read_text() if metrics.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def killed_and_resumed(config: Path, metrics: Path, steps: int) -> dict[str, Any]:
    """Kill a run at two places and resume it each time; return whether its losses are those of the whole run."""
    whole, killed_at, mode = losses(metrics), list[int](), "train"
    shutil.rmtree(metrics.parent)
    for place in (steps // 3, steps * 3 // 4):
        process = started(config, mode)
        while process.poll() is None and max(losses(metrics), default=0) < place:
            time.sleep(SECONDS_BETWEEN / 4)
        process.kill()
        process.communicate()
        killed_at.append(max(losses(metrics)))
        mode = "resume"
    resumed = started(config, mode)
    resumed.communicate()
    if resumed.returncode:
        raise SystemExit(f"the resumed run failed with {resumed.returncode}")
    return {"killed_at_steps": killed_at, "same_losses": losses(metrics) == whole, "last_loss": whole[steps]}


def measured(config: Path, mode: str, metrics: Path, minutes: float) -> dict[str, Any]:
    """Run a mode in a process of its own; return the peak of its memory, and the largest by the step reached."""
    process = started(config, mode, minutes)
    series, by_step = list[int](), dict[int, int]()
    while process.poll() is None:
        used = tree_memory(process.pid)
        series.append(used)
        if logged := losses(metrics):
            step = max(logged)
            by_step[step] = max(used, by_step.get(step, 0))
        time.sleep(SECONDS_BETWEEN)
    assert process.stdout is not None
    printed = [json.loads(line) for line in process.stdout.read().splitlines() if line.startswith("{")]
    if process.returncode:
        raise SystemExit(f"the run failed with {process.returncode}")
    tenths = [max(series[len(series) * n // 10 : len(series) * (n + 1) // 10] or [0]) >> 20 for n in range(10)]
    found: dict[str, Any] = {"peak_mb": max(series) >> 20, "mb_by_tenth": tenths}
    found |= printed[-1] if mode == "drain" else {}
    if by_step:
        found["mb_by_step"] = {step: used >> 20 for step, used in sorted(by_step.items())}
    return found


def main() -> None:
    """Measure each stream and print what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, nargs="*", default=[])
    parser.add_argument("--rows", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2, help="processes that encode rows (dataset_num_proc)")
    parser.add_argument("--drain", action="store_true")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which a drain ends")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--text", choices=("words", "new", "unbroken"), default="words")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--run", nargs=2, metavar=("MODE", "CONFIG"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        mode, config = given.run[0], Path(given.run[1])
        drain(config, given.minutes) if mode == "drain" else train(config, resume=mode == "resume")
        return
    import yaml

    peaks: list[int] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        for megabytes, rows in [(size, None) for size in given.megabytes] + [(None, count) for count in given.rows]:
            file = folder / f"{megabytes or rows}.{given.format}"
            count = write_stream(file, made_rows(megabytes, rows, given.text))
            saved = given.steps // 5 if given.kill else None
            content = config_of(folder, file, given.steps, given.batch, save_steps=saved, workers=given.workers)
            config = folder / f"{file.stem}.yaml"
            config.write_text(yaml.safe_dump(content))
            mode = "drain" if given.drain else "train"
            metrics = Path(content["output_dir"]) / "metrics.jsonl"
            result = measured(config, mode, metrics, given.minutes)
            result |= killed_and_resumed(config, metrics, given.steps) if given.kill else {}
            peaks.append(result["peak_mb"])
            shape = {"megabytes": file.stat().st_size >> 20, "rows": count, "text": given.text, "format": given.format}
            shape["workers"] = given.workers
            print(json.dumps({"mode": mode, **shape, **result}), flush=True)
            file.unlink()
    if len(peaks) > 1:
        print(json.dumps({"largest_above_smallest_mb": max(peaks) - min(peaks)}))


if __name__ == "__main__":
    main()
