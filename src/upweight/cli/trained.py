"""What a command that reads a trained model is pointed at: a config, a run folder, an adapter or a model."""

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
    config: Config  # of the run that trained it where that is known, else the keys of the command line


def trained(place: str, overrides: list[str], *, or_base: bool = False) -> Trained:
    """The model that a config trained (with `or_base`, else its base), or the one in a folder or on the hub."""
    path = Path(place).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _named({"base_model": str(path)}, None, overrides)
    if path.is_file():
        config = load_config(path, overrides)
        config = config.stages[-1] if config.stages else config
        found = _result(config)
        if found is None and or_base:
            warn_once(f"{config.run.output_dir} holds no trained model: {config.model.base_model} is taken, untrained")
            return Trained(config.model, None, config)
        if found is None:
            where = config.run.output_dir
            raise UserError(f"output_dir: {where} holds no trained model. Train it first: `upweight train CONFIG`.")
        return _in_folder(found, config, overrides)
    if not path.is_dir():
        if path.suffix in (".yaml", ".yml") or place.startswith((".", "/", "~")):
            raise UserError(f"{place}: there is neither a config nor a folder of that name")
        return _named({"base_model": place}, None, overrides)
    run = next((file for file in (path / RUN, path.parent / RUN) if file.is_file()), None)
    return _in_folder(path, load_config(run, overrides) if run else None, overrides)


def as_trained(found: Trained) -> tuple[DataSection, DatasetRow | None, bool]:
    """How the run that trained the model put text together: templates, step separator, and whether as chat turns."""
    data = found.config.data
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
    """The folder that a config's run leaves its model in; an adapter that it only continues will do."""
    folders = [Path(config.run.output_dir), *([Path(config.adapter.folder)] if config.adapter.folder else [])]
    return next(
        (folder for folder in folders if (folder / ADAPTER).is_file() or (folder / "config.json").is_file()), None
    )


def _in_folder(folder: Path, config: Config | None, overrides: list[str]) -> Trained:
    is_adapter = (folder / ADAPTER).is_file()
    if config is not None:
        own = ModelSection(base_model=str(folder), trust_remote_code=config.model.trust_remote_code)
        return Trained(config.model, folder, config) if is_adapter else Trained(own, None, config)
    if not is_adapter:
        return _named({"base_model": str(folder)}, None, overrides)
    named = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    content = {"base_model": named.get("base_model_name_or_path"), "model_revision": named.get("revision")}
    return _named(content, folder, overrides)


def _named(content: dict[str, Any], adapter: Path | None, overrides: list[str]) -> Trained:
    """A model that no config is known of but what the command line says."""
    given = parse_config(apply_overrides(content, overrides), folder=Path.cwd(), fragment=True)
    return Trained(given.model, adapter, given)
