"""The interface of training methods: settings, requirements, and pure functions from log-probs to sums."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self

from pydantic import model_validator

from upweight.lazy_imports import Tensor, torch
from upweight.methods.users.function import Call, UserFunction
from upweight.settings import Section, setting
from upweight.types import Batch, Divergence, Loss, Mean, Outputs, Sample


@dataclass(frozen=True)
class ReferenceSync:
    """How a reference follows the policy: the policy's weight in each sync, and the steps between two syncs."""

    alpha: float
    steps: int


class OnlineSettings(Protocol):
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
    def zero_advantage_reasons(self) -> list[str]:
        """Why completions without an advantage are trained on too; empty where they need not be."""
        ...


KINDS = ("text", "pairs", "labelled", "steps", "prompts")  # of rows


class Method(Section, ABC):
    """A training method. It never divides by a count, communicates with other ranks or reads a value off the device."""

    name: ClassVar[str]
    head: ClassVar[Literal["tokens", "sequence_score", "step_score"]] = "tokens"
    data: ClassVar[Literal["text", "pairs", "labelled", "steps", "prompts"]]
    online: ClassVar[bool] = False
    keeps_dropout: ClassVar[bool] = False  # where outputs are not compared with those of a model without dropout
    takes_noise: ClassVar[bool] = False  # on embeddings; elsewhere it would make policy and reference differ
    computed_rewards: ClassVar[tuple[str, ...]] = ()  # names of rewards that the method computes itself
    learning_rate: ClassVar[float] = 1e-6
    lora_learning_rate: ClassVar[float | None] = 5e-6  # None: the same as without LoRA
    read_row: ClassVar[Callable[..., Any] | None] = None  # turns a row of a dataset without `type` into one of `data`
    why_zero: ClassVar[str | None] = None  # what it means that the first step's loss and gradient are exactly 0
    evaluates_loss: ClassVar[bool] = False  # whether online evaluations report the loss of their completions
    balances_routers: ClassVar[bool] = True  # by default, with the coefficient of a mixture's config
    reads: ClassVar[frozenset[str]] = frozenset()  # `statistics`, where they are the same for all settings

    @property
    def label(self) -> str:
        """What lines for people call it."""
        return self.name

    @property
    def needs_reference(self) -> bool:
        """Whether `loss` reads the reference's log-probs."""
        return False

    @property
    def needs_teacher(self) -> bool:
        """Whether scored tokens are compared with those of another model."""
        return False

    @property
    def teacher_advantage(self) -> float:
        """Weight of a teacher's log-prob over the sampler's in the advantage of each sampled token."""
        return 0.0

    @property
    def comparison(self) -> Divergence:
        """How scored tokens are compared with a teacher's, where `statistics` ask for it."""
        return Divergence()

    @property
    def teacher_top_k(self) -> int | None:
        """The tokens that a teacher lists for the comparison; None: it compares the whole vocabulary."""
        return None

    @property
    def reads_untaught(self) -> bool:
        """Whether the loss also reads tokens that are not compared, where a teacher has another tokenizer."""
        return False

    @property
    def needs_rewards(self) -> bool:
        """Whether an online method learns nothing from completions without rewards."""
        return True

    @property
    def demonstration_share(self) -> float:
        """Share of prompts that keep the data's completion where others are sampled."""
        return 0.0

    @property
    def teacher_sees(self) -> str | None:
        """What a teacher sees in place of a prompt: a text with columns of the row, or a function; None: the same."""
        return None

    @property
    def self_teacher(self) -> Literal["initial", "live", "ema"]:
        """Which weights of the policy teach, where it is its own teacher."""
        return "initial"

    @property
    def teacher_writes(self) -> bool:
        """Whether the teacher samples the completions that are not the policy's, in place of the data."""
        return False

    @property
    def needs_kl_in_reward(self) -> bool:
        """Whether `advantages` read the log-ratio of policy and reference on each completion."""
        return False

    @property
    def precomputes_reference(self) -> bool:
        """Whether the reference's log-probs are computed once, before training."""
        return False

    @property
    def reads_versions(self) -> bool:
        """Whether `loss` reads `version_T` and `lag_T`."""
        return False

    @property
    def loss_function(self) -> Call | None:
        """The user's function that takes the place of a policy gradient's terms; None where there is none."""
        return None

    @property
    def advantage_function(self) -> Call | None:
        """The user's function that takes the place of `advantages`; None where there is none."""
        return None

    @property
    def user_code(self) -> list[str]:
        """The users' code that the loss comes from: this class, if it is theirs, and functions among its settings."""
        settings = [one if isinstance(one, tuple | list) else [one] for _, one in self]
        functions = [one.name for values in settings for one in values if isinstance(one, UserFunction)]
        return [self.name, *functions] if "." in self.name else functions

    @property
    def reference_sync(self) -> ReferenceSync | None:
        """How the reference follows the policy; None where it does not change."""
        return None

    @property
    def online_settings(self) -> OnlineSettings | None:
        """Settings of the policy gradient; None for offline methods."""
        return None

    @property
    def mismatched(self) -> Literal["rotate", "all"] | None:
        """Which mismatched completions each prompt is paired with for a KL estimate: the previous row's, or all."""
        return None

    @property
    def default_batch(self) -> int:
        """Rows of a step where a config has no key about batches; online methods take one group."""
        return 1

    @property
    def strided(self) -> bool:
        """Whether short blocks at strides along a document are sampled instead of completions."""
        return False

    @classmethod
    def formats(cls) -> str:
        """Return the kind of dataset formats that read its rows."""
        return cls.data

    @property
    def scores_prompt(self) -> bool:
        """Whether the likelihood of a chosen completion covers its prompt too."""
        return False

    @property
    def label_weights(self) -> dict[bool, float] | None:
        """Weights of desirable and undesirable completions, for a method that compares the two."""
        return None

    @property
    def scales_each_reward(self) -> bool:
        """Whether each reward is normalised separately before the rewards are summed."""
        return False

    @property
    def discount(self) -> float | None:
        """The factor of a reward for each token before it, where tokens are credited with what follows; else None."""
        return None

    @property
    def group_size(self) -> int:
        """Completions sampled for each prompt, for online methods."""
        return 1

    @property
    def statistics(self) -> frozenset[str]:
        """Outputs fields beyond `logps_T` that `loss` reads."""
        return self.reads

    @property
    def needs_preparation(self) -> bool:
        """Whether `loss` reads the output of `prepare` for the whole step."""
        return False

    @abstractmethod
    def count(self, batch: Batch) -> dict[str, Tensor]:
        """Return what this batch adds to each denominator of the step, by name; known before any forward."""
        # A denominator named `rollout_...` spans the optimizer steps of a rollout, any other one optimizer step.

    def contributes(self, sample: Sample) -> bool:
        """Return whether a sample can change the gradient; samples that cannot need no forward."""
        return True

    def counts_for_routers(self, sample: Sample) -> bool:
        """Return whether the tokens of a sample count in the load-balancing loss of a mixture of experts."""
        return True

    def collect(self, out: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return values that `prepare` reads for the whole step; they are concatenated over batches and ranks."""
        return {}

    def prepare(self, collected: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what `loss` reads about the whole step, from the values of `collect`."""
        return {}

    @abstractmethod
    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        """Return the loss terms of this batch, summed by the name of their denominator."""

    def advantages(self, rewards_SR: Tensor, group_S: Tensor, log_ratio_S: Tensor | None = None) -> Tensor:
        """Return one advantage for each sequence of a rollout (online methods); a NaN reward does not apply.

        `log_ratio_S`: the policy's log-probs minus the reference's, summed by completion, where `needs_kl_in_reward`.
        With a `discount` it is also called with the rewards from each token position on, `rewards_SRT`, and returns
        `advantage_ST`.
        """
        raise NotImplementedError(f"{self.name}: only online methods have advantages")


class WithReference(Section):
    """The settings of a preference method that compares the policy with a reference on every completion."""

    precompute_ref_log_probs: bool = setting(
        "precompute_ref_log_probs", False, "Compute the log-probs of the reference once, before training."
    )
    sync_ref_model: bool = setting(
        "sync_ref_model", False, "Move the reference towards the policy while training.", also=("trl.sync_ref_model",)
    )
    ref_model_mixup_alpha: float = setting(
        "ref_model_mixup_alpha",
        0.6,
        "Share of the policy's weights in the new reference at each update.",
        also=("trl.ref_model_mixup_alpha",),
        ge=0,
        le=1,
    )
    ref_model_sync_steps: int = setting(
        "ref_model_sync_steps",
        512,
        "Steps between two updates of the reference.",
        also=("trl.ref_model_sync_steps",),
        ge=1,
    )

    @model_validator(mode="after")
    def _a_reference_that_moves_is_computed(self) -> Self:
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ValueError("sync_ref_model changes the reference, so precompute_ref_log_probs must be off")
        return self

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def precomputes_reference(self) -> bool:
        return self.precompute_ref_log_probs

    @property
    def reference_sync(self) -> ReferenceSync | None:
        return ReferenceSync(self.ref_model_mixup_alpha, self.ref_model_sync_steps) if self.sync_ref_model else None


def sequence_sum(values_T: Tensor, batch: Batch) -> Tensor:
    """Return the sum over each sequence's scored tokens."""
    return values_T.new_zeros(batch.num_sequences).index_add(0, batch.sequence_T, values_T)


def sequence_length(batch: Batch) -> Tensor:
    """Return the number of scored tokens of each sequence, at least 1 so that it can divide."""
    return sequence_sum(torch.ones_like(batch.sequence_T), batch).clamp(min=1)


def sequence_mean(values_T: Tensor, batch: Batch) -> Tensor:
    """Return the mean over each sequence's scored tokens."""
    return sequence_sum(values_T, batch) / sequence_length(batch)


def position_in_sequence(batch: Batch) -> Tensor:
    """Return the index of each scored token among the scored tokens of its sequence, from 0."""
    order_T = torch.argsort(batch.sequence_T, stable=True)
    length_S = sequence_sum(torch.ones_like(batch.sequence_T), batch)
    start_S = length_S.cumsum(0) - length_S
    rank_T = torch.arange(len(order_T), device=order_T.device) - start_S[batch.sequence_T[order_T]]
    return torch.empty_like(rank_T).index_copy(0, order_T, rank_T)


def required(tensor: Tensor | None) -> Tensor:
    """Return a tensor that must be present by the method's requirements."""
    assert tensor is not None, "an output or batch field that this method needs is missing"
    return tensor


def is_chosen(batch: Batch) -> Tensor:
    """Return True for the tokens of the chosen side of a pair."""
    chosen_P = required(batch.pair_P2)[:, 0]
    chosen_S = torch.zeros(batch.num_sequences, dtype=torch.bool, device=chosen_P.device).index_fill(0, chosen_P, True)
    return chosen_S[batch.sequence_T]


def scalar(value: int, batch: Batch) -> Tensor:
    """Return a count as a tensor on the batch's device."""
    return torch.tensor(float(value), device=batch.sequence_T.device)


def pair_counts(batch: Batch, *, likelihood: bool = False) -> dict[str, Tensor]:
    """Return the number of pairs, and of chosen tokens where their `likelihood` is part of the loss."""
    counts = {"pairs": scalar(len(required(batch.pair_P2)), batch)}
    return counts | {"tokens": is_chosen(batch).sum().float()} if likelihood else counts


def reward_metrics(chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Mean]:
    """Return the metrics of the rewards of pairs."""
    return {
        "rewards/chosen": Mean.of(chosen_P),
        "rewards/rejected": Mean.of(rejected_P),
        "rewards/margins": Mean.of(chosen_P - rejected_P),
        "rewards/accuracies": Mean.of((chosen_P > rejected_P).float()),
    }


def pair_metrics(chosen_P: Tensor, rejected_P: Tensor, out: Outputs, batch: Batch) -> dict[str, Mean]:
    """Return the metrics of pairs from the rewards of both sides and, as far as the engine computed them, outputs."""
    logps_P2 = sequence_sum(required(out.logps_T), batch)[required(batch.pair_P2)]
    metrics = reward_metrics(chosen_P, rejected_P)
    metrics |= {"logps/chosen": Mean.of(logps_P2[:, 0]), "logps/rejected": Mean.of(logps_P2[:, 1])}
    chosen_T = is_chosen(batch)
    if out.mean_logit_T is not None:
        metrics["logits/chosen"] = Mean.over(out.mean_logit_T, chosen_T)
        metrics["logits/rejected"] = Mean.over(out.mean_logit_T, ~chosen_T)
    if out.is_top_T is not None:
        metrics["mean_token_accuracy"] = Mean.over(out.is_top_T, chosen_T)
    if out.entropy_T is not None:
        metrics["entropy"] = Mean.of(out.entropy_T)
    return metrics
