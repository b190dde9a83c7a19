"""`upweight check-method`: whether a method has the properties that training relies on."""

import textwrap
from pathlib import Path

import typer
import yaml

from upweight.errors import UserError

WIDTH = 116


def run(target: str, overrides: list[str], place: str | None) -> None:
    """Print each property of each method of a config, file or path; exit with 1 if one fails or cannot be checked."""
    from upweight.doctor.method_check.checks import Finding, check
    from upweight.doctor.method_check.targets import NAMES, Place, helpers_of, methods_of

    if place is not None and place not in NAMES:
        raise UserError(f"--as: one of {', '.join(NAMES)}, not {place}")
    options = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"{override}: expected KEY=VALUE")
        options[key] = value if target.endswith((".yaml", ".yml")) else yaml.safe_load(value)
    chosen: Place | None = next((one for one in NAMES if one == place), None)
    failed = 0
    for name, method in methods_of(target, options, chosen, Path.cwd()).items():
        print(name)
        findings = [Finding("cannot be checked", str(method))] if isinstance(method, UserError) else check(method)
        for finding in findings:
            verdict = "WRONG" if finding.problem else "-    " if finding.untried else "ok   "
            print(f"  {verdict}  {finding.name}")
            failed += finding.problem is not None
            for line in textwrap.wrap(finding.problem or finding.untried or "", WIDTH - 9):
                print(f"         {line}")
    if helpers := helpers_of(target, Path.cwd()):
        print(f"not checked: {', '.join(helpers)} (helpers: they ask for nothing that losses or advantages get)")
    if failed:
        raise typer.Exit(1)
