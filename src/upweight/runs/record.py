"""The state of a run in `run.json`: start time, process, planned steps, and how it ended."""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from upweight.errors import UserError
from upweight.files import write_text
from upweight.log import logger
from upweight.processes import start_ticks
from upweight.runs.files import RECORD, this_machine
from upweight.runs.report.page import write_report


def about(trainer: Any) -> dict[str, Any]:
    """Return the planned steps, rows and ranks of a training for its record."""
    steps, held_out = trainer.args.max_steps, trainer.eval_dataset
    if steps <= 0:
        steps = math.ceil(trainer.args.num_train_epochs * len(trainer.get_train_dataloader()))
    return {
        "max_steps": steps,
        "rows": len(trainer.train_dataset),
        "held_out_rows": sum(map(len, held_out.values() if isinstance(held_out, Mapping) else [held_out or ()])),
        "ranks": trainer.args.world_size,
    }


@contextlib.contextmanager
def recorded(folder: Path, about: Mapping[str, Any], *, writes: bool) -> Iterator[None]:
    """Keep the record of a run while it trains, and write its report when it has ended in any way.

    `about` is stored in the record; `writes`: whether this rank writes it.
    """
    if not writes:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    process = {"pid": os.getpid(), "begun": start_ticks(os.getpid()), "machine": this_machine()}
    record = {"state": "running", "started": time.time(), **process, **about}
    write_text(folder / RECORD, json.dumps(record))
    end: dict[str, Any] = {"state": "done"}
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        end = {"state": "stopped"}
        raise
    except UserError as error:
        end = {"state": "failed", "message": str(error)}
        raise
    except BaseException as error:  # an exception that is not caught here would be recorded as done
        end = {"state": "failed", "message": f"{type(error).__name__}: {error}"}
        raise
    finally:
        write_text(folder / RECORD, json.dumps({**record, "ended": time.time(), **end}))
        report_on(folder)


def report_on(folder: Path) -> None:
    """Write the report of a run; an error in it is only logged."""
    if not folder.is_dir():
        return
    try:
        logger.info("report: %s", write_report([folder]))
    except Exception as error:  # it reads any files in the folder, and its error would hide the one that ended the run
        logger.warning("warning: the report could not be written: %r", error)
