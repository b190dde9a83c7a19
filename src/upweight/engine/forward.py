"""The engine: a model's forward from a packed batch to log-probs, scores and features."""

import functools
import inspect
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from upweight.engine.attention.interface import Tree, tree_masks, use_tree_attention
from upweight.engine.context_parallel import ContextGroup, ShardedTree, require_shareable
from upweight.engine.divergences import COMPARED, LISTED, OUTSIDE, Teacher, TeacherStates
from upweight.engine.head import run_head
from upweight.engine.image_rows import image_rows, reading_blank_image
from upweight.engine.layout import choose_layout
from upweight.engine.logits import (
    STATISTICS,
    WITHOUT_TEACHER,
    HeadRequest,
    LogitTransform,
    logit_transform,
    token_statistics,
)
from upweight.engine.packing import Layout
from upweight.engine.router import router_loss_of, router_statistics
from upweight.engine.routing import routing_of
from upweight.engine.scores import install_scores, scores_at
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.models.kernels.experts.grouped import group_experts
from upweight.models.kernels.experts.lora import add_expert_adapters
from upweight.models.kernels.fused_layers import fuse_layers
from upweight.models.modules import backbone_of, unwrap_peft, wrap_forward
from upweight.models.patches import add_adapters_in_place, end_shard_group, fuse_rotary, rope_row_lengths
from upweight.models.processor import ImageReader
from upweight.types import Batch, Divergence, Outputs


class Engine:
    """Installs the packed forward in a model, then runs packed batches through whatever wraps that model."""

    # Everything runs inside the forward of the wrapped module and the forward of the head module, each called once, so
    # that the hooks of DDP, FSDP2 and ZeRO-3 fire. Without the argument `packed` both run their stock forward.

    def __init__(
        self,
        model: nn.Module,
        layout: Literal["auto", "tree", "padded"] = "auto",
        longest: int | None = None,
        context: ContextGroup | None = None,  # its ranks share each row of trees
        images: ImageReader | None = None,  # None: rows have no images
        *,
        head_chunk: int | None = None,  # most scored tokens whose logits exist at a time; None: by the device
    ) -> None:
        """`model`: a causal language model or classifier, or a PeftModel around one; `longest`: longest sequence."""
        base = unwrap_peft(model)
        self.layout: Layout = choose_layout(base, layout, longest, reads_images=images is not None)
        self.context, self.images, self.head_chunk = context, images, head_chunk
        self.replay: bool | None = None  # of the policy's forwards, see `__call__`
        if context is not None:
            require_shareable(base.config, context.size)
            if self.layout != "tree":
                name = type(base).__name__
                raise UserError(f"context_parallel_size: cannot share {name}, whose rows are padded; set it to 1")
            if images is not None:
                raise UserError("context_parallel_size: rows with images cannot be shared by ranks; set it to 1")
        self.config = base.config
        self.scores = base.get_output_embeddings() is None
        self.router_loss = None if self.scores else router_loss_of(base)
        self.chooses_logits = "logits_to_keep" in inspect.signature(type(base).forward).parameters
        _install_forward(base)
        add_adapters_in_place(model)
        group_experts(base)
        add_expert_adapters(model)
        fuse_layers(model)
        fuse_rotary(model)

    def __call__(
        self,
        model: nn.Module,
        batch: Batch,
        statistics: frozenset[str] = frozenset(),
        *,
        temperature: float = 1.0,
        depths: tuple[float, ...] = (),
        feature_positions_T: Tensor | None = None,
        head: bool = True,
        teacher: Teacher | None = None,
        divergence: Divergence = WITHOUT_TEACHER,
        routers: bool = False,
        replay: bool | None = None,
    ) -> Outputs:
        """Run `model` (as wrapped for training) on a batch; return log-probs and `statistics`, or scores.

        `depths` adds hidden states, each at a fraction of the model's depth, at the scored positions or at
        `feature_positions_T`; `head=False` computes nothing else, and without depths the states below the head.
        `teacher` and `divergence`: what the scored tokens are compared with, for the statistics of both.
        `routers` adds how the routers of a mixture share out the tokens, each counted by `weight_BN`.
        `replay`: use the experts of `routes_NLA` (True), or only compare with them (False); None: as routers choose.
        """
        unknown = statistics - {*STATISTICS, *COMPARED, *LISTED}
        assert not unknown, f"unknown statistics {sorted(unknown)}"
        assert batch.end_BN is None or self.layout == "tree", "this architecture takes padded rows"
        names = ("ids_BN", "position_BN", "end_BN", "length_B", "source_T", "target_T")
        packed = {name: getattr(batch, name) for name in names} | {
            "images": self._read_images(batch),
            "context": None if batch.end_BN is None else self.context,
            "statistics": tuple(sorted(statistics)),
            "temperature": float(temperature),
            "depths": depths,
            "feature_positions_T": batch.source_T if feature_positions_T is None else feature_positions_T,
            "head": head,
            "teacher": teacher,
            "divergence": divergence,
            "head_chunk": self.head_chunk,
            "weight_BN": batch.weight_BN if routers else None,
            "routes_NLA": None if replay is None else batch.routes_NLA,
            "replay": replay,
            "top_k": self.router_loss.top_k if routers and self.router_loss is not None else 0,
        }
        return Outputs(**model(packed=packed))

    def _read_images(self, batch: Batch) -> dict[str, Any] | None:
        """Return the pixels of a batch's images, and where their features lie."""
        if batch.images is None:
            return None
        assert self.images is not None, "the engine has nothing to read images with"
        refs, device = batch.images.refs, batch.ids_BN.device
        pixels = self.images.inputs(refs) if refs else self.images.blank_inputs
        inputs = {name: value.to(device) for name, value in pixels.items()}
        return {"inputs": inputs} | {
            name: getattr(batch.images, name) for name in ("at_I", "feature_I", "position_3BN")
        }

    def teacher_states(self, model: nn.Module, batch: Batch) -> TeacherStates:
        """Return the states of a frozen model at the scored tokens, and what turns them into logits."""
        base = unwrap_peft(getattr(model, "module", model))
        head, transform = base.get_output_embeddings(), base.__dict__.get("_logit_transform")
        if head is None or transform is None:
            raise UserError(
                f"distill.teacher: the head of {type(base).__name__} is more than a projection: name another"
            )
        with torch.no_grad():
            hidden_TE = self(model, batch, head=False).features_TF
        assert hidden_TE is not None
        project = head.__dict__["_stock_forward"]
        if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
            # The weights of now, whole: later the module may hold others, and ranks have different numbers of chunks.
            weight, bias = (_whole(value, hidden_TE.dtype) for value in (head.weight, head.bias))
            project = functools.partial(F.linear, weight=weight, bias=bias)
        return TeacherStates(hidden_TE, project, transform, base.config.get_text_config().vocab_size)


def _whole(value: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a weight without its gradient, gathered from the ranks where they hold shards of it."""
    if value is None:
        return None
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().to(dtype)


def _install_forward(base: PreTrainedModel) -> None:
    """Give a model the packed forward, and its head or body the forward that this one calls."""
    if "_stock_forward" in base.__dict__:
        return
    head = base.get_output_embeddings()
    if head is None:
        install_scores(base, backbone_of(base))
    else:
        base.__dict__["_logit_transform"] = logit_transform(base, backbone_of(base))
        wrap_forward(head, run_head)

    @functools.wraps(type(base).forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        packed, blank_image = kwargs.pop("packed", None), kwargs.pop("blank_image", None)
        if packed is not None:
            return _packed_forward(self, packed)
        reads_blank = nullcontext() if blank_image is None else reading_blank_image(self, blank_image)
        with reads_blank, nullcontext() if (routing := routing_of(self)) is None else routing.recording(None):
            return self.__dict__["_stock_forward"](*args, **kwargs)

    wrap_forward(base, forward)


def _packed_forward(base: PreTrainedModel, packed: dict[str, Any]) -> dict[str, Tensor]:
    """Return outputs by name: plain tensors in a dict, which is where wrappers look for them."""
    context: ContextGroup | None = packed["context"]
    if context is None:
        return _local_outputs(base, packed)
    length = packed["ids_BN"].shape[1]
    scored = context.shard(packed["source_T"], length)
    featured = context.shard(packed["feature_positions_T"], length) if packed["depths"] else scored
    local = {"source_T": scored.offset_I, "target_T": packed["target_T"][scored.computed_I]}
    if packed["teacher"] is not None:
        local["teacher"] = packed["teacher"].rows(scored.computed_I)
        local["divergence"] = replace(packed["divergence"], summed=False)  # a dropped token must not count
    if packed["weight_BN"] is not None:
        local["weight_BN"] = context.slice(packed["weight_BN"])
    out = _local_outputs(base, packed | local | {"feature_positions_T": featured.offset_I})
    joined = {name: context.sum(value) for name, value in out.items() if name.startswith("router_")}
    shards = {name: featured if name == "features_TF" else scored for name in out if name not in joined}
    return joined | {name: shard.gather(out[name]) for name, shard in shards.items()}


def _local_outputs(base: PreTrainedModel, packed: dict[str, Any]) -> dict[str, Tensor]:
    """Compute this rank's outputs of a packed batch, with the experts of its record where routers have one."""
    if (routing := routing_of(base)) is None:
        return _model_outputs(base, packed)
    with routing.replaying(packed["routes_NLA"], bool(packed["replay"])) as forced:
        out = _model_outputs(base, packed)
    return out if forced is None else out | {"router_changes_4": forced.changes()}


def _model_outputs(base: PreTrainedModel, packed: dict[str, Any]) -> dict[str, Tensor]:
    head = base.get_output_embeddings()
    transform: LogitTransform | None = base.__dict__.get("_logit_transform")
    request = _head_request(packed, transform or LogitTransform())
    if head is not None and transform is None and packed["head"] and not packed["depths"]:
        return _from_model_logits(base, packed, request)
    if head is None and packed["head"]:
        assert not packed["depths"], "features are read from language models"
        scored = lambda body: _run_body(body, base, packed)[0].flatten(0, 1)[packed["source_T"]]  # noqa: E731
        return {"scores_TC": scores_at(base, len(packed["source_T"]), scored)}
    body = _run_body(backbone_of(base), base, packed, output_hidden_states=bool(packed["depths"]))
    out = _router_outputs(body, packed)
    if packed["depths"]:
        states = body.hidden_states
        picked = [states[int(depth * (len(states) - 1))].flatten(0, 1) for depth in packed["depths"]]
        out["features_TF"] = torch.cat([state[packed["feature_positions_T"]] for state in picked], -1)
    hidden_TD = body[0].flatten(0, 1)[packed["source_T"]]
    if not packed["head"]:
        if head is not None:
            end_shard_group(head, hidden_TD)
        return {"features_TF": hidden_TD} | out
    assert head is not None
    given = {"vocabulary": base.config.get_text_config().vocab_size, "teacher": packed["teacher"]}
    return out | head(hidden_TD, target=packed["target_T"], request=request, **given)


def _router_outputs(output: Any, packed: dict[str, Any]) -> dict[str, Tensor]:
    """Return how routers shared out the tokens, from the output of a body or a model; nothing unless requested."""
    if packed["weight_BN"] is None:
        return {}
    return router_statistics(output.router_logits, packed["weight_BN"].flatten(), packed["top_k"])


def _head_request(packed: dict[str, Any], transform: LogitTransform) -> HeadRequest:
    """Return what the head computes at the scored tokens of a packed batch."""
    teacher: Teacher | None = packed["teacher"]
    teacher_transform = teacher.logit_transform if isinstance(teacher, TeacherStates) else None
    statistics, how = frozenset(packed["statistics"]), packed["divergence"]
    if isinstance(teacher, TeacherStates) and teacher.matched is not None and statistics.intersection(COMPARED):
        statistics |= frozenset(OUTSIDE)
    return HeadRequest(transform, packed["temperature"], statistics, how, teacher_transform, packed["head_chunk"])


def _run_body(call: Any, base: PreTrainedModel, packed: dict[str, Any], **options: Any) -> Any:
    """Call the body (or the whole stock forward) on the rows of a batch."""
    ids_BN, length_B, end_BN = packed["ids_BN"], packed["length_B"], packed["end_BN"]
    context: ContextGroup | None = packed["context"]
    budget = base.__dict__.get("_activation_budget")
    if packed["weight_BN"] is not None:
        options["output_router_logits"] = True
    # Recomputing exchanges heads again, and ranks that share a row must do that equally often.
    if budget is not None and context is None:
        budget.choose_kept_layers(ids_BN.numel())
    inputs: dict[str, Any] = {"input_ids": ids_BN}
    if end_BN is not None:
        use_tree_attention(base)
    if packed["images"] is not None:
        rows = image_rows(base, packed["images"], ids_BN)
        call, inputs = rows.call, rows.inputs
    if end_BN is None:
        mask = torch.arange(ids_BN.shape[1], device=ids_BN.device) < length_B[:, None]
        with rope_row_lengths(length_B):
            return call(**inputs, attention_mask=mask.long(), use_cache=False, **options)
    position_BN = packed["position_BN"]
    tree = Tree(end_BN, position_BN) if context is None else ShardedTree(end_BN, position_BN, context)
    if packed["images"] is None:
        inputs = {"input_ids": tree.local(ids_BN)}
    inputs = {"position_ids": tree.local(position_BN)} | inputs
    # A mask of ones, since without one transformers looks for packed sequences in the positions, and waits for the GPU.
    mask = torch.ones_like(tree.local(ids_BN))
    with tree_masks(tree):
        return call(**inputs, attention_mask=mask, use_cache=False, **options)


def _from_model_logits(base: PreTrainedModel, packed: dict[str, Any], request: HeadRequest) -> dict[str, Tensor]:
    """Compute statistics from the model's logits, for heads that are more than a projection, a scale and a cap."""
    warn_once(f"{type(base).__name__} builds its logits as a whole: memory grows with the vocabulary times the tokens")
    if packed["images"] is not None:
        raise UserError(f"{type(base).__name__}: the head is more than a projection, and images cannot be trained on")
    output = _run_body(base.__dict__["_stock_forward"], base, packed)
    logits_TV, teacher = output.logits.flatten(0, 1)[packed["source_T"]], packed["teacher"]
    if isinstance(teacher, TeacherStates):
        logits_TV = logits_TV[:, : teacher.vocabulary]
    given = None if teacher is None else teacher.values(logits_TV.shape[1])
    statistics = token_statistics(logits_TV, packed["target_T"], request, given)
    return {name: statistics[name] for name in request.names} | _router_outputs(output, packed)
