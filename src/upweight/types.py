"""The few shapes every package agrees on.

Tensor names end in their axes:

    B  rows of one forward (1 when packed as trees)      N  token positions in a row, padding included
    T  scored tokens (or scored positions) of a batch    S  sequences
    P  pairs                                             G  groups (completions of one prompt)
    R  reward functions                                  V  vocabulary
    D  hidden width                                      F  feature width
    C  classes of a score head                           2  (chosen, rejected)
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sample:
    """One token sequence, which of its tokens are scored, and what the method knows about it.

    Arrays over scored tokens (`old_logps` and the like) have one entry for each True in `scored`, in order.
    """

    ids: NDArray[np.int64]
    scored: NDArray[np.bool_]
    labels: NDArray[np.int64] | None = None  # class at each scored position, for score heads
    label: int | None = None  # becomes Batch.label_S
    prompt: NDArray[np.bool_] | None = None  # over scored tokens: belongs to the prompt
    advantage: float | None = None
    share: float = 1.0  # of the scored tokens of its completion, where that has several segments
    old_logps: NDArray[np.float32] | None = None
    sampler_logps: NDArray[np.float32] | None = None
    ref_logps: NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class Unit:
    """Samples that must share a forward: one sample, or a (chosen, rejected) pair."""

    samples: tuple[Sample, ...]
    group: int = 0  # units of one group begin alike, and are kept together where the budget allows
    margin: float | None = None  # of a pair


@dataclass(frozen=True, eq=False)
class Batch:
    """One forward: tokens laid out for the model, what is scored in them, and what the method knows about it."""

    ids_BN: Tensor
    position_BN: Tensor
    # Trees: position of the token after the last descendant of each token, so that
    # `q sees k <=> k <= q < end_BN[k]`. Padded rows: None, and `length_B` bounds each row.
    end_BN: Tensor | None
    length_B: Tensor | None
    # A scored token, the flat position (row * N + column) whose hidden state predicts it, and its sequence.
    # For score heads: the position whose hidden state is scored, and its class label.
    source_T: Tensor
    target_T: Tensor
    sequence_T: Tensor
    num_sequences: int

    pair_P2: Tensor | None = None  # sequence numbers of (chosen, rejected)
    margin_P: Tensor | None = None  # how much better the chosen one is, for reward models
    # KTO: 1 desirable, 0 undesirable, -1 mismatched (counts for the KL only). EBFT: 1 demonstration, 0 generated.
    label_S: Tensor | None = None
    prompt_T: Tensor | None = None  # True where a scored token belongs to the prompt (ORPO's likelihood term)
    advantage_S: Tensor | None = None
    share_S: Tensor | None = None  # of its completion's scored tokens; None: each sequence is a whole completion
    old_logps_T: Tensor | None = None  # under the policy when the rollout was scored; None: the current policy
    sampler_logps_T: Tensor | None = None  # as the sampler reported them
    ref_logps_T: Tensor | None = None  # precomputed reference log-probs

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch with its tensors on `device`."""
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, eq=False)
class Outputs:
    """What the engine computed for a batch; a field is None unless it was asked for."""

    logps_T: Tensor | None = None
    ref_logps_T: Tensor | None = None
    entropy_T: Tensor | None = None
    log_sum_exp_T: Tensor | None = None
    mean_logit_T: Tensor | None = None  # mean over the vocabulary
    log_collision_T: Tensor | None = None  # log of the sum of squared probabilities
    is_top_T: Tensor | None = None  # whether the scored token is the most likely one
    scores_TC: Tensor | None = None
    features_TF: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Mean:
    """A metric as a sum and a weight, so that micro-batches and ranks add up exactly."""

    total: Tensor
    weight: Tensor

    @staticmethod
    def of(values: Tensor) -> "Mean":
        values = values.detach().float()
        return Mean(values.sum(), torch.full_like(values.sum(), float(values.numel())))

    @staticmethod
    def over(values: Tensor, mask: Tensor) -> "Mean":
        """The mean of the values where `mask` is True."""
        mask = mask.detach().float()
        return Mean((values.detach().float() * mask).sum(), mask.sum())


@dataclass(frozen=True, eq=False)
class Loss:
    """Summed loss terms by the unit that divides them (`pairs`, `tokens`, ...), and metrics."""

    sums: dict[str, Tensor]
    metrics: dict[str, Mean] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """What was written after a prompt: by a sampler, or by a sampler and an environment in turns."""

    ids: list[int]
    logps: list[float]  # of each token under the sampler: temperature applied, nothing truncated; empty: not known
    versions: list[int]  # policy version that sampled each token
    finished: bool  # ended by itself (end token or stop string), not by the length limit
    sampled: list[bool] | None = None  # False where an environment wrote the token; None: the policy wrote all
    text: str | None = None  # what rewards read, where a rollout function says so
    messages: list[Mapping[str, Any]] | None = None  # the conversation after the prompt, where an environment took part
    # Segments before this one: each ended where the chat template rendered the history differently. They are separate
    # sequences, and all of them share the rewards and the advantage of this completion.
    earlier: list["Completion"] = field(default_factory=list)
    failure: str | None = None  # why nothing is to be learned from it: its environment broke
    given: int = 0  # tokens it begins with that belong to its prompt, where the prompts of its group differ

    @property
    def written(self) -> list[int]:
        """Its tokens after the prompt."""
        return self.ids[self.given :]


Prompts = Sequence[Sequence[int]]  # token ids of each
Done = Callable[[int, list[Completion]], None]  # hears the number of a prompt, and its completions


@dataclass
class Group:
    """The completions of one prompt, on their way from the sampler to the trainer."""

    number: int  # of the data row the prompt came from
    row: Mapping[str, Any]  # that row; its columns reach the rewards
    prompt_ids: list[int]
    completions: list[Completion] = field(default_factory=list)
    rewards_SR: Tensor | None = None
    advantage_S: Tensor | None = None
    extras: dict[str, list[Any]] = field(default_factory=dict)  # further columns, one value for each completion
    version: int = 0  # policy that the oldest of its tokens was sampled from
    replayed: bool = False  # was trained on before


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    first: int = 0  # number of the first prompt, where several processes share the prompts of one seed
    seeds: tuple[int, ...] | None = None  # one for each completion, prompt by prompt, instead of `seed` and `first`


class Generator(Protocol):
    """What every sampling backend offers."""

    def generate(
        self, prompts: Prompts, count: int, sampling: Sampling, done: Done | None = None
    ) -> list[list[Completion]]:
        """`count` completions for each prompt, in the order of the prompts; `done` hears of each prompt as it ends."""
        ...

    def require_room(self, prompt: int, new: int) -> None:
        """Raise where a prompt of so many tokens with so many new ones is longer than can be sampled."""
        ...

    def sync(self, version: int) -> None:
        """Sample from the policy's weights as they are now, as `version`, from the next request on."""
        ...

    def version(self) -> int:
        """The policy version that the next request would be sampled from."""
        ...

    def health(self) -> str | None:
        """None when all is well, else what is wrong."""
        ...

    def close(self) -> None:
        """Give back what is held; a later call makes it anew."""
        ...
