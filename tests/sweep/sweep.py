"""Every model type of the installed transformers, each in a process of its own with a time limit.

`sweep.py run [TYPE ...]` judges all types that have no result yet, or those named, anew; each result is a line of
build/models.jsonl (`--results`). `sweep.py page docs/models.md` writes the page from these lines.
"""

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import transformers as hf

sys.path[0] = str(Path(__file__).parents[1])  # of a script that is its own folder, where `sweep` is this file

from sweep.judge import CLASSES, Task, Verdict, judge, types_of  # noqa: E402
from upweight.models.vision import FAMILIES  # noqa: E402

SECONDS = 120
_CLASS = re.compile(r"^\w+(For[A-Z]|LMHead|Model)\w*")  # with which a message begins; equal ones are listed once
_DIFFERENCE = re.compile(r"differ by [\d.e+-]+ \(limit ([\d.e-]+)\)")  # types that exceed a limit share a line
HEADERS: dict[Task, dict[str, str]] = {
    "language model": {"trees": "works, prefixes shared", "padded": "works, rows padded"},
    "classifier": {"trees": "works, prefixes shared", "padded": "works, rows padded"},
    "sampling": {
        "shared": "works, prompts shared",
        "generate": "works, by transformers' `generate`",
        "generate without a cache": "works, by `generate` without a cache",
    },
}
OTHERS = {"refused": "refused", "not built": "not measured", "not run": "not measured", "wrong": "wrong"}
TITLES: dict[Task, str] = {
    "language model": "Training a language model",
    "classifier": "Training a reward model",
    "sampling": "Sampling in the training process",
}


def main() -> None:
    """Arguments in; results or the page out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("build/models.jsonl"))
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("types", nargs="*")
    commands.add_parser("page").add_argument("page", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        run(given.results, set(given.types))
    else:
        given.page.write_text(page(_read(given.results)), encoding="utf-8")


def run(results: Path, named: set[str]) -> None:
    """Judge, and add a line for each task of a type."""
    done = {} if named else _read(results)
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        for task in CLASSES:
            for config in types_of(task):
                key = task, config.model_type
                if key in done or (named and config.model_type not in named):
                    continue
                start = time.monotonic()
                verdict = _apart(task, config)
                line = {"task": task, "type": config.model_type, **verdict._asdict()}
                line |= {"seconds": round(time.monotonic() - start, 1), "transformers": hf.__version__}
                print(json.dumps(line), file=file, flush=True)
                print(*line.values(), sep=" | ", flush=True)


def _apart(task: Task, config: Any) -> Verdict:
    """The verdict of a process that is ended when it takes too long, and may crash."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(judge(task, config)))
    process.start()
    sender.close()
    try:
        verdict = receiver.recv() if receiver.poll(SECONDS) else Verdict("not run", f"it took more than {SECONDS} s")
    except EOFError:
        process.join()
        verdict = Verdict("wrong", f"the process ended with {process.exitcode}")
    process.kill()
    process.join()
    return verdict


def _read(results: Path) -> dict[tuple[Task, str], Verdict]:
    """The last result of each task of each type."""
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {(line["task"], line["type"]): Verdict(line["outcome"], line["remark"]) for line in lines}


def page(results: dict[tuple[Task, str], Verdict]) -> str:
    """The results as a page of the documentation; types without one are listed as not run."""
    lines = [
        "# Models",
        "",
        f"This page says which model types of transformers {hf.__version__} can be trained and sampled. The type of a",
        "model is `model_type` in its `config.json`:",
        "",
        "```bash",
        """python -c "from transformers import AutoConfig; print(AutoConfig.from_pretrained('MODEL').model_type)\"""",
        "```",
        "",
        "Look for that name in the tables below. They are about text; the types that can be trained on images are",
        f"{', '.join(f'`{name}`' for name in FAMILIES)} ([vision](vision.md)).",
        "",
        "A GGUF file is read in place of a folder: `base_model: models/NAME.gguf`, or `base_model: models` with",
        "`gguf_file: NAME.gguf`. Its weights are dequantised when they are loaded, so it takes the memory of a model",
        "that is not quantised, and its tokenizer is read from the file. It needs the extra `gguf`.",
        "`upweight export --to gguf` writes one ([export](export.md)).",
        "",
        "| outcome | meaning |",
        "|---|---|",
        "| works, prefixes shared | The beginning that several sequences share is computed once (a "
        "[prefix tree](glossary.md)). |",
        "| works, rows padded | The results are as exact, but every sequence is computed in full, so steps with shared "
        "prompts take longer. |",
        "| works, prompts shared | A prompt is computed once for all its completions. |",
        "| works, by `generate` | Completions are sampled by transformers' `generate`, which is slower. |",
        "| refused | The run stops with a message before anything is trained. The second table gives the reason. |",
        "| not measured | No tiny model of this type could be built for the test. A run with such a model still "
        "compares its first batch and its first completions with the model's own forward, and stops if they differ. |",
        "",
        "## How this was measured",
        "",
        "`make models` tries every type with a tiny random model on a CPU and writes this page. For training it",
        "computes a batch of sequences that branch from each other, that are equal, and that are longer than attention",
        "windows. Log-probabilities (or scores) and all gradients have to equal those of transformers' own forward of",
        "each sequence alone. For sampling, the tokens and log-probabilities of greedy completions of prompts of",
        "several lengths have to equal those of that forward. `make test-models` fails if any type gives a wrong",
        "result instead of a refusal.",
    ]
    for task in CLASSES:
        lines += _section(task, {c.model_type: results.get((task, c.model_type)) for c in types_of(task)})
    return "\n".join(lines) + "\n"


def _section(task: Task, verdicts: dict[str, Verdict | None]) -> list[str]:
    """One task: how many types of each outcome and which, then the reasons."""
    known = {name: verdict or Verdict("not run") for name, verdict in verdicts.items()}
    counts = Counter(verdict.outcome for verdict in known.values())
    words = HEADERS[task] | OTHERS
    lines = ["", f"## {TITLES[task]}", "", f"{len(known)} types.", "", "| outcome | number | types |", "|---|---|---|"]
    for outcome in (outcome for outcome in words if counts[outcome]):
        names = ", ".join(f"`{name}`" for name, verdict in known.items() if verdict.outcome == outcome)
        lines.append(f"| {words[outcome]} | {counts[outcome]} | {names} |")
    reasons: dict[str, list[str]] = {}
    for name, verdict in known.items():
        if verdict.remark:
            remark = _DIFFERENCE.sub(r"differ by more than \1", _CLASS.sub("it", verdict.remark.replace("|", "/")))
            reasons.setdefault(f"{words[verdict.outcome]}: {remark}", []).append(name)
    if reasons:
        lines += ["", "| types | reason |", "|---|---|"]
        lines += [f"| {', '.join(f'`{n}`' for n in names)} | {reason} |" for reason, names in sorted(reasons.items())]
    return lines


if __name__ == "__main__":
    main()
