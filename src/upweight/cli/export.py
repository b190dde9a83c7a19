"""`upweight merge-lora` and `upweight gguf`: export a trained model with its adapter merged."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from upweight.cli.inputs import TrainedModel, find_trained
from upweight.errors import UserError
from upweight.log import quiet_transformers
from upweight.models.adapters.merge import AdapterFolder, merge_adapter, merge_error

CONVERTER, PLACE = "convert_hf_to_gguf.py", "LLAMA_CPP"


def run_merge(config_or_folder: str, overrides: list[str], *, output: Path | None, check: bool) -> None:
    """Merge, compare log-probs before and after, and print the folder and the largest difference."""
    quiet_transformers()
    exported = find_trained(config_or_folder, overrides)
    if exported.adapter is None and not Path(exported.model.base_model or "").expanduser().exists():
        raise UserError(f"{config_or_folder}: there is neither a config nor a folder of that name, with an adapter")
    if exported.adapter is None:
        raise UserError(f"{config_or_folder}: {exported.model.base_model} has no adapter to merge; it is a whole model")
    adapted = AdapterFolder(exported.model, exported.adapter)
    target = output or exported.adapter / "merged"
    merge_adapter(adapted, target)
    print(target)
    if check:
        what = "log-prob" if adapted.head() == "tokens" else "score"
        kind = str(adapted.dtype()).removeprefix("torch.")
        print(f"largest difference of a {what} before and after, in {kind}: {merge_error(adapted, target):.2g}")


def run_gguf(config_or_folder: str, overrides: list[str], *, output: Path | None, kind: str) -> None:
    """Convert a trained model, its adapter merged first, and print the file."""
    converter = _converter()
    exported = find_trained(config_or_folder, overrides)
    # In a separate folder: transformers would read a file beside an adapter as the adapter's.
    target = output or (exported.adapter or _model_folder(exported)) / "gguf" / f"model-{kind}.gguf"
    if target.exists():
        raise UserError(f"{target} is there already; remove it, or name another file with --output")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".gguf-") as scratch:
        if exported.adapter is None:
            source = _model_folder(exported)
        else:
            source = Path(scratch) / "merged"
            merge_adapter(AdapterFolder(exported.model, exported.adapter), source)
        part = Path(scratch) / target.name
        done = subprocess.run([*converter, str(source), "--outfile", str(part), "--outtype", kind], check=False)
        if done.returncode or not part.is_file():
            problem = f"{converter[-1]} did not convert it (exit {done.returncode}); see above"
            raise UserError(f"{config_or_folder}: {problem}")
        part.rename(target)
    print(target)


def _converter() -> list[str]:
    """The command that runs llama.cpp's converter: the one in $LLAMA_CPP, or on the path."""
    if folder := os.environ.get(PLACE):
        script = Path(folder).expanduser() / CONVERTER
        if not script.is_file():
            raise UserError(f"{PLACE}: {folder} holds no {CONVERTER}; name a checkout of llama.cpp")
        return [sys.executable, str(script)]
    if command := shutil.which(CONVERTER):
        return [command]
    remedy = f"Get llama.cpp and what it needs (`pip install gguf sentencepiece`), and set {PLACE} to its folder."
    raise UserError(f"GGUF files are written by llama.cpp's {CONVERTER}, which is not on the path. {remedy}")


def _model_folder(exported: TrainedModel) -> Path:
    """The folder of a whole model."""
    folder = Path(exported.model.base_model or "").expanduser()
    if exported.model.gguf_file is not None or not folder.is_dir():
        raise UserError(f"{exported.model.base_model}: is no folder with a trained model in it")
    return folder
