"""`upweight doctor`: finds problems of a machine, a config or a run, with remedies."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from upweight.cli.inputs import read_config
from upweight.errors import UserError
from upweight.log import quiet_transformers
from upweight.runs.files import no_such_run

if TYPE_CHECKING:
    from upweight.doctor.findings import Finding

MARKS = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "alarm": "ALARM  "}


def run(target: str | None, overrides: list[str], *, as_json: bool) -> int:
    """Print the findings; return 1 if something is wrong."""
    if target is not None and "=" in target and not Path(target).exists():
        raise UserError(f"{target}: a key can only be set after a config")
    path = Path(target).expanduser() if target is not None else None
    if path is not None and not path.exists():
        raise UserError(no_such_run(path, "config or run"))
    findings = _check_run(path) if path is not None and path.is_dir() else _check_machine(path, overrides)
    wrong = sum(finding.wrong for finding in findings)
    if as_json:
        print(json.dumps({"wrong": wrong, "findings": list(map(asdict, findings))}, ensure_ascii=False))
        return int(wrong > 0)
    for finding in findings:
        print(f"{MARKS[finding.level]} {finding.what}: {finding.says}")
        if finding.remedy:
            print(f"{'':8}{'remedy' if finding.wrong else 'hint'}: {finding.remedy}")
    print(f"\n{wrong} of {len(findings)} findings need action" if wrong else _all_well(findings))
    return int(wrong > 0)


def _check_run(folder: Path) -> "list[Finding]":
    """Judge a run by its folder, without the libraries that train, which take seconds to load."""
    from upweight.doctor.run import check_run

    return check_run(folder)


def _check_machine(path: Path | None, overrides: list[str]) -> "list[Finding]":
    """Check the machine, and the config where one is named."""
    config = read_config(path, overrides) if path is not None else None  # before what takes seconds to load

    from upweight.doctor.config import check_config
    from upweight.doctor.machine import check_machine

    quiet_transformers()
    return [*check_machine(), *(check_config(config) if config is not None else ())]


def _all_well(findings: "list[Finding]") -> str:
    """The last line where nothing needs action; a young run is not called well before it can be judged."""
    early = any(finding.what.endswith("too early") for finding in findings)
    return "\nnothing is wrong so far; it is too early to judge all of it" if early else "\nnothing is wrong"
