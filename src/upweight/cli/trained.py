"""What a command that reads a trained model is pointed at: a config, a run folder, an adapter or a model."""

import json
from dataclasses import dataclass
from pathlib import Path

from upweight.config import Config, load_config, parse_config
from upweight.config.model import ModelSection
from upweight.config.yaml_file import apply_overrides
from upweight.errors import UserError

ADAPTER, RUN = "adapter_config.json", "config.yaml"


@dataclass(frozen=True)
class Trained:
    """A trained model: all of it (`adapter` is None), or an adapter and the base model it belongs on."""

    model: ModelSection
    adapter: Path | None
    config: Config | None  # of the run that trained it, where that is known


def trained(place: str, overrides: list[str]) -> Trained:
    """The model that a config trained, or the one in a folder or on the hub."""
    path = Path(place).expanduser()
    if path.is_file():
        config = load_config(path, overrides)
        config = config.stages[-1] if config.stages else config
        return _in_folder(_result(config), config, overrides)
    if not path.is_dir():
        if path.suffix in (".yaml", ".yml") or place.startswith((".", "/", "~")):
            raise UserError(f"{place}: there is neither a config nor a folder of that name")
        return Trained(ModelSection(base_model=place), None, None)
    run = next((file for file in (path / RUN, path.parent / RUN) if file.is_file()), None)
    return _in_folder(path, load_config(run, overrides) if run else None, overrides)


def _result(config: Config) -> Path:
    """The folder that a config's run leaves its model in; an adapter that it only continues will do."""
    folders = [Path(config.run.output_dir), *([Path(config.adapter.folder)] if config.adapter.folder else [])]
    found = next(
        (folder for folder in folders if (folder / ADAPTER).is_file() or (folder / "config.json").is_file()), None
    )
    if found is None:
        raise UserError(f"output_dir: {folders[0]} holds no trained model. Train it first: `upweight train CONFIG`.")
    return found


def _in_folder(folder: Path, config: Config | None, overrides: list[str]) -> Trained:
    if not (folder / ADAPTER).is_file():
        return Trained(ModelSection(base_model=str(folder)), None, config)
    if config is not None:
        return Trained(config.model, folder, config)
    named = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    content = {"base_model": named.get("base_model_name_or_path"), "model_revision": named.get("revision")}
    given = parse_config(apply_overrides(content, overrides), folder=folder, fragment=True)
    return Trained(given.model, folder, None)
