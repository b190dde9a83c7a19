"""Resolves the model argument of commands: a config, a run folder, an adapter or a model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upweight.config import Config, load_config, parse_config
from upweight.config.sections.data import DataSection, DatasetRow
from upweight.config.sections.model import ModelSection
from upweight.config.yaml_file import apply_overrides
from upweight.errors import UserError
from upweight.log import warn_once

ADAPTER, RUN = "adapter_config.json", "config.yaml"


@dataclass(frozen=True)
class Trained:
    """A trained model: all of it (`adapter` is None), or an adapter and the base model it belongs on."""

    model: ModelSection
    adapter: Path | None
    config: Config  # of the run that trained it if known, else the keys of the command line


def trained(place: str, overrides: list[str], *, or_base: bool = False) -> Trained:
    """Return the model that a config trained (with `or_base` else its base), or the one of a folder or the hub."""
    path = Path(place).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _named({"base_model": str(path)}, None, overrides)
    if path.is_file():
        config = load_config(path, overrides)
        config = config.stages[-1] if config.stages else config
        folder = _result(config)
        if folder is None and or_base:
            warn_once(f"{config.run.output_dir} holds no trained model: {config.model.base_model} is used, untrained")
            return Trained(config.model, None, config)
        if folder is None:
            where = config.run.output_dir
            raise UserError(f"output_dir: {where} holds no trained model. Train it first: `upweight train CONFIG`.")
        return _in_folder(folder, config, overrides)
    if not path.is_dir():
        if path.suffix in (".yaml", ".yml") or place.startswith((".", "/", "~")):
            raise UserError(f"{place}: there is neither a config nor a folder of that name")
        return _named({"base_model": place}, None, overrides)
    run = next((file for file in (path / RUN, path.parent / RUN) if file.is_file()), None)
    return _in_folder(path, load_config(run, overrides) if run else None, overrides)


def as_trained(model: Trained) -> tuple[DataSection, DatasetRow | None, bool]:
    """Return how the training run formatted text: templates, step separator, and whether as chat messages."""
    data = model.config.data
    if not data.datasets:
        return data, None, False
    first = data.datasets[0]
    kind = first.type if isinstance(first.type, str) else ""
    family = next((name for name in ("chatml", "llama3", "zephyr") if kind.split(".")[0] == name), None)
    entry = DatasetRow(
        step_separator=first.step_separator,
        chat_template=first.chat_template or (family if data.chat_template is None else None),
        chat_template_jinja=first.chat_template_jinja,
    )
    return data, entry, family is not None or "chat_template" in kind


def _result(config: Config) -> Path | None:
    """Return the folder of a config's trained model, or of the adapter that it continues, or None."""
    folders = [Path(config.run.output_dir), *([Path(config.adapter.folder)] if config.adapter.folder else [])]
    return next(
        (folder for folder in folders if (folder / ADAPTER).is_file() or (folder / "config.json").is_file()), None
    )


def _in_folder(folder: Path, config: Config | None, overrides: list[str]) -> Trained:
    is_adapter = (folder / ADAPTER).is_file()
    if config is not None:
        section = ModelSection(base_model=str(folder), trust_remote_code=config.model.trust_remote_code)
        return Trained(config.model, folder, config) if is_adapter else Trained(section, None, config)
    if not is_adapter:
        return _named({"base_model": str(folder)}, None, overrides)
    named = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    content = {"base_model": named.get("base_model_name_or_path"), "model_revision": named.get("revision")}
    return _named(content, folder, overrides)


def _named(content: dict[str, Any], adapter: Path | None, overrides: list[str]) -> Trained:
    """Return a model without a known config, with the keys of the command line."""
    config = parse_config(apply_overrides(content, overrides), folder=Path.cwd(), fragment=True)
    return Trained(config.model, adapter, config)
