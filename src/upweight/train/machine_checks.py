"""Check that this machine can run a config; what is wrong on any machine is found by `upweight.config.rules`."""

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from packaging.version import Version
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils.import_utils import is_torch_tf32_available

from upweight.config import Config
from upweight.config.sections.training import FROM_BITSANDBYTES, GALORE, LOW_RANK
from upweight.config.servers import direct_transfer, samples_from_server
from upweight.config.zero import zero_options
from upweight.errors import UserError, did_you_mean
from upweight.runs.files import unwritable_reason
from upweight.train.arguments import enabled_trackers
from upweight.train.distributed.deepspeed import NOT_INSTALLED
from upweight.train.recording.trackers import key_of_tracker
from upweight.train.user_code import load_user_code

SWANLAB = '"swanlab<0.8"'  # whose `get_run` returns None before a run, as transformers' callback expects
# Trackers whose module has another name than in `report_to`, and those that pip calls otherwise.
TRACKER_MODULES = {"azure_ml": "azureml", "flyte": "flytekit"}
TRACKER_PACKAGES = {"azure_ml": "azureml-sdk", "swanlab": SWANLAB}
# Optimizers by the package they come from, and what pip calls it.
SCHEDULE_FREE = ("schedulefree", "schedulefree")
OPTIMIZER_PACKAGES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(FROM_BITSANDBYTES, ("bitsandbytes", "bitsandbytes")),
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), ("torchao", "torchao")),
    **dict.fromkeys(("schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam"), SCHEDULE_FREE),
    "stable_adamw": ("optimi", "torch-optimi"),
    **dict.fromkeys(GALORE, ("galore_torch", "galore-torch")),
    "apollo_adamw": ("apollo_torch", "apollo-torch"),
}


def gpus(config: Config, *, trains: bool) -> Iterator[str]:
    """Check settings that need a GPU, or a certain one."""
    if torch.cuda.is_available():
        if config.model.tf32 is True and not is_torch_tf32_available():
            yield "tf32: this GPU has no TF32; drop the key."
        return
    if config.model.fp16:
        yield "fp16: float16 with loss scaling needs a CUDA device, and none is visible; drop it, or use 'bf16: true'."
    if trains and config.optim.optimizer == "galore_adamw_8bit":
        yield "optimizer: galore_adamw_8bit needs a CUDA device, and none is visible; use 'galore_adamw'."
    if samples_from_server(config) and direct_transfer(config):
        yield "trl.vllm_weight_transfer: weights go from GPU to GPU, and no CUDA device is visible; use 'folder'."


def mps_problems(config: Config) -> Iterator[str]:
    """Yield what cannot run on Apple's MPS device, which has no float64."""
    remedy = "Train on the CPU: leave out UPWEIGHT_DEVICE, in a script pass `use_cpu=True`."
    if config.method.online:
        yield f"rl: {config.method.name} samples and scores in float64, which MPS does not have. {remedy}"
    elif config.method.needs_teacher:
        yield f"rl: {config.method.name} compares with its teacher in float64, which MPS does not have. {remedy}"
    if config.optim.neftune_alpha is not None:
        yield "neftune_noise_alpha: it reads lengths in float64, which MPS does not have. Leave it out."
    if config.adapter.load_in_4bit or config.adapter.load_in_8bit:
        yield "load_in_4bit, load_in_8bit: quantised weights need a CUDA device. Leave them out."


def packages(config: Config, *, trains: bool) -> Iterator[str]:
    """Check that optional packages are installed; that of the optimizer only where the run trains."""
    module, package = OPTIMIZER_PACKAGES.get(config.optim.optimizer, (None, None))
    if trains and module is not None and not _installed(module):
        without = " `optimizer: adamw_torch` needs none." if "adam" in config.optim.optimizer else ""
        yield f"optimizer: {config.optim.optimizer} needs a package: pip install {package}.{without}"
    elif trains and config.optim.optimizer in LOW_RANK and not _installed("bitsandbytes"):  # also those without 8 bits
        yield f"optimizer: {package} is installed, and imports one that is not: pip install bitsandbytes."
    for tracker in enabled_trackers(config.tracking):
        if (problem := tracker_problem(tracker)) is not None:
            yield f"{key_of_tracker(tracker.removesuffix('_ml'), config.set_keys)}: {problem}, or drop the key."
    if (config.adapter.load_in_4bit or config.adapter.load_in_8bit) and not _installed("bitsandbytes"):
        yield "load_in_4bit, load_in_8bit: quantised weights need bitsandbytes: pip install bitsandbytes."
    if (config.teacher.load_in_4bit or config.teacher.load_in_8bit) and not _installed("bitsandbytes"):
        keys = "distill.teacher_load_in_4bit, distill.teacher_load_in_8bit"
        yield f"{keys}: a quantised teacher needs bitsandbytes: pip install bitsandbytes."
    if config.sharding.deepspeed is not None and not _installed("deepspeed"):
        yield NOT_INSTALLED
    colocated = config.method.online and config.rollout.use_vllm and config.rollout.vllm_mode == "colocate"
    if colocated and not _installed("vllm"):
        yield "trl.vllm_mode: colocate needs vLLM in this Python environment; install it, or use a server."
    if samples_from_server(config) and direct_transfer(config) == "nccl" and not _installed("vllm"):
        yield "trl.vllm_weight_transfer: nccl needs vLLM in the trainer's environment; install it, or use 'folder'."


def tracker_problem(tracker: str) -> str | None:
    """Return why a tracker, by its name in `report_to`, cannot be used here, with what to install; None if it can."""
    modules = ("tensorboard", "tensorboardX") if tracker == "tensorboard" else (TRACKER_MODULES.get(tracker, tracker),)
    package = TRACKER_PACKAGES.get(tracker, modules[0])
    if tracker != "kubeflow" and not any(map(_installed, modules)):  # which needs no package
        return f"the tracker is not installed: pip install {package}"
    if tracker == "swanlab" and (installed := _version(tracker)) is not None and installed >= Version("0.8"):
        return f"transformers calls what swanlab {installed} no longer has: pip install {SWANLAB}"
    return None


def report_to_problems(names: Iterable[str] | None) -> Iterator[str]:
    """Yield what is wrong with `report_to`, which transformers would read after the model is loaded."""
    for name in names or ():
        if name not in INTEGRATION_TO_CALLBACK:
            hint = did_you_mean(name, INTEGRATION_TO_CALLBACK) or f" One of {', '.join(INTEGRATION_TO_CALLBACK)}."
            yield f"report_to: '{name}' is not a tracker.{hint}"
        elif (problem := tracker_problem(name)) is not None:
            yield f"report_to='{name}': {problem}, or leave it out; the run's folder has all metrics anyway."


def folders(config: Config) -> Iterator[str]:
    """Check the output folder, the checkpoint to resume from and the DeepSpeed config."""
    if (reason := unwritable_reason(Path(config.run.output_dir))) is not None:
        yield f"output_dir: {reason}. Name another folder."
    if config.run.resume_from is not None and not (folder := Path(config.run.resume_from).expanduser()).is_dir():
        yield f"resume_from_checkpoint: there is no folder {folder}. Mend the path."
    try:
        zero_options(config.sharding.deepspeed or {}, config.folder)
    except UserError as error:
        yield str(error)


def users(config: Config) -> Iterator[str]:
    """Check that what a config names by path can be loaded, with the options it is given."""
    try:
        load_user_code(config)
    except UserError as error:
        yield str(error)


def _installed(name: str) -> bool:
    return name in sys.modules or find_spec(name) is not None


def _version(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None


def check_machine(config: Config, *, trains: bool = True) -> list[str]:
    """Return what prevents a run on this machine, each with its YAML path; servers are not contacted."""
    return [*gpus(config, trains=trains), *packages(config, trains=trains), *folders(config), *users(config)]


def require_machine(config: Config, *, trains: bool) -> None:
    """Raise where something prevents a run on this machine."""
    if problems := check_machine(config, trains=trains):
        raise UserError("\n".join(problems))
