"""The model card of an export: the card of its run, or the run's figures where it has none."""

from pathlib import Path
from typing import Any

import yaml

from upweight.runs.files import metrics_of
from upweight.version import __version__

FIGURES = ("loss", "eval_loss", "reward", "eval_reward", "accuracies", "kl", "entropy")
USE = """## Use

```python
from transformers import pipeline

ask = pipeline("text-generation", "{name}")
print(ask([{{"role": "user", "content": "..."}}], max_new_tokens=256)[0]["generated_text"][-1]["content"])
```

```bash
vllm serve {name}
```
"""


def exported_card(run: Path, base: str | None, name: str = "FOLDER_OR_REPOSITORY") -> str:
    """Return the card of a merged model: head for transformers, the run's figures, and how to use it."""
    head, body = _parts(run / "README.md")
    if not body:
        title = [f"# {run.resolve().name}", "", f"Trained with Upweight {__version__}.", "", "## Metrics", ""]
        body = "\n".join([*title, *_table(metrics_of(run))])
        head = {"base_model": base} if base and not Path(base).expanduser().exists() else {}
    tags = [tag for tag in head.get("tags", ["upweight"]) if tag != "lora"]
    head = {**head, "library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    merged = body.replace("An adapter for `", "Trained from `", 1)
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{merged.strip()}\n\n{USE.format(name=name)}"


def _parts(card: Path) -> tuple[dict[str, Any], str]:
    """Return the head and the text of a card; empty where there is none that can be read."""
    if not card.is_file():
        return {}, ""
    _, mark, rest = card.read_text(encoding="utf-8").partition("---\n")
    head, mark, body = rest.partition("\n---\n") if mark else ("", "", "")
    try:
        content = yaml.safe_load(head)
    except yaml.YAMLError:
        return {}, ""
    return (content, body) if isinstance(content, dict) and mark else ({}, "")


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table of the first and last values of the main metrics."""
    values: dict[str, list[float]] = {}
    for key, value in (item for row in rows for item in row.items()):
        if key.split("/")[-1] in FIGURES and isinstance(value, int | float):
            values.setdefault(key, []).append(value)
    lines = [f"| {key} | {logged[0]:.4g} | {logged[-1]:.4g} |" for key, logged in values.items()]
    return ["| metric | first | last |", "|---|---|---|", *lines] if lines else ["None were logged."]
