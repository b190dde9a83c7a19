"""The command line: every command's arguments; heavy imports happen inside the commands."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from upweight.errors import UserError
from upweight.log import set_up_logging

app = typer.Typer(
    help="Train language models from feedback, driven by one YAML file.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set, such as trl.beta=0.01.")
]

Processes = Annotated[
    int | None,
    typer.Option("--num-processes", min=1, help="Ranks to start on this machine; all visible GPUs when left out."),
]

# `--trl.beta 0.1`, as other trainers write it, is an override too.
TAKES_OVERRIDES: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True}}


@app.command(**TAKES_OVERRIDES)
def validate(
    config: ConfigFile,
    overrides: Overrides = None,
    fragment: Annotated[bool, typer.Option("--fragment", help="Do not ask for the keys a whole config needs.")] = False,
) -> None:
    """Check a config without touching anything else."""
    from upweight.cli.validate import run

    run(config, overrides or [], fragment=fragment)


@app.command(**TAKES_OVERRIDES)
def preprocess(
    config: ConfigFile,
    overrides: Overrides = None,
    show: Annotated[int, typer.Option(min=0, help="Print so many prepared rows as JSON lines.")] = 0,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token ids and loss masks too.")] = False,
) -> None:
    """Prepare the data of a config and fill its cache."""
    from upweight.cli.preprocess import run

    run(config, overrides or [], show=show, tokens=tokens)


@app.command(**TAKES_OVERRIDES)
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last whole checkpoint.")] = False,
    num_processes: Processes = None,
) -> None:
    """Train what a config describes."""
    from upweight.cli.train import run_train

    run_train(config, overrides or [], resume=resume, processes=num_processes)


@app.command(**TAKES_OVERRIDES)
def evaluate(config: ConfigFile, overrides: Overrides = None, num_processes: Processes = None) -> None:
    """Print the metrics of a config's model on its evaluation data as one JSON object."""
    from upweight.cli.train import run_evaluate

    run_evaluate(config, overrides or [], processes=num_processes)


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page instead.")] = False,
) -> None:
    """Print the JSON schema of the config."""
    from upweight.cli.schema import run

    run(as_markdown=markdown)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train language models from feedback, driven by one YAML file."""
    if version:
        from upweight import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run a command; what a user can mend is printed without a traceback and exits 2."""
    set_up_logging()
    try:
        app()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
