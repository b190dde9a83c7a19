"""SFT: maximum likelihood of the scored tokens, optionally weighted by their probability."""

from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from upweight.lazy_imports import Tensor, torch
from upweight.methods.base import Method, required, scalar, sequence_sum
from upweight.methods.users import terms
from upweight.methods.users.cut import warn_if_cut_matters
from upweight.methods.users.function import OPTIONS, OPTIONS_HELP, Call, UserFunction, bind
from upweight.settings import setting
from upweight.types import Batch, Loss, Mean, Outputs


class SFT(Method):
    """Supervised fine-tuning on text."""

    name: ClassVar[str] = "sft"
    data: ClassVar = "text"
    reads: ClassVar[frozenset[str]] = frozenset({"entropy_T", "is_top_T"})
    keeps_dropout: ClassVar[bool] = True
    takes_noise: ClassVar[bool] = True
    learning_rate: ClassVar[float] = 2e-5
    lora_learning_rate: ClassVar[float | None] = None

    loss_type: Literal["nll", "dft"] | UserFunction = setting(
        "sft_loss_type", "nll", "Token loss: negative log-prob (nll), weighted by probability (dft), or your function."
    )
    method_args: dict[str, Any] = setting(OPTIONS, {}, OPTIONS_HELP)

    @field_validator("loss_type", mode="before")
    @classmethod
    def _chunked_is_nll(cls, value: Any) -> Any:
        return "nll" if value == "chunked_nll" else value  # the head is always computed in chunks

    @cached_property
    def calls(self) -> dict[str, Call]:
        """The user's loss, by its key."""
        return bind([("sft_loss_type", self.loss_type, terms.TOKENS)], self.method_args, type(self).model_fields)

    @model_validator(mode="after")
    def _functions_fit(self) -> Self:
        assert self.calls is not None
        return self

    def count(self, batch: Batch) -> dict[str, Tensor]:
        counts = {"tokens": scalar(len(batch.sequence_T), batch)}
        return counts | {"sequences": has_tokens(batch).sum().float()} if self.calls else counts

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        logps_T = required(out.logps_T)
        if call := self.calls.get("sft_loss_type"):
            return self._user_loss(call, out, batch)
        loss_T = -logps_T * logps_T.detach().exp() if self.loss_type == "dft" else -logps_T
        metrics = {"entropy": Mean.of(required(out.entropy_T)), "mean_token_accuracy": Mean.of(required(out.is_top_T))}
        return Loss({"tokens": loss_T.sum()}, metrics)

    def _user_loss(self, call: Call, out: Outputs, batch: Batch) -> Loss:
        """Return the user's terms: of tokens, or of sequences."""
        pad, scored_T = terms.Padded(batch), torch.ones_like(batch.sequence_T, dtype=torch.bool)
        values = terms.token_values(pad, out, batch, scored_T)
        term, metrics = terms.checked_term(call, call(values, self), out, tokens=pad.shape, sequences=pad.shape[:1])
        kept_S = has_tokens(batch)
        kept = values["mask"]() if term.ndim == 2 else kept_S
        terms.require_finite(call, term, kept)
        warn_if_cut_matters(call, values, self, term, kept)
        metrics = terms.token_metrics(metrics, pad, scored_T, kept_S) | {"entropy": Mean.of(required(out.entropy_T))}
        unit, term = ("tokens", pad.flat(term)) if term.ndim == 2 else ("sequences", torch.where(kept_S, term, 0.0))
        return Loss({"tokens": 0 * term.sum(), "sequences": 0 * term.sum(), unit: term.sum()}, metrics)


def has_tokens(batch: Batch) -> Tensor:
    """Return whether each sequence has scored tokens."""
    return sequence_sum(torch.ones_like(batch.sequence_T), batch) > 0
