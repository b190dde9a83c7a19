"""`upweight gguf`: a trained model as one GGUF file, by llama.cpp's own converter."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from upweight.cli.trained import Trained, trained
from upweight.errors import UserError
from upweight.models.merge import Adapted, merge_adapter

CONVERTER, PLACE = "convert_hf_to_gguf.py", "LLAMA_CPP"


def run(place: str, overrides: list[str], *, output: Path | None, kind: str) -> None:
    """Convert a trained model, its adapter merged first, and print where the file lies."""
    converter = _converter()
    found = trained(place, overrides)
    # In a folder of its own: transformers would read a file beside an adapter as the adapter's.
    target = output or (found.adapter or _folder(found)) / "gguf" / f"model-{kind}.gguf"
    if target.exists():
        raise UserError(f"{target} is there already; remove it, or name another file with --output")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".gguf-") as scratch:
        if found.adapter is None:
            source = _folder(found)
        else:
            source = Path(scratch) / "merged"
            merge_adapter(Adapted(found.model, found.adapter), source)
        part = Path(scratch) / target.name
        done = subprocess.run([*converter, str(source), "--outfile", str(part), "--outtype", kind], check=False)
        if done.returncode or not part.is_file():
            raise UserError(
                f"{place}: {converter[-1]} did not convert it (exit {done.returncode}); its words are above"
            )
        part.rename(target)
    print(target)


def _converter() -> list[str]:
    """The command that runs llama.cpp's converter: the one in $LLAMA_CPP, or on the path."""
    if folder := os.environ.get(PLACE):
        script = Path(folder).expanduser() / CONVERTER
        if not script.is_file():
            raise UserError(f"{PLACE}: {folder} holds no {CONVERTER}; name a checkout of llama.cpp")
        return [sys.executable, str(script)]
    if found := shutil.which(CONVERTER):
        return [found]
    raise UserError(
        f"GGUF files are written by llama.cpp's {CONVERTER}, which is not on the path. "
        f"Get llama.cpp and what it needs (`pip install gguf sentencepiece`), and set {PLACE} to its folder."
    )


def _folder(found: Trained) -> Path:
    """The folder of a whole model."""
    folder = Path(found.model.base_model or "").expanduser()
    if found.model.gguf_file is not None or not folder.is_dir():
        raise UserError(f"{found.model.base_model}: is no folder with a trained model in it")
    return folder
