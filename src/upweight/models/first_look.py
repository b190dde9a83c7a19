"""What can be said of a config's model without loading it: a folder that is not there, or that holds no model."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from upweight.config import Config
from upweight.config.sections.model import AdapterSection, ModelSection
from upweight.errors import did_you_mean
from upweight.log import counted

WEIGHTS = (".safetensors", ".bin")
NO_WEIGHTS = ("adapter_model", "training_args", "optimizer", "scheduler")  # beginnings of names
TOKENIZER = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken", "merges")
TOKENIZER_REMEDY = "Copy the tokenizer's files into it, or name another folder or hub id with `tokenizer_config`"
LFS_POINTER = b"version https://git-lfs"
MOST_KINDS = 6  # of files, in a message
PACKAGES = {  # that transformers reads stored weights by
    "awq": ("gptqmodel",),
    "gptq": ("optimum", "gptqmodel"),
    "auto-round": ("auto-round",),
    "compressed-tensors": ("compressed-tensors",),
    "bitsandbytes": ("bitsandbytes",),
}


def model_problems(config: Config) -> Iterator[str]:
    """Yield what would stop the model of a config from being loaded; one that may be on the hub is not judged."""
    first = (config.stages or (config,))[0]  # later stages begin with folders that are not there yet
    for name, place in first.teacher.places.items():
        key = "distill.teacher" if name is None else f"distill.teachers.{name}"
        if not Path(place).expanduser().exists() and "://" not in place:
            yield from _missing(key, place)
    section = first.model
    if section.base_model is None:
        return
    path = Path(section.base_model).expanduser()
    if path.is_dir():
        if (problem := _unusable(path, section)) is not None:
            yield f"base_model: {path} {problem}"
        elif (problem := Stored.of(_quantisation_of(path)).problem(first.adapter, section.base_model)) is not None:
            yield f"{problem}."
    elif path.is_file():
        if path.suffix != ".gguf":
            yield f"base_model: {path} is a file. Name the folder that it is in: `base_model: {path.parent}`."
    else:
        yield from _missing("base_model", section.base_model)


def _missing(key: str, place: str) -> Iterator[str]:
    """Yield that a folder is not there, where the place can be nothing else."""
    path = Path(place).expanduser()
    if place.startswith((".", "~", "/")) or place.count("/") > 1:
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()] if path.parent.is_dir() else []
        meant = did_you_mean(path.name, beside)
        yield f"{key}: {place} is no folder here (looked in {path.absolute()}).{meant}"


class Stored(NamedTuple):
    """How the files of a model are quantised, and in how many bits a weight, as far as its config says."""

    method: str | None = None
    bits: int | None = None

    @classmethod
    def of(cls, quantization_config: Any) -> "Stored":
        """Read what a model's config says, which is a dict or an object."""
        of_object = getattr(quantization_config, "__dict__", {})
        fields = quantization_config if isinstance(quantization_config, dict) else of_object
        name, bits = fields.get("quant_method"), fields.get("bits")
        if name in (None, "bitnet"):  # which computes from plain weights
            return cls()
        bits = bits or (4 if fields.get("load_in_4bit") else 8 if fields.get("load_in_8bit") else None)
        return cls(str(getattr(name, "value", name)), bits if isinstance(bits, int) else None)

    @property
    def takes_4bit(self) -> bool:
        """Whether `load_in_4bit` may be set: for plain weights, and those that bitsandbytes stored."""
        return self.method in (None, "bitsandbytes")

    def missing_packages(self) -> str | None:
        """Return the packages that reading the weights needs and that are not installed, with the command."""
        needed = [one for one in PACKAGES.get(self.method or "", ()) if find_spec(one.replace("-", "_")) is None]
        if not needed:
            return None
        what = f"{' and '.join(needed)}, which {'is' if len(needed) == 1 else 'are'} not installed here"
        return f"loading weights that {self.method} stores needs {what}: pip install {' '.join(needed)}"

    def problem(self, adapter: AdapterSection, source: str) -> str | None:
        """Return what the settings ask for that the stored weights do not allow."""
        remedy = "Name the model that they were made from"
        if not self.takes_4bit and (adapter.load_in_4bit or adapter.load_in_8bit):
            key, how = (
                "load_in_4bit" if adapter.load_in_4bit else "load_in_8bit",
                "its weights are quantised as they are",
            )
            return f"{key}: the weights of {source!r} are quantised already, by {self.method}. {remedy}: {how} loaded"
        if self.bits is not None and adapter.kind is None:
            how = f"are stored in {self.bits} bits, by {self.method}, and do not train"
            return f"base_model: the weights of {source!r} {how}. Set `adapter: lora`, or n{remedy[1:]}"
        return None


def _quantisation_of(folder: Path) -> Any:
    """Return what the config in a folder says of its weights' quantisation; None where it says nothing."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None


def packed_remedy(folder: Path, key: str) -> str | None:
    """Return that a folder holds a GGUF file, and how it is named; None where it holds none."""
    files = sorted(folder.glob("*.gguf"))
    return f"holds a GGUF file: name it, `{key}: {files[0]}`" if files else None


def lacks_tokenizer(source: str) -> bool:
    """Return whether a folder has no file of a tokenizer; transformers makes an empty one of its config alone."""
    folder = Path(source)
    return folder.is_dir() and not any(file.name.startswith(TOKENIZER) for file in folder.iterdir())


def broken_weights(folder: Path) -> str | None:
    """Return which file of weights in a folder is missing or cut short, by the headers alone, and the remedy."""
    index = folder / "model.safetensors.index.json"
    names = [name for name in ("model.safetensors", "adapter_model.safetensors") if (folder / name).is_file()]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"{index.name} in it cannot be read. Copy or download it again"
    again = "Copy or download it again"
    for one in names:
        file = folder / one
        if not file.is_file():
            return f"{one}, which {index.name} names, is not in it. Copy or download the folder again"
        there, whole = file.stat().st_size, _whole_size(file)
        if whole is None:
            with file.open("rb") as opened:
                is_pointer = opened.read(len(LFS_POINTER)) == LFS_POINTER
            if is_pointer:
                return f"{one} in it is a pointer of Git LFS, without the weights. `git lfs pull` fetches them"
            return f"{one} in it is damaged or cut short ({there:,} bytes). {again}"
        if there < whole:
            return f"{one} in it is cut short: {there:,} of {whole:,} bytes are there. {again}"
    return None


def _whole_size(file: Path) -> int | None:
    """Return how many bytes a file of safetensors has by its header; None where the header cannot be read."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > file.stat().st_size:
                return None
            header = json.loads(opened.read(size))
            ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return 8 + size + max(ends, default=0)


def _unusable(folder: Path, section: ModelSection) -> str | None:
    """Return why no model can be loaded from a folder, and the remedy."""
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    packed = [name for name in names if name.endswith(".gguf")]
    if section.gguf_file is not None:
        known = f" There are {', '.join(packed)}." if packed else ""
        return None if (folder / section.gguf_file).is_file() else f"holds no {section.gguf_file} (gguf_file).{known}"
    if "adapter_config.json" in names and "config.json" not in names:
        return f"holds an adapter: name the model that it belongs on, and `lora_model_dir: {folder}`."
    needs = {"config.json": "config.json" in names or section.config_source is not None}
    needs["weights (*.safetensors)"] = any(
        Path(name).suffix in WEIGHTS and not name.startswith(NO_WEIGHTS) for name in names
    )
    needs["tokenizer"] = section.tokenizer is not None or any(name.startswith(TOKENIZER) for name in names)
    missing = [what for what, there in needs.items() if not there]
    if not missing:
        broken = broken_weights(folder)
        return None if broken is None else f"does not hold a whole model: {broken}."
    if packed:
        return f"{packed_remedy(folder, 'base_model')}."
    kinds = list(dict.fromkeys(Path(name).suffix or name for name in names))
    seen = ", ".join(kinds[:MOST_KINDS]) + (", ..." if len(kinds) > MOST_KINDS else "")
    holds = f"; it holds {counted(len(names), 'file')} ({seen})" if names else "; it holds no files"
    remedy = "Name the folder of a whole model: `hf download ORGANISATION/MODEL --local-dir FOLDER` makes one"
    if missing == ["tokenizer"]:
        remedy = TOKENIZER_REMEDY
    return f"has no {' and no '.join(missing)}{holds}. {remedy}."
