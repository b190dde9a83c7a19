"""Which adapters vLLM can load."""

import json
from pathlib import Path
from typing import Any

from upweight.config.rules.rollout import ONLY_MERGED
from upweight.config.sections.model import AdapterSection
from upweight.config.servers import not_for_vllm
from upweight.errors import UserError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def allowed_rank(rank: int) -> int:
    """Return the smallest `max_lora_rank` of vLLM that holds `rank`."""
    allowed = next((size for size in RANKS if size >= rank), None)
    if allowed is None:
        raise UserError(f"lora_r: vLLM serves adapters up to rank {RANKS[-1]}, not {rank}; lower it.")
    return allowed


def largest_rank(section: AdapterSection) -> int:
    """Return the largest rank of the adapter that a config describes or continues."""
    adapter_config = Path(section.folder) / "adapter_config.json" if section.folder else None
    if adapter_config is not None and adapter_config.is_file():
        stored: dict[str, Any] = json.loads(adapter_config.read_text(encoding="utf-8"))
        return max([int(stored["r"]), *map(int, (stored.get("rank_pattern") or {}).values())])
    return max([section.rank, *section.rank_pattern.values()])


def syncs_adapter_only(
    lora_sync: bool | None, *, dora: bool, modules_to_save: object, target_parameters: object, bias: bool = False
) -> bool:
    """Return whether an adapter is synced without merging: `lora_sync` allows it and vLLM can load it."""
    key = not_for_vllm(dora=dora, bias=bias, modules_to_save=modules_to_save, target_parameters=target_parameters)
    if lora_sync and key is not None:
        raise UserError(f"{key}: {ONLY_MERGED}.")
    return lora_sync is not False and key is None
