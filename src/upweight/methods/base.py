"""What every training method is: its settings, what it needs, and pure functions from log-probs to sums."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from upweight.settings import Section
from upweight.types import Batch, Loss, Mean, Outputs, Sample


@dataclass(frozen=True)
class ReferenceSync:
    """How a reference follows the policy: the policy's share in each move, and the steps between two of them."""

    alpha: float
    steps: int


class PolicySettings(Protocol):
    """The settings that rollouts read from every online method."""

    @property
    def max_completion_length(self) -> int: ...
    @property
    def mask_truncated_completions(self) -> bool: ...
    @property
    def reward_weights(self) -> tuple[float, ...] | None: ...
    @property
    def sampler_correction(self) -> bool | None: ...
    @property
    def off_policy_mask_threshold(self) -> float | None: ...
    @property
    def reads_all(self) -> list[str]:
        """Why completions without an advantage are trained on too; empty where they need not be."""
        ...


class Method(Section, ABC):
    """One training method. Nothing in it divides by a count, talks to other ranks or reads a value off the device."""

    name: ClassVar[str]
    head: ClassVar[Literal["tokens", "sequence_score", "step_score"]] = "tokens"
    data: ClassVar[Literal["text", "pairs", "labelled", "steps", "prompts"]]
    online: ClassVar[bool] = False
    keeps_dropout: ClassVar[bool] = False  # where nothing is compared with what the model says without it
    takes_noise: ClassVar[bool] = False  # on embeddings, which elsewhere would come between policy and reference
    reward_names: ClassVar[tuple[str, ...]] = ()  # of rewards that the method makes itself, from features
    learning_rate: ClassVar[float]
    lora_learning_rate: ClassVar[float | None] = None  # None: the same as without LoRA

    @property
    def needs_reference(self) -> bool:
        """Whether `loss` reads the reference's log-probs."""
        return False

    @property
    def needs_drift(self) -> bool:
        """Whether `advantages` read how far the policy is from the reference on each completion."""
        return False

    @property
    def precomputes_reference(self) -> bool:
        """Whether the reference's log-probs are computed once, before training."""
        return False

    @property
    def reference_sync(self) -> ReferenceSync | None:
        """How the reference follows the policy; None where it stays as it is."""
        return None

    @property
    def policy_settings(self) -> PolicySettings | None:
        """Settings of the policy gradient; None for offline methods."""
        return None

    @property
    def mismatched(self) -> Literal["rotate", "all"] | None:
        """Which answers to other prompts each prompt is also seen with, to estimate a KL: the neighbour's, or all."""
        return None

    @property
    def strided(self) -> bool:
        """Whether short blocks all along a document are sampled instead of completions."""
        return False

    @property
    def scores_prompt(self) -> bool:
        """Whether the likelihood of a chosen answer covers its prompt too."""
        return False

    @property
    def verdict_weights(self) -> dict[bool, float] | None:
        """Weights of wanted and unwanted answers, for a method that compares the two."""
        return None

    @property
    def scales_each_reward(self) -> bool:
        """Whether rewards are normalised one by one before they are summed."""
        return False

    @property
    def group_size(self) -> int:
        """Completions sampled for each prompt, for online methods."""
        return 1

    @property
    def statistics(self) -> frozenset[str]:
        """Outputs fields beyond `logps_T` that `loss` reads."""
        return frozenset()

    @property
    def needs_preparation(self) -> bool:
        """Whether `loss` reads what `prepare` made of the whole step."""
        return False

    @abstractmethod
    def count(self, batch: Batch) -> dict[str, Tensor]:
        """Units this batch adds to the global denominators; known before any forward.

        A unit named `rollout_...` is averaged over the optimizer steps of one generation batch, the others belong
        to their own step.
        """

    def contributes(self, sample: Sample) -> bool:
        """Whether a sample can move the gradient; one that cannot need not be forwarded."""
        return True

    def collect(self, out: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Values that `prepare` wants to see for the whole step; they are joined over batches and ranks."""
        return {}

    def prepare(self, collected: dict[str, Tensor]) -> dict[str, Tensor]:
        """What `loss` needs to know about the whole step, from what `collect` gathered."""
        return {}

    @abstractmethod
    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        """Loss terms of this batch, summed by unit."""

    def advantages(self, rewards_SR: Tensor, group_S: Tensor, drift_S: Tensor | None = None) -> Tensor:
        """One advantage for each sequence of a whole generation batch (online methods); a NaN reward does not apply.

        `drift_S`: log-probs of the policy minus the reference's, summed over each completion, where `needs_drift`.
        """
        raise NotImplementedError(f"{self.name}: only online methods have advantages")


def sequence_sum(values_T: Tensor, batch: Batch) -> Tensor:
    """Sum over each sequence's scored tokens."""
    return values_T.new_zeros(batch.num_sequences).index_add(0, batch.sequence_T, values_T)


def sequence_length(batch: Batch) -> Tensor:
    """Scored tokens of each sequence, at least 1 so that it can divide."""
    return sequence_sum(torch.ones_like(batch.sequence_T), batch).clamp(min=1)


def sequence_mean(values_T: Tensor, batch: Batch) -> Tensor:
    """Mean over each sequence's scored tokens."""
    return sequence_sum(values_T, batch) / sequence_length(batch)


def position_in_sequence(batch: Batch) -> Tensor:
    """Number of each scored token among the scored tokens of its sequence, from 0."""
    order_T = torch.argsort(batch.sequence_T, stable=True)
    length_S = sequence_sum(torch.ones_like(batch.sequence_T), batch)
    start_S = length_S.cumsum(0) - length_S
    rank_T = torch.arange(len(order_T), device=order_T.device) - start_S[batch.sequence_T[order_T]]
    return torch.empty_like(rank_T).index_copy(0, order_T, rank_T)


def given(tensor: Tensor | None) -> Tensor:
    """A tensor that the method's needs promise to be there."""
    assert tensor is not None, "the engine left out an output or batch field that this method needs"
    return tensor


def is_chosen(batch: Batch) -> Tensor:
    """True for the sequences that are the chosen one of a pair."""
    chosen_P = given(batch.pair_P2)[:, 0]
    return torch.zeros(batch.num_sequences, dtype=torch.bool, device=chosen_P.device).index_fill(0, chosen_P, True)


def scalar(value: int, batch: Batch) -> Tensor:
    """A count as a tensor on the batch's device."""
    return torch.tensor(float(value), device=batch.sequence_T.device)


def pair_metrics(chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Mean]:
    """The reward metrics that pair methods share."""
    return {
        "rewards/chosen": Mean.of(chosen_P),
        "rewards/rejected": Mean.of(rejected_P),
        "rewards/margins": Mean.of(chosen_P - rejected_P),
        "rewards/accuracies": Mean.of((chosen_P > rejected_P).float()),
    }


def pair_token_metrics(out: Outputs, batch: Batch) -> dict[str, Mean]:
    """Log-prob, logit and accuracy metrics of the two sides of the pairs, as far as the engine computed them."""
    chosen_P, rejected_P = sequence_sum(given(out.logps_T), batch)[given(batch.pair_P2)].unbind(1)
    metrics = {"logps/chosen": Mean.of(chosen_P), "logps/rejected": Mean.of(rejected_P)}
    chosen_T = is_chosen(batch)[batch.sequence_T]
    if out.mean_logit_T is not None:
        metrics["logits/chosen"] = Mean.over(out.mean_logit_T, chosen_T)
        metrics["logits/rejected"] = Mean.over(out.mean_logit_T, ~chosen_T)
    if out.is_top_T is not None:
        metrics["mean_token_accuracy"] = Mean.over(out.is_top_T, chosen_T)
    if out.entropy_T is not None:
        metrics["entropy"] = Mean.of(out.entropy_T)
    return metrics
