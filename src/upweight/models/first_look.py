"""What can be said of a config's model without loading it: a folder that is not there, or that holds no model."""

from collections.abc import Iterator
from pathlib import Path

from upweight.config import Config
from upweight.config.sections.model import ModelSection
from upweight.errors import did_you_mean

WEIGHTS = (".safetensors", ".bin")
NO_WEIGHTS = ("adapter_model", "training_args", "optimizer", "scheduler")  # beginnings of names
TOKENIZER = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken", "merges")
MOST_KINDS = 6  # of files, in a message


def model_problems(config: Config) -> Iterator[str]:
    """Yield what would stop the model of a config from being loaded; one that may be on the hub is not judged."""
    section = (config.stages or (config,))[0].model  # later stages begin with folders that are not there yet
    if section.base_model is None:
        return
    path = Path(section.base_model).expanduser()
    if path.is_dir():
        if (problem := _unusable(path, section)) is not None:
            yield f"base_model: {path} {problem}"
    elif path.is_file():
        if path.suffix != ".gguf":
            yield f"base_model: {path} is a file. Name the folder that it is in: `base_model: {path.parent}`."
    elif section.base_model.startswith((".", "~", "/")) or section.base_model.count("/") > 1:
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()] if path.parent.is_dir() else []
        meant = did_you_mean(path.name, beside)
        yield f"base_model: {section.base_model} is no folder here (looked in {path.absolute()}).{meant}"


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
        return None
    if packed:
        return f"holds a GGUF file, which is named itself: `base_model: {folder / packed[0]}`."
    kinds = list(dict.fromkeys(Path(name).suffix or name for name in names))
    seen = ", ".join(kinds[:MOST_KINDS]) + (", ..." if len(kinds) > MOST_KINDS else "")
    holds = f"; it holds {len(names)} files ({seen})" if names else "; it holds no files"
    remedy = "Name the folder of a whole model: `hf download ORGANISATION/MODEL --local-dir FOLDER` makes one"
    if missing == ["tokenizer"]:
        remedy = "Copy the tokenizer's files into it, or name another folder or hub id with `tokenizer_config`"
    return f"has no {' and no '.join(missing)}{holds}. {remedy}."
