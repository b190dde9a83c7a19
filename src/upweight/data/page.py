"""The page about a config's data: one HTML file, without scripts and without requests."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from upweight.config import Config
from upweight.data.prepare import Prepared
from upweight.data.stream.build import mixture_lines
from upweight.data.summary import Source, Summary, examples, summarize
from upweight.files import write_text
from upweight.log import counted
from upweight.runs.report.page import plain_page

EXAMPLES = 12
LONGEST_TEXT = 4000  # characters of an example or a row
BARS, WIDTH, HEIGHT = 40, 640, 150


def write_page(parts: Sequence[tuple[Config, Prepared]], title: str, path: Path) -> None:
    """Write the page about prepared data; of several stages, one after the other."""
    bodies = [_body(config, prepared, summarize(config, prepared)) for config, prepared in parts]
    heads = [f"<h2>Stage {number + 1}</h2>" if len(parts) > 1 else "" for number in range(len(parts))]
    body = "".join(head + text for head, text in zip(heads, bodies, strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(
        path,
        plain_page(title, f'<section class="head"><p class="lead">Data</p><h1>{escape(title)}</h1></section>{body}'),
    )


def _body(config: Config, prepared: Prepared, summary: Summary) -> str:
    limits = {"prompt": config.data.max_prompt_length, "sequence": config.data.sequence_len}
    charts = (_chart(name, values, limits.get(name)) for name, values in summary.lengths.items())
    sections = {
        "": _tiles(summary),
        "Sources": _sources(summary.sources),
        "Mixture": "".join(f"<p>{escape(line)}</p>" for line in mixture_lines(config, prepared.report)),
        "Lengths in tokens": f'<div class="groups">{"".join(charts)}</div>',
        "Turns by role": _roles(summary.sources),
        "Rows that resemble others": _alike(summary),
        "Examples": "".join(_examples(prepared)),
    }
    return "".join(
        f"<section>{f'<h2>{name}</h2>' * bool(name)}{text}</section>" for name, text in sections.items() if text
    )


def _tiles(summary: Summary) -> str:
    train = [source for source in summary.sources if not source.evaluation]
    tokens, trained = sum(source.tokens for source in train), sum(source.trained for source in train)
    values = {
        "Rows to train on": f"{sum(source.kept for source in train):,}",
        "Rows to evaluate on": f"{sum(source.kept for source in summary.sources if source.evaluation):,}",
        "Tokens": f"{tokens:,}",
        "Trained on": _share(trained, tokens) if trained else "sampled",
        "Longest row": f"{int(summary.lengths['sequence'].max()):,}" if "sequence" in summary.lengths else "0",
    }
    tiles = (f'<div class="tile"><dt>{name}</dt><dd class="big">{value}</dd></div>' for name, value in values.items())
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _sources(sources: Sequence[Source]) -> str:
    tokens = sum(source.tokens for source in sources)
    rows = []
    for source in sources:
        changes = "; ".join(f"{count:,}: {reason}" for reason, count in source.changes.items())
        counts = [f"{source.tokens:,}", _share(source.tokens, tokens), _share(source.trained, source.tokens)]
        counts = [""] * len(counts) if source.evaluation else counts
        rows.append([source.where, _use(source), f"{source.read:,}", f"{source.kept:,}", *counts, changes])
    names = [
        "Dataset",
        "Use",
        "Rows read",
        "Kept",
        "Tokens",
        "Share of tokens",
        "Of them trained on",
        "Dropped or changed",
    ]
    return _table(names, rows)


def _roles(sources: Sequence[Source]) -> str:
    roles = list(dict.fromkeys(role for source in sources for role in source.roles))
    rows = [
        [source.where, _use(source), *(f"{source.roles[role]:,}" for role in roles)]
        for source in sources
        if source.roles
    ]
    return _table(["Dataset", "Use", *roles], rows) if roles else ""


def _use(source: Source) -> str:
    return "evaluation" if source.evaluation else "training"


def _alike(summary: Summary) -> str:
    comparison = summary.comparison
    lines = [
        f"{comparison.rows:,} training rows were compared, before any are dropped.",
        f"{comparison.same:,} have the same words as an earlier one.",
        f"{comparison.near:,} resemble an earlier one by {comparison.threshold:g} or more, "
        "those with the same words among them.",
    ]
    if comparison.contaminated is not None:
        lines.append(f"{comparison.contaminated:,} contain an evaluation row.")
    pairs = (
        f'<div class="example"><div class="said">{_text(first)}</div><div class="said">{_text(second)}</div></div>'
        for first, second in comparison.pairs
    )
    return f"<p>{' '.join(lines)}</p>{''.join(pairs)}"


def _examples(prepared: Prepared) -> Iterator[str]:
    yield '<p class="hint">What is trained on is marked.</p>'
    for example in examples(prepared, EXAMPLES):
        parts = []
        for column, text, trained in example.stretches:
            name = f'<span class="role">{escape(column)}</span>' if column else ""
            shown = f"<mark>{_text(text)}</mark>" if trained else _text(text)
            parts.append(f'<div class="message">{name}<span class="said">{shown}</span></div>' if column else shown)
        inside = "".join(parts)
        shown = inside if example.stretches[0][0] else f'<div class="said">{inside}</div>'
        yield f'<div class="example"><div class="small">{escape(example.where)}</div>{shown}</div>'


def _chart(name: str, lengths: NDArray[np.int64], limit: int | None) -> str:
    """Return a histogram; the limit of the config is a dashed line."""
    top = max(int(lengths.max()), limit or 0, 1)
    counts, _ = np.histogram(lengths, BARS, (0, top))
    width, most = WIDTH / BARS, max(int(counts.max()), 1)
    bars = []
    for number, count in enumerate(counts.tolist()):
        tall = HEIGHT * count / most
        tip = f"{round(number * top / BARS):,} to {round((number + 1) * top / BARS):,} tokens: {counted(count, 'row')}"
        place = f'x="{number * width:.1f}" y="{HEIGHT - tall:.1f}" width="{width - 1:.1f}" height="{tall:.1f}"'
        bars.append(f"<rect {place}><title>{tip}</title></rect>")
    at = WIDTH * (limit or 0) / top
    line = f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{HEIGHT}"/>' if limit else ""
    middle, most_tokens = int(np.median(lengths)), int(lengths.max())
    words = f"median {middle:,}, longest {most_tokens:,}{f', limit {limit:,}' if limit else ''}"
    axis = f'<text x="0" y="{HEIGHT + 14}">0</text><text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">{top:,}</text>'
    shape = f'class="bars" viewBox="0 0 {WIDTH} {HEIGHT + 18}" role="img" aria-label="{words}"'
    drawn = f"<svg {shape}>{''.join(bars)}{line}{axis}</svg>"
    caption = f'<figcaption><span class="chart-title">{name.capitalize()}</span></figcaption>'
    note = f'<p class="small">{words}</p>'
    return f'<figure class="chart">{caption}{drawn}{note}</figure>'


def _table(names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0%"


def _text(text: str) -> str:
    shown = text.encode("utf-8", "replace").decode("utf-8")
    return escape(
        shown if len(shown) <= LONGEST_TEXT else f"{shown[:LONGEST_TEXT]} … ({len(shown) - LONGEST_TEXT:,} more)"
    )
