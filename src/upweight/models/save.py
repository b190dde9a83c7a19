"""Save the trained model or adapter."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from upweight.models.precision import computed_weights


def save_model(
    model: PreTrainedModel | PeftModel,
    folder: Path | str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    state_dict: dict[str, Any] | None = None,
) -> None:
    """Write full weights in the compute dtype, or the trained adapter in float32, and the tokenizer.

    `state_dict` holds the gathered weights where all ranks have to take part in gathering them.
    """
    if isinstance(model, PeftModel):
        model.save_pretrained(str(folder), state_dict=state_dict, selected_adapters=list(model.active_adapters))
    else:
        weights = computed_weights(model, state_dict or model.state_dict(), dtype)
        # Gathered or cast weights share no memory, by which `save_pretrained` recognises tied ones.
        once = {name: value for name, value in weights if name not in model.all_tied_weights_keys}
        model.save_pretrained(str(folder), state_dict=once)
        # save_pretrained notes the dtype of the masters, which `dtype="auto"` would then load.
        model.config.dtype = dtype
        model.config.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
