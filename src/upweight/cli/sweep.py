"""`upweight sweep`: one config trained with several values of some keys, and a table of how each did."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from upweight.cli.arguments import AsJson, ConfigFile
from upweight.errors import UserError

Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE,VALUE...", help="Keys to try: learning_rate=1e-6,1e-5.")
]


def sweep(
    config: ConfigFile,
    arguments: Arguments = None,
    *,
    output: Annotated[Path | None, typer.Option(help="Folder of the sweep; `sweep` in `output_dir` otherwise.")] = None,
    metric: Annotated[
        str | None, typer.Option(help="Metric that compares trials; default: eval_reward, eval_loss, reward...")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Try so many combinations, drawn at random.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of --trials.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Print the table as it stands, and train nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a config with several values of some keys; start it again to continue after an interruption."""
    from upweight.config import load_config
    from upweight.runs.lock import lock_folder
    from upweight.runs.sweep.plan import check_trials, plan_trials
    from upweight.runs.sweep.run import run_trials
    from upweight.runs.sweep.table import PAGE, TABLE, results_of, write_table

    shared, planned = plan_trials(arguments or [], most=trials, seed=seed)
    folder = output.expanduser() if output else Path(load_config(config, shared).run.output_dir) / "sweep"
    check_trials(config, shared, planned, folder)
    about = {"config": str(config), "keys": shared}

    def write() -> None:
        write_table(folder, *results_of(folder, planned, metric), about)

    finished = True
    if not show:
        with lock_folder(folder):
            write()
            finished = run_trials(config, shared, planned, folder, write)
    elif not folder.is_dir():
        raise UserError(f"{folder}: there is no sweep yet; leave --show out.")
    name, results = results_of(folder, planned, metric)
    if as_json:
        print((folder / TABLE).read_text(encoding="utf-8"))
    else:
        _print_table(name, results)
        print(folder / PAGE)
    if not finished or any(result.state == "failed" for result in results):
        raise typer.Exit(1)


def _print_table(metric: str, results: Sequence[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from upweight.runs.sweep.table import rows_of

    titles, cells = rows_of(metric, results)
    table = Table(*titles)
    for row in cells:
        table.add_row(*row)
    Console().print(table)
