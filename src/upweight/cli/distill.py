"""`upweight distill-log`: a teacher's log-probs, written once."""

from pathlib import Path
from typing import Annotated

import typer

from upweight.cli.arguments import ConfigFile, Overrides


def distill_log(
    config: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write, ending in .parquet.")] = Path(
        "teacher.parquet"
    ),
) -> None:
    """Write the log-probs of a config's teacher for its data to a file, for trainings without the teacher."""
    from upweight.cli.inputs import load_with_notices
    from upweight.train.distill.log import write_log

    tokens = write_log(load_with_notices(config, overrides), output)
    size = output.stat().st_size
    print(f"{output}: {tokens} tokens, {size / max(tokens, 1):.0f} bytes each")
