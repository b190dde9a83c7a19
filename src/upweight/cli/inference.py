"""`upweight inference` and `upweight score`: completions of a trained model, and scores of a reward model."""

import dataclasses
import json
import re
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from upweight.cli.inputs import (
    find_trained,
    lines_of,
    parse_row,
    read_rows,
    text_format_of,
    text_of,
    trained_on,
    utf8_from,
)
from upweight.data.raw_row import RowError
from upweight.errors import UserError
from upweight.files import atomic_path
from upweight.inference.generate import TextGenerator, load_text_generator
from upweight.inference.score import ScoreModel, load_score_model
from upweight.log import quiet_transformers
from upweight.types import ImageRef, Sampling

CHAT_HELP = "/reset clears the conversation; /quit or Ctrl-D ends."
AT_ONCE = 64  # rows between two writes


def print_text(text: str) -> None:
    """Print a piece of a completion; a terminal gets no control characters, which would move it or ring its bell."""
    shown = text
    if sys.stdout.isatty():
        shown = "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)
    print(shown, end="", flush=True)


def run_score(target: str, file: Path, overrides: list[str], *, output: Path | None, chat: bool) -> None:
    """Write every row with its score (and those of its steps) as JSON lines to stdout or to `output`."""
    quiet_transformers()
    rows = read_rows(file)
    model = find_trained(target, overrides)
    data, entry, templated = text_format_of(model)
    options = {"data": data, "entry": entry, "chat": chat or templated, "folder": file.parent}
    scorer = load_score_model(model.model, model.adapter, **options)
    if output is None:
        _write_scores(scorer, rows, sys.stdout)
        return
    with atomic_path(output) as part, part.open("w", encoding="utf-8") as opened:
        _write_scores(scorer, rows, opened)


def _write_scores(scorer: ScoreModel, rows: list[dict[str, Any]], out: TextIO) -> None:
    for start in range(0, len(rows), AT_ONCE):
        batch = rows[start : start + AT_ONCE]
        for row, scores in zip(batch, scorer(batch, first=start), strict=True):
            summary: dict[str, Any] = {"score": scores[0]}
            if scorer.head == "step_score":
                summary = {"step_scores": scores, "mean": sum(scores) / len(scores), "min": min(scores)}
            out.write(json.dumps({**row, **summary}, ensure_ascii=False) + "\n")
        out.flush()


def run_inference(
    target: str,
    overrides: list[str],
    *,
    prompt: str | None,
    file: Path | None,
    chat: bool,
    sampling: Mapping[str, Any],
    count: int,
    as_json: bool,
    images: list[str] | None = None,
    **options: Any,
) -> None:
    """Print completions: of one prompt as text, of many as JSON lines, or chat; `options` go to TextGenerator."""
    if sum((prompt is not None, file is not None, chat)) > 1:
        raise UserError("--prompt, --file and --chat exclude each other")
    if images and prompt is None:
        raise UserError("--image goes with --prompt; rows of --file have a column `images`")
    _refuse_prompt_among(overrides)
    _refuse_options(chat and bool(options.get("raw") or count > 1 or as_json), count, sampling)
    model = find_trained(target, overrides, or_base=True)  # before prompts are read from the terminal
    asked: dict[str, Any] = {"prompt": prompt} | ({"images": images} if images else {})
    rows = {"--prompt": asked} if prompt is not None else {} if chat else _read_rows(file)
    quiet_transformers()
    data, entry, _ = text_format_of(model)
    kept = {"data": data, "entry": entry, "folder": model.config.folder, "trained_on": trained_on(model)}
    generator = load_text_generator(model.model, model.adapter, **kept, **options)
    # Loading seeds torch's generator: without a random seed every call would sample the same.
    seed = secrets.randbits(31) if sampling["seed"] is None else sampling["seed"]
    drawn = Sampling(1, **{**sampling, "seed": seed})
    if chat:
        _chat(generator, drawn, seed)
        return
    if images and not generator.reads_images:
        raise UserError("--image: this model reads no images, or its processor is missing")
    encoded = [_encode_row(generator, row, at) for at, row in rows.items()]
    prompts = [ids for ids, _ in encoded]
    shown_images = tuple(refs for _, refs in encoded)
    if prompt is None or as_json:
        for start in range(0, len(prompts), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            some = shown_images[part] if any(shown_images[part]) else ()
            groups = generator(prompts[part], dataclasses.replace(drawn, seed=seed + start, images=some), count)
            for row, group in zip(list(rows.values())[part], groups, strict=True):
                for completion in group:  # with its row's columns, for `upweight score` and `upweight rewards`
                    shown = {**row, "completion": completion.text, "finished": completion.finished}
                    print(json.dumps(shown, ensure_ascii=False), flush=True)
        return
    drawn = dataclasses.replace(drawn, images=shown_images if any(shown_images) else ())
    if count == 1:
        generator(prompts, drawn, on_text=print_text)
        print()
    else:
        for number, completion in enumerate(generator(prompts, drawn, count)[0], 1):
            print_text(f"--- {number} of {count}\n{completion.text}\n")


def _refuse_prompt_among(overrides: list[str]) -> None:
    for word in overrides:
        if "=" not in word and not word.startswith("-") and (" " in word or len(overrides) == 1):
            raise UserError(f"{word[:80]}: is no key=value. A prompt is given as --prompt {word[:80]!r}")


def _refuse_options(beside_chat: bool, count: int, sampling: Mapping[str, Any]) -> None:
    """Raise for options that do not go together; `beside_chat`: some do not go with --chat."""
    if beside_chat:
        raise UserError("--chat goes with none of --raw, --count and --json")
    if count > 1 and sampling["temperature"] == 0:
        raise UserError("--temperature 0 always generates the same text: raise it, or leave --count out")


def _read_rows(file: Path | None) -> dict[str, dict[str, Any]]:
    """Return the rows of a file or of stdin by file and line: each line is a JSON object, or the text of a prompt."""
    if file is None and sys.stdin.isatty():
        what = "Prompts, one on each line; Ctrl-D on an empty line ends them, and all are answered"
        print(f"{what} (--chat answers each at once).", file=sys.stderr)
    with utf8_from("stdin"):  # in the C locale, sys.stdin itself lets any byte through
        text = sys.stdin.buffer.read().decode("utf-8") if file is None else text_of(file)
    name = file or "stdin"
    lines = lines_of(text, name)
    if not lines:
        raise UserError(f"{name}: has no prompt; give one with --prompt, or many with --file")
    if not next(iter(lines.values())).lstrip().startswith("{"):
        return {where: {"prompt": line} for where, line in lines.items()}
    return {where: parse_row(line, where, ", as the first line seems to be") for where, line in lines.items()}


def _encode_row(generator: TextGenerator, row: Mapping[str, Any], where: str) -> tuple[list[int], tuple[ImageRef, ...]]:
    try:
        return generator.encode_with_images(row)
    except RowError as error:
        raise UserError(f"{where}: {error}") from error


def _chat(generator: TextGenerator, sampling: Sampling, seed: int) -> None:
    """Chat turn by turn until the input ends."""
    if not generator.templated:
        raise UserError("--chat needs a chat template, and the tokenizer has none: name one, `chat_template: chatml`")
    print(CHAT_HELP, file=sys.stderr)
    messages: list[dict[str, str]] = []
    for turn, line in enumerate(iter(_read_line, None)):
        if line.strip() == "/reset":
            messages = []
        elif line.strip() in ("/exit", "/quit", "/bye"):
            return
        elif re.fullmatch(r"/(help|\?)\s*", line):
            print(CHAT_HELP, file=sys.stderr)
        elif line.strip():
            conversation = [*messages, {"role": "user", "content": line}]
            try:
                ids, _ = _encode_row(generator, {"prompt": conversation}, "chat")
            except UserError as error:
                print(f"{error}; /reset starts again", file=sys.stderr)
                continue
            ((completion,),) = generator([ids], dataclasses.replace(sampling, seed=seed + turn), on_text=print_text)
            print()
            messages = [*conversation, {"role": "assistant", "content": str(completion.text)}]


def _read_line() -> str | None:
    try:
        with utf8_from("stdin"):
            line = input("> " if sys.stdin.isatty() else "")
            return line.encode("utf-8", "surrogateescape").decode("utf-8")  # which input() may have let through as well
    except EOFError:
        return None
