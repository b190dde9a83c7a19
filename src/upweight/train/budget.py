"""How many tokens one forward may hold when nobody says."""

import torch
from transformers import PreTrainedConfig

ON_CPU = 4096
SMALLEST, LARGEST = 2048, 65_536
SHARE = 0.5  # of the memory that is free once the weights are loaded


def token_budget(config: PreTrainedConfig, device: torch.device, *, checkpointing: bool, reserved: int) -> int:
    """Tokens whose activations fit into the device's free memory, but for the bytes `reserved`."""
    if device.type != "cuda":
        return ON_CPU
    free = torch.cuda.mem_get_info(device)[0] - reserved
    per_layer = 2 * (
        20 * config.hidden_size + 6 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    )
    layers = config.num_hidden_layers
    per_token = 2 * layers * config.hidden_size + per_layer if checkpointing else layers * per_layer
    tokens = int(SHARE * free / per_token)
    return min(max(tokens // 128 * 128, SMALLEST), LARGEST)
