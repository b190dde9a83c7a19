"""PRM: process reward model, a class at the end of every reasoning step."""

from typing import ClassVar

from upweight.lazy_imports import F, Tensor
from upweight.methods.base import Method, required, scalar
from upweight.types import Batch, Loss, Mean, Outputs


class PRM(Method):
    """Cross-entropy of each step's label."""

    name: ClassVar[str] = "prm"
    head: ClassVar = "step_score"
    data: ClassVar = "steps"
    keeps_dropout: ClassVar[bool] = True
    learning_rate: ClassVar[float] = 1e-5
    lora_learning_rate: ClassVar[float | None] = 1e-4

    @property
    def label(self) -> str:
        return "process reward model"

    def count(self, batch: Batch) -> dict[str, Tensor]:
        return {"steps": scalar(len(batch.target_T), batch)}

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        scores_TC = required(out.scores_TC)
        if scores_TC.shape[1] == 1:  # one score for a yes: the same as two classes, with no's score held at zero
            scores_TC = F.pad(scores_TC, (1, 0))
        loss = F.cross_entropy(scores_TC, batch.target_T, reduction="sum")
        return Loss({"steps": loss}, {"accuracy": Mean.of(scores_TC.argmax(1) == batch.target_T)})
