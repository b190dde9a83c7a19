"""How many tokens one forward may hold when nobody says."""

import torch
from transformers import PreTrainedConfig

from upweight.models.memory import activation_bytes

ON_CPU = 4096
SMALLEST, LARGEST = 2048, 65_536
SHARE = 0.5  # of the memory that is free once the weights are loaded


def token_budget(config: PreTrainedConfig, device: torch.device, *, checkpointing: bool, reserved: int) -> int:
    """Tokens whose activations fit into the device's free memory, but for the bytes `reserved`."""
    if device.type != "cuda":
        return ON_CPU
    free = torch.cuda.mem_get_info(device)[0] - reserved
    tokens = int(SHARE * free / activation_bytes(config, checkpointing=checkpointing))
    return min(max(tokens // 128 * 128, SMALLEST), LARGEST)
