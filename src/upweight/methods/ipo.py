"""IPO: Identity Preference Optimization (arXiv:2310.12036), on log-ratios averaged over tokens."""

from typing import ClassVar

from upweight.lazy_imports import Tensor
from upweight.methods.base import Method, WithReference, pair_counts, pair_metrics, required, sequence_mean
from upweight.settings import setting
from upweight.types import Batch, Loss, Outputs


class IPO(WithReference, Method):
    """Regression of the pair's margin to a fixed target."""

    name: ClassVar[str] = "ipo"
    data: ClassVar = "pairs"
    reads: ClassVar[frozenset[str]] = frozenset({"entropy_T", "mean_logit_T", "is_top_T"})

    beta: float = setting(
        "rl_beta", 0.1, "Pull towards the reference model: the target margin is 1 / (2 beta).", also=("trl.beta",), gt=0
    )

    def count(self, batch: Batch) -> dict[str, Tensor]:
        return pair_counts(batch)

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        log_ratio_S = sequence_mean(required(out.logps_T) - required(out.ref_logps_T), batch)
        chosen_P, rejected_P = log_ratio_S[required(batch.pair_P2)].unbind(1)
        loss_P = (chosen_P - rejected_P - 1 / (2 * self.beta)) ** 2
        return Loss({"pairs": loss_P.sum()}, pair_metrics(self.beta * chosen_P, self.beta * rejected_P, out, batch))
