"""SFT: maximum likelihood of the scored tokens, optionally weighted by their probability."""

from typing import Any, ClassVar, Literal

from pydantic import field_validator
from torch import Tensor

from upweight.methods.base import Method, required, scalar
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

    loss_type: Literal["nll", "dft"] = setting(
        "sft_loss_type", "nll", "Token loss: nll is the negative log-prob, dft weights it by the token's probability."
    )

    @field_validator("loss_type", mode="before")
    @classmethod
    def _chunked_is_nll(cls, value: Any) -> Any:
        return "nll" if value == "chunked_nll" else value  # the head is always computed in chunks

    def count(self, batch: Batch) -> dict[str, Tensor]:
        return {"tokens": scalar(len(batch.sequence_T), batch)}

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        logps_T = required(out.logps_T)
        loss_T = -logps_T * logps_T.detach().exp() if self.loss_type == "dft" else -logps_T
        metrics = {"entropy": Mean.of(required(out.entropy_T)), "mean_token_accuracy": Mean.of(required(out.is_top_T))}
        return Loss({"tokens": loss_T.sum()}, metrics)
