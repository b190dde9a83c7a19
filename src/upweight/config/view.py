"""The config by YAML names, which a user's transform receives as `cfg`."""

from typing import Any

from pydantic import BaseModel

from upweight.config.config import SECTIONS, Config, blocks
from upweight.settings import keys_of


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
    flat: dict[str, Any] = {}
    for name, cls in (*SECTIONS.items(), ("method", type(config.method))):
        section = getattr(config, name)
        flat |= {key.path: _plain(getattr(section, key.name)) for key in keys_of(cls)}
    content: dict[str, Any] = {block: ConfigView() for block in blocks()}
    for path, value in flat.items():
        block, _, name = path.rpartition(".")
        (content[block] if block else content)[name] = value
    return ConfigView(content)


def _plain(value: Any) -> Any:
    """Convert models to views, so that `cfg.datasets[0].path` and `cfg["datasets"][0]["path"]` both work."""
    if isinstance(value, BaseModel):
        return ConfigView({name: _plain(getattr(value, name)) for name in type(value).model_fields})
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
