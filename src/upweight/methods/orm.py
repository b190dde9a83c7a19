"""ORM: outcome reward model, one score for each sequence, fitted to preferences (Bradley-Terry)."""

from typing import ClassVar

from upweight.lazy_imports import F, Tensor
from upweight.methods.base import Method, pair_counts, required, sequence_sum
from upweight.settings import setting
from upweight.types import Batch, Extreme, Loss, Mean, Outputs


class ORM(Method):
    """The chosen sequence should score higher than the rejected one."""

    name: ClassVar[str] = "orm"
    head: ClassVar = "sequence_score"
    data: ClassVar = "pairs"
    keeps_dropout: ClassVar[bool] = True
    learning_rate: ClassVar[float] = 1e-5
    lora_learning_rate: ClassVar[float | None] = 1e-4

    center_rewards_coefficient: float = setting(
        "center_rewards_coefficient", 0.0, "Weight of the term that keeps the scores centred on zero; 0 is off.", ge=0
    )

    @property
    def label(self) -> str:
        return "reward model"

    def count(self, batch: Batch) -> dict[str, Tensor]:
        return pair_counts(batch)

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        scores_S = sequence_sum(required(out.scores_TC)[:, 0], batch)
        chosen_P, rejected_P = scores_S[required(batch.pair_P2)].unbind(1)
        margin_P = chosen_P - rejected_P
        target_P = margin_P if batch.margin_P is None else margin_P - batch.margin_P
        loss_P = -F.logsigmoid(target_P) + self.center_rewards_coefficient * (chosen_P + rejected_P) ** 2
        metrics = {
            "accuracy": Mean.of((margin_P > 0).float()),
            "margin": Mean.of(margin_P),
            "min_reward": Extreme.over(scores_S, sign=-1),
            "mean_reward": Mean.of(scores_S),
            "max_reward": Extreme.over(scores_S),
        }
        return Loss({"pairs": loss_P.sum()}, metrics)
