"""`upweight preprocess`: fill the cache of prepared data, say what came of it, show rows."""

import json
from pathlib import Path

from upweight.config import load_config
from upweight.data.prepare import prepare, shown_rows
from upweight.log import logger, warn_once
from upweight.models.tokenizer import load_tokenizer


def run(path: Path, overrides: list[str], *, show: int, tokens: bool) -> None:
    """Prepare a config's data; the summary goes to stderr, `show` rows as JSON lines to stdout."""
    config = load_config(path, overrides)
    for notice in config.notices:
        warn_once(notice)
    tokenizer = load_tokenizer((config.stages or (config,))[0].model)  # later stages have it from the first
    for stage in config.stages or (config,):
        prepared = prepare(stage, tokenizer)
        for line in prepared.report.lines():
            logger.info("%s", line)
        for row in shown_rows(stage, prepared, show, tokens=tokens):
            print(json.dumps(row, ensure_ascii=False))
