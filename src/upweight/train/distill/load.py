"""Loads the teachers of a config: whole models, adapters on their base, quantised, offloaded or sharded ones."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from upweight.config import Config
from upweight.config.sections.model import AdapterSection, ModelSection
from upweight.engine import Engine
from upweight.errors import UserError
from upweight.log import logger, warn_once
from upweight.models.adapters.merge import AdapterFolder
from upweight.models.load import load_model, resolve_source
from upweight.models.modules import unwrap_peft
from upweight.models.precision import Sharding
from upweight.models.reference import SeparateModel
from upweight.models.tokenizer import load_tokenizer
from upweight.train.distill.teachers import LocalTeacher, Teacher, Teachers
from upweight.train.objects import Objects, Tokenizer

MOST_NAMED = 3  # tokens that an error names
AttachEngine = Callable[[nn.Module], Engine]


@dataclass(frozen=True)
class TeacherLoader:
    """Loads the teachers of a run beside its policy."""

    config: Config
    objects: Objects
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device
    sharding: Sharding

    def __call__(self, policy: nn.Module, attach_engine: AttachEngine) -> Teachers:
        given = self.objects.teacher
        if given is not None:
            _check_given(given, self.tokenizer)
            return Teachers({None: self._placed(given, policy, attach_engine)})
        by_name: dict[str | None, Teacher] = {}
        for name, place in self.config.teacher.places.items():
            key = "distill.teacher" if name is None else f"distill.teachers.{name}"
            by_name[name] = self._placed(self._loaded(place, key), policy, attach_engine)
        return Teachers(by_name)

    def _placed(self, model: nn.Module, policy: nn.Module, attach_engine: AttachEngine) -> LocalTeacher:
        """Place a teacher's model, and give it an engine."""
        offload, method = self.config.optim.reference_offloading, self.config.method
        if self.sharding == "fsdp":
            _shard(model, self.device)
        elif not offload and getattr(model, "hf_device_map", None) is None:
            nn.Module.to(model, self.device)
        reference = SeparateModel(policy, model, self.device if offload else None)
        vocabulary = unwrap_peft(policy).config.get_text_config().vocab_size
        return LocalTeacher(method, reference, attach_engine(model), vocabulary, offload)

    def _loaded(self, place: str, key: str) -> nn.Module:
        """Load the model of a folder or the hub, or an adapter with its base, if its vocabulary is the student's."""
        student, teacher = self.config.model, self.config.teacher
        source, _ = resolve_source(place, None, key)
        section = ModelSection(base_model=source, trust_remote_code=student.trust_remote_code)
        adapter_file = Path(source) / "adapter_config.json"
        logger.info("teacher: loading %s", place)
        if adapter_file.is_file():
            base = json.loads(adapter_file.read_text(encoding="utf-8")).get("base_model_name_or_path")
            adapted = AdapterFolder(section.model_copy(update={"base_model": base or student.base_model}), Path(source))
            require_same_vocabulary(self.tokenizer, adapted.tokenizer(), f"{key}: {place}")
            return adapted.load(self.dtype)
        require_same_vocabulary(self.tokenizer, load_tokenizer(section), f"{key}: {place}")
        packed = AdapterSection(load_in_4bit=teacher.load_in_4bit, load_in_8bit=teacher.load_in_8bit)
        return load_model(section, self.dtype, adapter=packed)


def _check_given(model: Any, tokenizer: Tokenizer) -> None:
    """Compare the vocabulary of a model that a script passes, where its tokenizer is known."""
    source = model.config.name_or_path
    if not source:
        warn_once("teacher_model: was not loaded from anywhere: that its tokenizer is the student's is not checked")
        return
    require_same_vocabulary(tokenizer, load_tokenizer(ModelSection(base_model=source)), f"teacher_model: {source}")


def require_same_vocabulary(student: Any, teacher: Any, where: str) -> None:
    """Raise where a token of the student has another id, or none, in the teacher's vocabulary."""
    # Rows of embeddings that only pad a vocabulary are no tokens, so sizes are not compared.
    known, padding = teacher.get_vocab(), student.pad_token
    other = {token: number for token, number in student.get_vocab().items() if known.get(token) != number}
    other.pop(padding, None)  # padding is never scored
    if not other:
        return
    shown = ", ".join(
        f"{token!r} is {number} here and {known.get(token, 'missing')} there"
        for token, number in sorted(other.items(), key=lambda item: item[1])[:MOST_NAMED]
    )
    problem = f"has another tokenizer than the student: {len(other)} tokens differ ({shown})"
    raise UserError(f"{where} {problem}. Name a teacher of the same family, or train by SFT on texts that it wrote.")


def _shard(model: nn.Module, device: torch.device) -> None:
    """Shard a frozen model over all ranks, layer by layer."""
    base = unwrap_peft(model)
    mesh = init_device_mesh(device.type, (PartialState().num_processes,))
    if device.type == "cuda":
        nn.Module.to(model, device)
    layers = set(base._no_split_modules or ())
    for module in [module for module in model.modules() if type(module).__name__ in layers]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
