"""What vLLM can load of an adapter."""

import json
from pathlib import Path
from typing import Any

from upweight.config.sections.model import AdapterSection
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


def adapter_alone(section: AdapterSection, lora_sync: bool | None) -> bool:
    """Whether the adapter that a config describes is sent by itself."""
    return section.kind is not None and goes_alone(
        lora_sync,
        dora=section.dora,
        modules_to_save=section.modules_to_save,
        target_parameters=section.target_parameters,
    )


def goes_alone(
    lora_sync: bool | None, *, dora: bool, modules_to_save: object, target_parameters: object, bias: bool = False
) -> bool:
    """Whether an adapter with these features is sent by itself: asked for or left open, and vLLM can load it."""
    found = {
        "peft_use_dora": dora,
        "bias": bias,
        "lora_modules_to_save": modules_to_save,
        "lora_target_parameters": target_parameters,
    }
    key = next((key for key, asked in found.items() if asked), None)
    if lora_sync and key is not None:
        way_out = "drop the key, or set 'trl.vllm_lora_sync: false' to send merged weights"
        raise UserError(f"{key}: vLLM cannot load such an adapter; {way_out}.")
    return lora_sync is not False and key is None
