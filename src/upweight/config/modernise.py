"""Older spellings and keys of other trainers, brought to the keys we have."""

from dataclasses import dataclass, field
from typing import Any

from upweight.config.peers import ATTENTION_SWITCHES, PLUGINS, RENAMED
from upweight.config.yaml_file import copy_tree

SHARDING_WORDS = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "NO_SHARD": False}


@dataclass
class Findings:
    """What is wrong with a config, and what is worth saying about it."""

    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def asks_for_something(value: Any) -> bool:
    """Whether a value turns something on; `null`, `false` and empty values do not."""
    return value not in (None, False, "", [], {})


def modernise(content: dict[Any, Any], findings: Findings) -> dict[Any, Any]:
    """The same config in today's spelling; each change is noted once."""
    content = copy_tree(content)
    _strip_fsdp_prefixes(content, findings)
    for old, new in RENAMED.items():
        _rename(content, old, new, findings)
    _attention_switches(content, findings)
    _plugins(content, findings)
    return content


def _strip_fsdp_prefixes(content: dict[Any, Any], findings: Findings) -> None:
    block = content.get("fsdp_config")
    if not isinstance(block, dict):
        return
    for key in [key for key in block if isinstance(key, str) and key.startswith("fsdp_")]:
        _rename(content, f"fsdp_config.{key}", f"fsdp_config.{key.removeprefix('fsdp_')}", findings)
    _rename(content, "fsdp_config.sharding_strategy", "fsdp_config.reshard_after_forward", findings)
    strategy = block.get("reshard_after_forward")
    if isinstance(strategy, str) and strategy.upper() in SHARDING_WORDS:
        block["reshard_after_forward"] = SHARDING_WORDS[strategy.upper()]


def _rename(content: dict[Any, Any], old: str, new: str, findings: Findings) -> None:
    holder, name = _holder(content, old)
    if name not in holder:
        return
    value = holder.pop(name)
    if value is None:
        return
    findings.notices.append(f"{old}: is now called '{new}'")
    target, new_name = _holder(content, new, make=True)
    if target.get(new_name) not in (None, value):
        findings.errors.append(f"{old}: contradicts '{new}', which is its new name. Keep only '{new}'.")
    target[new_name] = value


def _holder(content: dict[Any, Any], path: str, make: bool = False) -> tuple[dict[Any, Any], str]:
    """The mapping that holds a path's last part, or an empty one."""
    block, dot, name = path.partition(".")
    if not dot:
        return content, block
    if make and content.get(block) is None:
        content[block] = {}
    inner = content.get(block)
    return (inner, name) if isinstance(inner, dict) else ({}, name)


def _attention_switches(content: dict[Any, Any], findings: Findings) -> None:
    on = [switch for switch in ATTENTION_SWITCHES if content.get(switch) is True]
    for switch in ATTENTION_SWITCHES:
        value = content.pop(switch, None)
        if value not in (None, True, False):
            findings.errors.append(f"{switch}: expected true or false, got {value!r}")
    if len(on) > 1 or (on and content.get("attn_implementation") is not None):
        both = " and ".join(on if len(on) > 1 else [on[0], "attn_implementation"])
        findings.errors.append(f"{on[0]}: {both} are set. Keep one.")
    elif on:
        content["attn_implementation"] = ATTENTION_SWITCHES[on[0]]
        findings.notices.append(f"{on[0]}: is now called 'attn_implementation: {ATTENTION_SWITCHES[on[0]]}'")


def _plugins(content: dict[Any, Any], findings: Findings) -> None:
    plugins = content.get("plugins")
    for plugin in plugins if isinstance(plugins, list) else []:
        if isinstance(plugin, str) and plugin in PLUGINS:
            findings.notices.append(f"plugins: {plugin.rpartition('.')[2]} is not needed: {PLUGINS[plugin]}")
        else:
            findings.errors.append(f"plugins: {plugin!r} is not supported. Plugins of other trainers cannot be loaded.")
