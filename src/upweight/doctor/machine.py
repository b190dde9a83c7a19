"""Checks the machine: Python and package versions against the supported ranges, and GPUs."""

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from upweight.doctor.findings import Finding
from upweight.models.memory import GIB

PACKAGE = "upweight"


def check_machine() -> list[Finding]:
    """Return the findings about Python, the required packages and the GPUs."""
    wanted = {"Python": importlib.metadata.metadata(PACKAGE)["Requires-Python"]}
    for line in importlib.metadata.requires(PACKAGE) or ():
        required = Requirement(line)
        if required.marker is None or required.marker.evaluate({"extra": ""}):
            wanted[required.name] = str(required.specifier)
    versions = [_check_version(name, allowed) for name, allowed in wanted.items()]
    findings = [version for version in versions if version.wrong]
    if not findings:
        named = ("Python", "torch", "transformers", "peft")
        shown = ", ".join(f"{version.what} {version.says}" for version in versions if version.what in named)
        findings = [Finding("ok", "versions", f"{shown}; all {len(versions)} versions are supported")]
    return [*findings, *_check_devices()]


def _check_version(name: str, allowed: str) -> Finding:
    """Compare the installed version of a package with the supported range."""
    try:
        version = platform.python_version() if name == "Python" else importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("alarm", name, "is not installed", f"pip install '{name}{allowed}'", {"version": None})
    evidence = {"version": version, "supported": allowed}
    if SpecifierSet(allowed).contains(version, prereleases=True):
        return Finding("ok", name, version, evidence=evidence)
    remedy = f"pip install '{name}{allowed}'" if name != "Python" else f"make an environment with Python {allowed}"
    says = f"{version} is not among the versions that were tested ({allowed})"
    return Finding("warning", name, says, remedy, evidence)


def _check_devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch sees none" if built else "this torch was built without CUDA"
        yield Finding("note", "GPU", f"{why}: training runs on the CPU, in float32 ({sys.platform})")
        return
    for number in range(torch.cuda.device_count()):
        free, total = (part / GIB for part in torch.cuda.mem_get_info(number))
        says = f"{torch.cuda.get_device_name(number)}, {free:.1f} of {total:.1f} GiB free"
        evidence = {"free_gib": round(free, 2), "total_gib": round(total, 2)}
        if free < 0.8 * total:
            remedy = "stop the other processes on it (nvidia-smi), or choose another GPU with CUDA_VISIBLE_DEVICES"
            yield Finding("note", f"GPU {number}", f"{says}: something else uses it", remedy, evidence)
        else:
            yield Finding("ok", f"GPU {number}", says, evidence=evidence)
