"""The config by YAML names: what a user's transform receives as `cfg`, and what is written into the run folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from upweight.config.config import SECTIONS, Config, blocks, nested
from upweight.config.redact import redacted
from upweight.settings import Section, keys_of

RESOLVED_KEYS = ("batch_size",)  # keys that are resolved into other keys


class ConfigView(dict[str, Any]):
    """Supports `cfg.sequence_len`, `cfg["trl"]["beta"]` and `cfg.get("seed")`; known keys that are unset are None."""

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key not in self:
            raise AttributeError(f"there is no key '{key}' in this config")
        return self[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the key's value, or `default` if it is unset or unknown."""
        value = super().get(key)
        return default if value is None else value


def view(config: Config) -> ConfigView:
    """Return the config as nested views by YAML name, with defaults filled in."""
    sections = [getattr(config, name) for name in (*SECTIONS, "method")]
    keys = [(section, key) for section in sections for key in keys_of(type(section))]
    content = nested((key.path, _to_views(getattr(section, key.name))) for section, key in keys)
    return ConfigView(content | {block: ConfigView(content.get(block, {})) for block in blocks()})


def _to_views(value: Any) -> Any:
    """Convert models to views, so that `cfg.datasets[0].path` and `cfg["datasets"][0]["path"]` both work."""
    if isinstance(value, BaseModel):
        return ConfigView({name: _to_views(getattr(value, name)) for name in type(value).model_fields})
    if isinstance(value, list | tuple):
        return [_to_views(item) for item in value]
    return value


def yaml_content(config: Config) -> dict[str, Any]:
    """Return every value that the run reads, nested by YAML key, without credentials."""
    off = set() if config.method.online else {"rollout", "vllm", "gym", "environment"}
    content = nested(
        (path, value)
        for name in (*SECTIONS, "method")
        if name not in off
        for path, value in _set_values(getattr(config, name))
        if name != "environment" or path in config.set_keys  # kinds of environments refuse others' keys
    )
    for row in (*content.get("datasets", ()), *content.get("test_datasets", ())):
        places = [place / row["path"] for place in (Path.cwd(), config.folder)] if row.get("path") else []
        if (file := next((place for place in places if place.exists()), None)) is not None:
            row["path"] = str(file.resolve())  # the copy lies in another folder
    idle = (
        *(("lora", "peft") if config.adapter.kind is None else ()),
        *(("fsdp",) if not config.sharding.fsdp else ()),
        *(("sequence_len",) if config.method.online and not config.method.strided else ()),
    )
    return redacted({key: value for key, value in content.items() if not key.startswith(idle)})


def _set_values(section: Section) -> Iterator[tuple[str, Any]]:
    """Yield the YAML path and the value of every key of a section that has a value."""
    for key in keys_of(type(section)):
        # Values of a script's arguments may have other types than the key.
        shown = section.model_dump(mode="json", exclude_none=True, include={key.name}, warnings=False)
        if key.path == key.canonical and key.path not in RESOLVED_KEYS and shown.get(key.name) not in (None, {}, []):
            yield key.path, shown[key.name]
