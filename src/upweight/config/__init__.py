"""Reads YAML and overrides into a frozen, checked Config."""

from upweight.config.config import Config, ConfigError
from upweight.config.load import load_config, parse_config
from upweight.config.view import ConfigView, view

__all__ = ["Config", "ConfigError", "ConfigView", "load_config", "parse_config", "view"]
