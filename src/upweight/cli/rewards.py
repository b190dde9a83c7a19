"""`upweight rewards`: a config's rewards tried without training."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from upweight.cli.inputs import load_with_notices, read_rows
from upweight.log import counted, quiet_transformers

LONGEST_SHOWN = 240  # characters of an example
WIDTH = 120  # of the table where there is no terminal


def run(
    path: Path, overrides: list[str], *, completions: Path | None, prompts: int, count: int | None, as_json: bool
) -> int:
    """Print what each reward gives, as tables and remarks or as one JSON object; return 1 if they cannot train."""
    config = load_with_notices(path, overrides)
    from upweight.train.online.try_rewards import try_on_rows, try_on_samples

    quiet_transformers()
    tried = try_on_rows(config, read_rows(completions)) if completions else try_on_samples(config, prompts, count)
    plain = tried.as_plain()
    if as_json:
        print(json.dumps(plain, ensure_ascii=False))
        return int(not plain["works"])
    console = Console(width=None if Console().is_terminal else WIDTH)
    total = plain["completions"]
    table = Table(title=f"{counted(total, 'completion')} of {counted(plain['prompts'], 'prompt')}")
    for column in ("reward", "mean", "lowest", "highest", "spread in groups", "None", "failed", "seconds"):
        table.add_column(column, justify="left" if column == "reward" else "right")
    for reward in plain["rewards"]:
        figures = [reward[name] for name in ("mean", "lowest", "highest", "spread_within_groups")]
        shown = ["-" if value is None else f"{value:.4g}" for value in figures]
        shares = [f"{reward[name] / total:.0%}" for name in ("does_not_apply", "failed")]
        table.add_row(reward["name"], *shown, *shares, f"{reward['seconds']:.3g}")
    console.print(table)
    for reward in plain["rewards"]:
        for kind in ("best", "worst"):
            for example in reward[kind]:
                text = json.dumps(example["completion"], ensure_ascii=False)
                text = text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + ' ..."'
                console.print(f"{reward['name']}, {kind} {example['score']:.4g}: {text}", markup=False, highlight=False)
    for line in [f"- {remark}" for remark in plain["remarks"]] or ["Every reward separates completions."]:
        console.print(line, markup=False, highlight=False)
    return int(not plain["works"])
