"""`upweight merge-lora`, `upweight export` and `upweight gguf`: write a trained model with its adapter merged."""

import shlex
from pathlib import Path

from upweight.cli.inputs import find_trained
from upweight.errors import UserError, did_you_mean
from upweight.export.folder import Trained
from upweight.export.targets import TARGETS, Export, run_export
from upweight.log import quiet_transformers
from upweight.models.adapters.merge import AdapterFolder, merge_adapter, merge_error
from upweight.runs.files import no_such_run


def run_merge(config_or_folder: str, overrides: list[str], *, output: Path | None, check: bool) -> None:
    """Merge, compare log-probs before and after, and print the folder and the largest difference."""
    quiet_transformers()
    exported = find_trained(config_or_folder, overrides)
    if exported.adapter is None and not Path(exported.model.base_model or "").expanduser().exists():
        raise UserError(no_such_run(Path(config_or_folder), "run, config or folder with an adapter"))
    if exported.adapter is None:
        whole = exported.model.base_model
        use = f"`upweight inference {shlex.quote(str(whole))}` and `upweight export` use it as it is"
        raise UserError(f"{config_or_folder}: {whole} has no adapter to merge; it is a whole model: {use}")
    adapted = AdapterFolder(exported.model, exported.adapter)
    target = output or exported.adapter / "merged"
    merge_adapter(adapted, target)
    print(target)
    if check:
        what = "log-prob" if adapted.head() == "tokens" else "score"
        kind = str(adapted.dtype()).removeprefix("torch.")
        usual = ", where rounding gives a few tenths" if what == "log-prob" and kind != "float32" else ""
        print(f"largest difference of a {what} before and after, in {kind}{usual}: {merge_error(adapted, target):.2g}")


def run_to_target(config_or_folder: str, overrides: list[str], wanted: Export) -> None:
    """Export a trained model and print what was written and the commands that use it."""
    if wanted.target not in TARGETS:
        near = did_you_mean(wanted.target, TARGETS)
        raise UserError(f"--to: there is no {wanted.target!r}.{near} There are {', '.join(TARGETS)}.")
    quiet_transformers()
    exported = find_trained(config_or_folder, overrides)
    for line in run_export(Trained(exported.model, exported.adapter), wanted):
        print(line)
