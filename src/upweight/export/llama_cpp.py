"""GGUF files by the tools of llama.cpp: its converter script, and its quantiser from a folder or a package."""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from upweight.errors import UserError, did_you_mean
from upweight.heartbeat import activity

CONVERTER, QUANTISER = "convert_hf_to_gguf.py", "llama-quantize"
PLACE, PYTHON = "LLAMA_CPP", "LLAMA_CPP_PYTHON"  # a checkout or its build; an interpreter with the packages it needs
TESTED = "llama-cpp-python 0.3.36"  # carries the sources of llama.cpp, its converter too
NO_NETWORK = ("Name or service not known", "Temporary failure in name resolution", "Network is unreachable",
              "Max retries exceeded", "LocalEntryNotFoundError", "OfflineModeIsEnabled")  # fmt: skip
CONVERTED = ("f32", "f16", "bf16", "q8_0", "auto")
# What llama.cpp calls them in `enum llama_ftype`, which is how the package asks for one.
QUANTISED = {
    "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14,
    "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25, "iq3_s": 26, "iq3_m": 27, "iq4_xs": 30,
}  # fmt: skip
GET_CONVERTER = (
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install gguf sentencepiece protobuf "
    f"&& export {PLACE}=$PWD/llama.cpp"
)
GET_QUANTISER = f'pip install "{TESTED.replace(" ", ">=")}"'
BY_PACKAGE = """
import sys, llama_cpp
source, target, kind = (text.encode() for text in sys.argv[1:])
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = int(kind)
sys.exit(llama_cpp.llama_model_quantize(source, target, params))
"""


@dataclass(frozen=True)
class Tools:
    """The commands that write a GGUF file of some kind; `quantise` is None where the converter writes it."""

    convert: tuple[str, ...]
    quantise: tuple[str, ...] | None


def find_tools(kind: str) -> Tools:
    """Return the tools for files of this kind; raise, with the command that gets it, where one is missing."""
    if kind not in CONVERTED and kind not in QUANTISED:
        known = (*CONVERTED, *QUANTISED)
        raise UserError(f"--type: there is no {kind!r}.{did_you_mean(kind, known)} There are {', '.join(known)}.")
    return Tools(_converter(), _quantiser() if kind in QUANTISED else None)


def write_gguf(model: Path, target: Path, kind: str, tools: Tools) -> None:
    """Write the model of a folder as one GGUF file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".gguf-") as parts:
        whole = Path(parts) / target.name
        first = kind if tools.quantise is None else "auto"
        with activity(f"converting {model}"):
            _run([*tools.convert, str(model), "--outfile", str(whole), "--outtype", first], whole, "convert")
        if tools.quantise is not None:
            source, whole = whole, Path(parts) / f"quantised-{target.name}"
            named = str(QUANTISED[kind]) if "-c" in tools.quantise else kind.upper()
            with activity(f"quantising {model} to {kind}"):
                _run([*tools.quantise, str(source), str(whole), named], whole, "quantise")
        whole.replace(target)


def _run(command: list[str], output: Path, what: str) -> None:
    """Run a tool; raise with the end of what it printed where it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode or not output.is_file():
        tool = QUANTISER if what == "quantise" else CONVERTER
        printed = (done.stdout + done.stderr).strip()
        remedy = f"Tested with {TESTED}; another version may know the model"
        if any(sign in printed for sign in NO_NETWORK):
            remedy = "It asked the network, which cannot be reached: export where there is one"
        folder = "`--to folder` writes the model for transformers and vLLM without it"
        problem = f"llama.cpp's {tool} did not {what} it (exit {done.returncode}):\n{_last_lines(printed)}"
        raise UserError(f"{problem}\n{remedy}; {folder}.")


def _last_lines(printed: str) -> str:
    """Return the end of what a tool printed; of a Python traceback only the error."""
    lines = printed.splitlines()
    if not any(line.startswith("Traceback (most recent call last)") for line in lines):
        return "\n".join(lines[-8:])
    return next((line for line in reversed(lines) if line[:1].strip()), "")


def _converter() -> tuple[str, ...]:
    """The command that runs llama.cpp's converter: the one in $LLAMA_CPP, or on the path."""
    if folder := os.environ.get(PLACE):
        script = Path(folder).expanduser() / CONVERTER
        if not script.is_file():
            raise UserError(
                f"{PLACE}: {folder} holds no {CONVERTER}; name a checkout of llama.cpp, or get one "
                f"(tested with that of {TESTED}):\n  {GET_CONVERTER}"
            )
        _require_packages(script)
        return _python(), str(script)
    if command := shutil.which(CONVERTER):
        return (command,)
    offline = "\nWithout a network: `--to folder` needs neither, for transformers and vLLM."
    no_package = f"GGUF files are written by llama.cpp's {CONVERTER}, which is not on the path, and no package has it"
    remedy = f"Get it (tested with that of {TESTED}), and set {PLACE} to its folder:\n  {GET_CONVERTER}{offline}"
    raise UserError(f"{no_package}. {remedy}")


def _require_packages(script: Path) -> None:
    """Raise, with the command that gets them, where the converter's interpreter lacks packages."""
    needed = ["torch", "transformers", *([] if (script.parent / "gguf-py").is_dir() else ["gguf"])]
    look = "import sys; from importlib.util import find_spec; print(*[n for n in sys.argv[1:] if not find_spec(n)])"
    try:
        done = subprocess.run([_python(), "-c", look, *needed], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"{PYTHON}: {_python()} does not run ({error}); name a Python interpreter") from error
    if missing := done.stdout.split():
        raise UserError(
            f"llama.cpp's {CONVERTER} runs in {_python()}, which lacks {', '.join(missing)}. Get what it needs:\n"
            f"  {_python()} -m pip install {' '.join(missing)} sentencepiece protobuf\n"
            f"or name another interpreter in {PYTHON}."
        )


def _quantiser() -> tuple[str, ...]:
    """The command that runs llama.cpp's quantiser: in $LLAMA_CPP or its build, on the path, or from the package."""
    if folder := os.environ.get(PLACE):
        for part in ("", "build/bin", "bin", "build"):
            if (program := Path(folder).expanduser() / part / QUANTISER).is_file():
                return (str(program),)
    if command := shutil.which(QUANTISER):
        return (command,)
    check = subprocess.run([_python(), "-c", "import llama_cpp"], check=False, capture_output=True)
    if check.returncode == 0:
        return _python(), "-c", BY_PACKAGE
    places = f"{QUANTISER} is neither in ${PLACE} nor on the path, and {_python()} has no llama_cpp"
    raise UserError(
        f"llama.cpp's quantiser is missing: {places}. Get one (tested with {TESTED}):\n  {GET_QUANTISER}\n"
        f"or build it: cmake -B build && cmake --build build --target {QUANTISER}, in ${PLACE}. Without it there are "
        f"--type {', '.join(CONVERTED)}. ${PYTHON} names an interpreter with the package."
    )


def _python() -> str:
    return os.environ.get(PYTHON) or sys.executable
