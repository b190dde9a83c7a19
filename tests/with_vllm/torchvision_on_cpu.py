# Appended to torchvision/extension.py: beside torch for CPUs, operators of a wheel for CUDA are not loaded, but their
# names are asked for on import. Processors of images call none of them.
if not _has_ops():  # noqa: F821 # pyright: ignore
    for _operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_operator}", "(Tensor a, Tensor b, float c) -> Tensor")  # noqa: F821 # pyright: ignore
