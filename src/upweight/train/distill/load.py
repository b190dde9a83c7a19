"""Loads the teachers of a config: whole models, adapters on their base, quantised, offloaded or sharded ones."""

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
from upweight.config.sections.model import LOGGED, SELF, AdapterSection, ModelSection
from upweight.config.servers import is_url
from upweight.engine import Engine
from upweight.errors import UserError
from upweight.log import logger, warn_once
from upweight.models.adapters.merge import AdapterFolder
from upweight.models.load import load_model, named_by, teacher_source
from upweight.models.modules import unwrap_peft
from upweight.models.precision import Sharding
from upweight.models.reference import (
    LivePolicy,
    Reference,
    SeparateModel,
    adapter_state,
    make_reference,
    reference_kind,
)
from upweight.models.tokenizer import load_tokenizer
from upweight.train.distill.align import Aligner
from upweight.train.distill.server import connect
from upweight.train.distill.teachers import LocalTeacher, LoggedTeacher, Teacher, Teachers
from upweight.train.distill.token_bytes import TokenBytes
from upweight.train.objects import Objects, Tokenizer

SHORT_CHAT = [{"role": "user", "content": "Hello"}]  # which every template can render
MOST_NAMED = 3  # tokens that an error names
AttachEngine = Callable[..., Engine]  # of a model; `longest`: of its sequences, None: not known


@dataclass(frozen=True)
class TeacherLoader:
    """Loads the teachers of a run beside its policy."""

    config: Config
    objects: Objects
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device
    sharding: Sharding

    def __call__(self, policy: nn.Module, engine: Engine, attach_engine: AttachEngine) -> Teachers:
        given, places = self.objects.teacher_model, self.config.teacher.places
        if given is not None and not isinstance(given, str):
            aligner = self._aligner_of_given(given)
            return Teachers({None: self._placed(given, aligner, policy, attach_engine)})
        places = places if given is None else {None: given}
        if not places:
            raise UserError("distill.teacher: missing. Name the model to learn from: a folder or a hub id.")
        by_name: dict[str | None, Teacher] = {}
        for name, place in places.items():
            key = "distill.teacher" if name is None else f"distill.teachers.{name}"
            if is_url(place):
                by_name[name] = connect(place, self.config.method, self.tokenizer, self.config.teacher.server_timeout)
            elif place == SELF:
                by_name[name] = self._self_teacher(policy, engine)
            elif place == LOGGED:
                by_name[name] = LoggedTeacher(self.config.method)
            else:
                with named_by(key if given is None else "teacher_model"):
                    loaded = self._loaded(place, key)
                by_name[name] = self._placed(*loaded, policy, attach_engine)
        return Teachers(by_name)

    def _self_teacher(self, policy: nn.Module, engine: Engine) -> LocalTeacher:
        """Return the policy as its own teacher, with the weights that the method chooses."""
        method, offload, base = self.config.method, self.config.optim.reference_offloading, unwrap_peft(policy)
        head = base.get_output_embeddings()
        if head is None or type(head).forward is not nn.Linear.forward:
            raise UserError(
                "distill.teacher: self needs a head without an adapter: leave it out of the adapted modules."
            )
        reference: Reference | None = LivePolicy(policy)
        if method.self_teacher != "live":
            synced = method.self_teacher == "ema"
            kind = reference_kind(needed=True, adapter=adapter_state(policy), synced=synced)
            reference = make_reference(kind, policy, self.dtype, synced=synced, offload=offload)
        assert reference is not None
        return LocalTeacher(method, reference, engine, base.config.get_text_config().vocab_size, offload)

    def _placed(
        self, model: nn.Module, aligner: Aligner | None, policy: nn.Module, attach_engine: AttachEngine
    ) -> LocalTeacher:
        """Place a teacher's model, and give it an engine."""
        offload, method = self.config.optim.reference_offloading, self.config.method
        if self.sharding == "fsdp":
            shard_frozen(model, self.device)
        elif not offload and getattr(model, "hf_device_map", None) is None:
            nn.Module.to(model, self.device)
        reference = SeparateModel(policy, model, self.device if offload else None)
        vocabulary = unwrap_peft(policy).config.get_text_config().vocab_size
        # Texts have other numbers of tokens for it than for the student.
        engine = attach_engine(model) if aligner is None else attach_engine(model, longest=None)
        return LocalTeacher(method, reference, engine, vocabulary, offload, aligner)

    def _loaded(self, place: str, key: str) -> tuple[nn.Module, Aligner | None]:
        """Load the model of a folder or the hub, or an adapter with its base; and what aligns its tokens."""
        student, teacher = self.config.model, self.config.teacher
        section = teacher_source(place, student, teacher.revision, key)
        options = {name: value for name, value in teacher.load_options.items() if name not in ("dtype", "torch_dtype")}
        section = section.model_copy(update={"load_options": options})
        given = teacher.load_options.get("dtype", teacher.load_options.get("torch_dtype"))
        dtype = getattr(torch, given, self.dtype) if isinstance(given, str) else given or self.dtype
        logger.info("teacher: loading %s", place)
        folder = Path(place).expanduser()
        if (folder / "adapter_config.json").is_file():
            adapted = AdapterFolder(section, folder)
            aligner = self._aligner(adapted.tokenizer(), f"{key}: {place}")
            return adapted.load(dtype), aligner
        tokenizer = load_tokenizer(section)
        aligner = self._aligner(tokenizer, f"{key}: {place}")
        warn_of_other_template(self.tokenizer, tokenizer, f"{key}: {place}")
        packed = AdapterSection(load_in_4bit=teacher.load_in_4bit, load_in_8bit=teacher.load_in_8bit)
        return load_model(section, dtype, adapter=packed), aligner

    def _aligner(self, teacher: Any, where: str) -> Aligner | None:
        """Return what aligns the tokens of a teacher with the student's; None where both have the same."""
        if self.config.teacher.align is None or not other_tokens(self.tokenizer, teacher):
            require_same_vocabulary(self.tokenizer, teacher, where)
            return None
        aligner = Aligner(TokenBytes(self.tokenizer, "base_model"), TokenBytes(teacher, where))
        ours, theirs = (len(one.bytes_of) + len(one.marks) for one in (aligner.student, aligner.teacher))
        logger.info("%s: %d tokens are shared, of %d here and %d there", where, len(aligner.shared[0]), ours, theirs)
        return aligner

    def _aligner_of_given(self, model: Any) -> Aligner | None:
        """Return what aligns the tokens of a model that a script passes; it is loaded from where the model was."""
        source = model.config.name_or_path
        if source:
            return self._aligner(load_tokenizer(ModelSection(base_model=source)), f"teacher_model: {source}")
        if self.config.teacher.align is not None:
            raise UserError("distill.align: teacher_model was not loaded from anywhere, so its tokenizer is not known.")
        warn_once("teacher_model: was not loaded from anywhere: that its tokenizer is the student's is not checked")
        return None


def other_tokens(student: Any, teacher: Any) -> dict[str, int]:
    """Return the tokens of the student that have another id, or none, in the teacher's vocabulary."""
    # Rows of embeddings that only pad a vocabulary are no tokens, so sizes are not compared.
    known, padding = teacher.get_vocab(), student.pad_token
    other = {token: number for token, number in student.get_vocab().items() if known.get(token) != number}
    other.pop(padding, None)  # padding is never scored
    return other


def require_same_vocabulary(student: Any, teacher: Any, where: str) -> None:
    """Raise where a token of the student has another id, or none, in the teacher's vocabulary."""
    other, known = other_tokens(student, teacher), teacher.get_vocab()
    if not other:
        return
    shown = ", ".join(
        f"{token!r} is {number} here and {known.get(token, 'missing')} there"
        for token, number in sorted(other.items(), key=lambda item: item[1])[:MOST_NAMED]
    )
    problem = f"has another tokenizer than the student: {len(other)} tokens differ ({shown})"
    remedy = "Set 'distill.align: text', name a teacher of the same family, or train by SFT on texts that it wrote"
    raise UserError(f"{where} {problem}. {remedy}.")


def warn_of_other_template(student: Any, teacher: Any, where: str) -> None:
    """Warn where the teacher's tokenizer renders a conversation differently from the student's."""
    if not (getattr(student, "chat_template", None) and getattr(teacher, "chat_template", None)):
        return
    options = {"tokenize": False, "add_generation_prompt": True}
    ours, theirs = (tokenizer.apply_chat_template(SHORT_CHAT, **options) for tokenizer in (student, teacher))
    if ours != theirs:
        problem = f"has another chat template: it knows {theirs!r}, and is shown {ours!r}"
        remedy = "If rows are conversations, name the teacher's template by chat_template or chat_template_jinja"
        warn_once(f"{where} {problem}. {remedy}.")


def shard_frozen(model: nn.Module, device: torch.device) -> None:
    """Shard a frozen model over all ranks, layer by layer."""
    base = unwrap_peft(model)
    mesh = init_device_mesh(device.type, (PartialState().num_processes,))
    if device.type == "cuda":
        nn.Module.to(model, device)
    layers = set(base._no_split_modules or ())
    for module in [module for module in model.modules() if type(module).__name__ in layers]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
