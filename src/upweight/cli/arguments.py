"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from upweight.errors import UserError, closest


def _refuse_mistyped_options(context: typer.Context, overrides: list[str] | None) -> list[str] | None:
    """Raise for a `--word` that is nearer to an option of the command than to any key; return the overrides."""
    words = [item[2:].partition("=")[0] for item in overrides or () if item.startswith("--")]
    if not words:
        return overrides
    from upweight.config.config import general_keys, method_keys
    from upweight.config.peers import TABLES

    listed = (key for table in ("no_effect", "not_here") for keys in TABLES[table].values() for key in keys)
    renamed = (key for table in ("renamed", "kd_keys", "other_names") for key in TABLES[table])
    keys = {path.split(".")[0] for path in (*general_keys(), *method_keys(), *listed, *renamed)} | {"set"}
    options = [
        name[2:] for one in context.command.params for name in (*one.opts, *one.secondary_opts) if name.startswith("--")
    ]
    for word in words:
        if "." not in word and "[" not in word and word.replace("-", "_") not in keys:
            near = closest(word, [*options, *sorted(keys)])
            if near in options:
                raise UserError(f"--{word}: no such option. Did you mean '--{near}'?")
    return overrides


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set: trl.beta=0.01.", callback=_refuse_mistyped_options),
]
TrainedTarget = Annotated[str, typer.Argument(metavar="CONFIG|FOLDER", help="Config that trained it, or its folder.")]
Processes = Annotated[
    int | None, typer.Option("--num-processes", min=1, help="Processes on this machine; default: one for each GPU.")
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folder, or its config; several to compare.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def gib(text: str) -> float:
    """Read the memory of a GPU."""
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 1 <= size < float("inf"):
        raise typer.BadParameter(f"got {text!r}; write GiB as a number, e.g. 8")
    return size


# `--trl.beta 0.1`, as other trainers write it, is an override too.
TAKES_OVERRIDES: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True}}


class WholeSentences(TyperGroup):
    """The commands, listed with whole sentences, not cut at the end of a line; those of others get advice."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0].replace("_", "-")
        if self.get_command(ctx, name) is None:
            from upweight.config.peers import TABLES

            if advice := TABLES["commands"].get(name):
                raise UserError(f"{args[0]}: is no command here. {advice}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        rows = [(one.name or "", one.get_short_help_str(limit=1000)) for one in commands if one and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
