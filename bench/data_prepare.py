"""Preparing preference pairs for DPO: ours, from file to written cache, against TRL's tokenisation of loaded rows.

    python -m bench.data_prepare --processes 2                      # pairs of made words
    python -m bench.data_prepare --processes 2 --file rows.jsonl    # of a file: chosen and rejected, or questions

Beside both stands what the tokenizer takes for the same texts and nothing else, each text once: the floor of a
preparation that has every text tokenized. Ours may lie below it, since it looks up words that come again.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.__main__ import PEER, ROOT, peer_python

WORDS = 5000
REAL_VOCABULARY = 32_000  # of a tokenizer that is trained on a file's texts
FLOOR_TEXTS = 1536  # tokenized together
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


def write_real_rows(folder: Path, source: Path, rows: int) -> int:
    """Write the pairs of a file as messages, and a tokenizer trained on their texts; return how many there are."""
    with (gzip.open if source.suffix == ".gz" else open)(source, "rt") as file:
        pairs = list(_pairs([json.loads(line) for line in file][:rows]))
    with (folder / "rows.jsonl").open("w") as file:
        for prompt, *answers in pairs:
            turns = [[{"role": "assistant", "content": answer}] for answer in answers]
            row = {"prompt": [{"role": "user", "content": prompt}], "chosen": turns[0], "rejected": turns[1]}
            file.write(json.dumps(row) + "\n")
    write_tokenizer(folder / "tokenizer", [text for pair in pairs for text in pair], REAL_VOCABULARY)
    return len(pairs)


def _pairs(rows: list[dict[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield prompt, chosen and rejected text; of questions with one answer, the row before has the rejected one."""
    for number, row in enumerate(rows):
        if "question" in row:
            yield row["question"], row["answer"], rows[number - 1]["answer"]
            continue
        letters = zip(row["chosen"], row["rejected"], strict=False)
        alike = next((place for place, (one, other) in enumerate(letters) if one != other), 0)
        prompt = row["chosen"][: row["chosen"].rfind(" ", 0, alike) + 1]
        chosen, rejected = (row[side][len(prompt) :] for side in ("chosen", "rejected"))
        if prompt and chosen and rejected:
            yield prompt, chosen, rejected


def write_tokenizer(folder: Path, corpus: list[str], vocabulary: int = 4000) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
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


def floor(folder: Path, processes: int) -> dict[str, Any]:
    """Seconds that the tokenizer takes for all texts of the rows, each once, in so many processes."""
    from transformers import AutoTokenizer

    texts: list[str] = []
    with (folder / "rows.jsonl").open() as file:
        for line in file:
            for value in json.loads(line).values():
                texts += [value] if isinstance(value, str) else [turn["content"] for turn in value]
    backend = AutoTokenizer.from_pretrained(folder / "tokenizer").backend_tokenizer

    def tokenize(first: int) -> None:
        for start in range(first * FLOOR_TEXTS, len(texts), processes * FLOOR_TEXTS):
            encodings = backend.encode_batch_fast(texts[start : start + FLOOR_TEXTS], add_special_tokens=False)
            _ = [encoding.ids for encoding in encodings]

    context = multiprocessing.get_context("fork")
    wall, cpu = time.perf_counter(), cpu_seconds()
    workers = [context.Process(target=tokenize, args=(number,)) for number in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_seconds() - cpu, "words": _distinct(texts)}


def _distinct(texts: list[str]) -> int:
    return len({word for text in texts for word in text.split(" ")})


def _same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two rows hold the same tokens; TRL keeps what its template writes after the end token."""
    sides = ("chosen_ids", "rejected_ids")
    return mine["prompt_ids"] == theirs["prompt_ids"] and all(
        theirs[side][: len(mine[side])] == mine[side] for side in sides
    )


def measure(
    rows: int, processes: int, *, messages: bool, distinct: int = WORDS, source: Path | None = None
) -> dict[str, Any]:
    """Both sides and the tokenizer alone, one after the other, each in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if source is None:
            write_rows(folder, rows, messages=messages, distinct=distinct)
        else:
            rows = write_real_rows(folder, source, rows)
        settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        settings |= {"HF_DATASETS_CACHE": str(folder / "hf"), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        commands = {
            "ours": [sys.executable, "-m", "bench.data_prepare", "--ours", folder, "--processes", str(processes)],
            "floor": [sys.executable, "-m", "bench.data_prepare", "--floor", folder, "--processes", str(processes)],
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
    mine, theirs, alone = sides["ours"], sides["peer"], sides["floor"]
    assert mine["rows"] == theirs["rows"] == rows
    return {
        "name": "data_prepare",
        "ours_s": round(mine["wall_s"], 2),
        "peer_s": round(theirs["wall_s"], 2),
        "ratio": round(theirs["wall_s"] / mine["wall_s"], 2),
        "cpu_ratio": round(theirs["cpu_s"] / mine["cpu_s"], 2),
        "tokenizer_s": round(alone["wall_s"], 2),
        "tokenizer_cpu_to": {  # that of each side; ours has fewer words tokenized
            "ours": round(alone["cpu_s"] / mine["cpu_s"], 2),
            "peer": round(alone["cpu_s"] / theirs["cpu_s"], 2),
        },
        "cached_s": round(mine["cached_s"], 2),
        "ours_peak_mb": round(mine["peak_mb"]),
        "peer_peak_mb": round(theirs["peak_mb"]),
        "same_tokens": all(_same(a, b) for a, b in zip(mine["first"], theirs["first"], strict=True)),
        "rows": rows,
        "form": "messages" if messages else "text",
        "distinct_words": alone["words"],
        "processes": processes,
        "peer": PEER,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.data_prepare", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="pairs to prepare (default: 100000)")
    parser.add_argument("--processes", type=int, default=1, help="processes of each side (default: 1)")
    parser.add_argument("--text", action="store_true", help="plain text instead of messages")
    parser.add_argument("--words", type=int, default=WORDS, help=f"distinct words of the texts (default: {WORDS})")
    parser.add_argument("--file", type=Path, help="texts of a JSON lines file, also .gz, in place of made words")
    parser.add_argument("--floor", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--ours", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        print(json.dumps(ours(options.ours, options.processes)))
    elif options.floor:
        print(json.dumps(floor(options.floor, options.processes)))
    else:
        given = {"messages": not options.text, "distinct": options.words, "source": options.file}
        print(json.dumps(measure(options.rows, options.processes, **given)))


if __name__ == "__main__":
    main()
