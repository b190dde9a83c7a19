"""Weights in 4 bits, unpacked by our kernel and by bitsandbytes."""

import pytest
import torch

from upweight.models.kernels import packed_product
from upweight.models.kernels.packed_product import unpacked

functional = pytest.importorskip("bitsandbytes.functional")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_numbers_are_those_of_bitsandbytes(kind: str, nested: bool, dtype: torch.dtype, monkeypatch):
    calls = []
    kernel = packed_product.unpack
    monkeypatch.setattr(packed_product, "unpack", lambda *args: calls.append(1) or kernel(*args))
    for shape in ((1000, 192), (3, 5, 64), (7, 13)):  # the last one is not of whole blocks
        values = torch.randn(shape, device="cuda", dtype=dtype)
        weight, state = functional.quantize_4bit(values, compress_statistics=nested, quant_type=kind)
        weight.quant_state = state
        assert torch.equal(unpacked(weight), functional.dequantize_4bit(weight, state))
    assert len(calls) == 2
