"""What vLLM can load of an adapter."""

import json
from pathlib import Path
from typing import Any

from upweight.config.rules.rollout import ONLY_MERGED
from upweight.config.sections.model import AdapterSection
from upweight.config.servers import not_for_vllm
from upweight.errors import UserError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def allowed_rank(rank: int) -> int:
    """The smallest rank that vLLM has room for and that holds `rank`."""
    found = next((size for size in RANKS if size >= rank), None)
    if found is None:
        raise UserError(f"lora_r: vLLM serves adapters up to rank {RANKS[-1]}, not {rank}; lower it.")
    return found


def largest_rank(section: AdapterSection) -> int:
    """The largest rank in the adapter that a config describes or continues."""
    kept = Path(section.folder) / "adapter_config.json" if section.folder else None
    if kept is not None and kept.is_file():
        stored: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return max([int(stored["r"]), *map(int, (stored.get("rank_pattern") or {}).values())])
    return max([section.rank, *section.rank_pattern.values()])


def goes_alone(
    lora_sync: bool | None, *, dora: bool, modules_to_save: object, target_parameters: object, bias: bool = False
) -> bool:
    """Whether an adapter with these features is sent by itself: asked for or left open, and vLLM can load it."""
    key = not_for_vllm(dora=dora, bias=bias, modules_to_save=modules_to_save, target_parameters=target_parameters)
    if lora_sync and key is not None:
        raise UserError(f"{key}: {ONLY_MERGED}.")
    return lora_sync is not False and key is None
