"""The load-balancing loss of a whole step: how often each expert is chosen is counted before any gradient."""

import math
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from upweight.config.sections.training import OptimSection
from upweight.engine.router import balance_loss, router_loss_of
from upweight.errors import UserError
from upweight.methods.base import Method, required
from upweight.types import Mean, Metrics, Outputs


def router_coefficient(base: PreTrainedModel, method: Method, optim: OptimSection) -> float:
    """Return the coefficient of the model's load-balancing loss, 0 where it is off or where there is none."""
    coefficient = _coefficient(base, method, optim.router_aux_loss_coef)
    if coefficient and optim.gradient_checkpointing and optim.checkpointing_args.get("use_reentrant"):
        problem = "'use_reentrant: true' loses the gradient of the routers' load-balancing loss"
        raise UserError(f"gradient_checkpointing_kwargs: {problem}. Drop it, or set 'router_aux_loss_coef: 0'.")
    return coefficient


def _coefficient(base: PreTrainedModel, method: Method, asked: float | None) -> float:
    loss = router_loss_of(base) if method.head == "tokens" else None
    if loss is not None and asked is None:
        wanted = method.balances_routers or getattr(base.config.get_text_config(), "output_router_logits", False)
        return loss.coefficient if wanted else 0.0
    if asked and loss is None:
        why = "has no load-balancing loss" if method.head == "tokens" else "returns no router logits"
        raise UserError(f"router_aux_loss_coef: {type(base).__name__} {why}. Leave it out, or set it to 0.")
    return asked or 0.0


@dataclass
class RouterBalance:
    """Adds up how the routers of a model share out the tokens of a step, over its rows and ranks."""

    coefficient: float
    top_k: int  # experts of a token
    accelerator: Accelerator
    context_size: int = 1  # ranks that compute the same rows
    step_load_LX: Tensor | None = None  # choices of each expert in the step, over all ranks
    step_tokens: Tensor | None = None  # that they are counted over; one in several sequences counts for each
    log_load_LX: Tensor | None = None  # the shares of choices since the last log, summed over steps
    _loads: list[Tensor] = field(default_factory=list)  # of each row of this rank
    _losses: list[Tensor] = field(default_factory=list)
    _entropies: list[Tensor] = field(default_factory=list)

    def start(self) -> None:
        """Forget the loads of the step before, or of one that ran out of memory."""
        self.step_load_LX, self.step_tokens = None, None
        for rows in (self._loads, self._losses, self._entropies):
            rows.clear()

    def count(self, out: Outputs) -> None:
        """Add the choices in a row of this rank."""
        self._loads.append(required(out.router_load_LX).detach())

    def finish_count(self) -> None:
        """Sum the choices over all ranks, once those of every row are counted."""
        total = self.accelerator.reduce(torch.stack(self._loads).sum(0) / self.context_size, "sum")
        assert isinstance(total, Tensor)
        self.step_load_LX, self.step_tokens = total, (total[0].sum() / self.top_k).clamp(min=1)

    def row_loss(self, out: Outputs) -> Tensor:
        """Return what a row adds to the loss of the step; the choices in the only row of a step are counted now."""
        if self.step_load_LX is None:
            self.count(out)
            self.finish_count()
        loss = balance_loss(required(self.step_load_LX), required(out.router_prob_LX), required(self.step_tokens))
        self._losses.append(loss.detach())
        self._entropies.append(required(out.router_entropy_L).sum())
        return self.coefficient * loss

    def metrics(self) -> Metrics:
        """Return the loss of the step without its coefficient, and how even the loads are."""
        load_LX, tokens = required(self.step_load_LX), required(self.step_tokens)
        layers, experts = load_LX.shape
        share_LX = load_LX / load_LX.sum(1, keepdim=True).clamp(min=1)
        self.log_load_LX = share_LX if self.log_load_LX is None else self.log_load_LX + share_LX
        ranks, one = self.accelerator.num_processes, torch.ones_like(tokens)
        loss, entropy = (torch.stack(rows).sum() / self.context_size for rows in (self._losses, self._entropies))
        return {
            "aux_loss": Mean(loss, one / ranks),
            "router/entropy": Mean(entropy / math.log(max(experts, 2)), layers * tokens / ranks),
            "router/max_load": Mean.of(experts * share_LX.amax(1)),
            "router/unused_experts": Mean.of((load_LX == 0).float()),
        }

    def take_load(self) -> list[list[float]] | None:
        """Return each expert's share of the choices of its layer since the last call, by layer."""
        load_LX, self.log_load_LX = self.log_load_LX, None
        if load_LX is None:
            return None
        return (load_LX / load_LX.sum(1, keepdim=True).clamp(min=1e-9)).tolist()
