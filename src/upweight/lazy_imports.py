"""torch and numpy on first use: commands that only read the settings of methods need not wait for their imports."""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["F", "NDArray", "Tensor", "np", "torch"]

if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from numpy.typing import NDArray
    from torch import Tensor
else:

    class LazyModule:
        """A module that is imported when one of its names is first read; names are looked up once."""

        def __init__(self, name: str) -> None:
            self._module_name = name

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(importlib.import_module(self._module_name), attribute)
            setattr(self, attribute, value)
            return value

    torch, F, np = LazyModule("torch"), LazyModule("torch.nn.functional"), LazyModule("numpy")
    # For annotations, not evaluated where they have arrays; `torch.is_tensor` tells tensors from other values.
    Tensor = NDArray = Any
