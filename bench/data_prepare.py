"""Preparing preference pairs for DPO: ours, from file to written cache, against TRL's tokenisation of loaded rows."""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.__main__ import PEER, ROOT, peer_python

WORDS = 5000
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_rows(folder: Path, rows: int, *, messages: bool, distinct: int = WORDS) -> None:
    """Pairs of words by Zipf's law, as messages or as plain text, and a byte-level tokenizer trained on such words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(distinct)]
    weights = list(accumulate(1 / (rank + 1) for rank in range(distinct)))

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(words, cum_weights=weights, k=rng.randint(low, high)))

    def turn(role: str, content: str) -> Any:
        return [{"role": role, "content": content}] if messages else content

    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(rows):
            sides = {side: turn("assistant", text(20, 150)) for side in ("chosen", "rejected")}
            file.write(json.dumps({"prompt": turn("user", text(20, 120)), **sides}) + "\n")
    write_tokenizer(folder / "tokenizer", [text(100, 200) for _ in range(300)])


def write_tokenizer(folder: Path, corpus: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def cpu_seconds() -> float:
    """Processor time of this process and of those it has waited for."""
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def ours(folder: Path, processes: int) -> dict[str, Any]:
    """Seconds of our preparation in this process, and of a second run that finds the cache."""
    from transformers import AutoTokenizer

    from upweight.config import parse_config
    from upweight.data.prepare import prepare

    keys = {"base_model": "none", "rl": "dpo", "sequence_len": 1024, "shuffle_merged_datasets": False}
    data = {"datasets": [{"path": "rows.jsonl"}], "dataset_prepared_path": str(folder / "ours")}
    config = parse_config({**keys, **data, "dataset_num_proc": processes}, folder=folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    wall, cpu = time.perf_counter(), cpu_seconds()
    prepared = prepare(config, tokenizer)
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    again = time.perf_counter()
    cached = prepare(config, tokenizer)
    assert prepared is not None
    assert cached is not None
    assert cached.report.cached
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "cached_s": time.perf_counter() - again,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rows": len(prepared.train),
        "first": [prepared.train[number] for number in range(min(20, len(prepared.train)))],
    }


def _same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two rows hold the same tokens; TRL keeps what its template writes after the end token."""
    sides = ("chosen_ids", "rejected_ids")
    return mine["prompt_ids"] == theirs["prompt_ids"] and all(
        theirs[side][: len(mine[side])] == mine[side] for side in sides
    )


def measure(rows: int, processes: int, *, messages: bool, distinct: int = WORDS) -> dict[str, Any]:
    """Both sides one after the other, each in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_rows(folder, rows, messages=messages, distinct=distinct)
        settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        settings |= {"HF_DATASETS_CACHE": str(folder / "hf"), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        commands = {
            "ours": [sys.executable, "-m", "bench.data_prepare", "--ours", folder, "--processes", str(processes)],
            "peer": [peer_python(), ROOT / "bench" / "peers" / "trl_prepare.py", folder, str(processes)],
        }
        sides = {
            name: json.loads(
                subprocess.run(
                    command, cwd=folder, env=os.environ | settings, stdout=subprocess.PIPE, check=True
                ).stdout
            )
            for name, command in commands.items()
        }
    mine, theirs = sides["ours"], sides["peer"]
    assert mine["rows"] == theirs["rows"] == rows
    return {
        "name": "data_prepare",
        "ours_s": round(mine["wall_s"], 2),
        "peer_s": round(theirs["wall_s"], 2),
        "ratio": round(theirs["wall_s"] / mine["wall_s"], 2),
        "cpu_ratio": round(theirs["cpu_s"] / mine["cpu_s"], 2),
        "cached_s": round(mine["cached_s"], 2),
        "ours_peak_mb": round(mine["peak_mb"]),
        "peer_peak_mb": round(theirs["peak_mb"]),
        "same_tokens": all(_same(a, b) for a, b in zip(mine["first"], theirs["first"], strict=True)),
        "rows": rows,
        "form": "messages" if messages else "text",
        "distinct_words": distinct,
        "processes": processes,
        "peer": PEER,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.data_prepare", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="pairs to prepare (default: 100000)")
    parser.add_argument("--processes", type=int, default=1, help="processes of each side (default: 1)")
    parser.add_argument("--text", action="store_true", help="plain text instead of messages")
    parser.add_argument("--words", type=int, default=WORDS, help=f"distinct words of the texts (default: {WORDS})")
    parser.add_argument("--ours", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        print(json.dumps(ours(options.ours, options.processes)))
    else:
        print(json.dumps(measure(options.rows, options.processes, messages=not options.text, distinct=options.words)))


if __name__ == "__main__":
    main()
