"""Data types that all packages share.

Tensor names end in their axes:

    B  rows of one forward (1 when packed as trees)      N  token positions in a row, padding included
    T  scored tokens: those in loss masks                S  sequences
    P  pairs                                             G  groups (completions of one prompt)
    R  reward functions                                  V  vocabulary
    D  hidden width                                      F  feature width
    C  classes of a score head                           2  (chosen, rejected)
    K  tokens that a teacher lists                       E  hidden width of a teacher
    L  layers with a router                              X  experts of a layer
    A  experts that a router chooses for a token
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from upweight.lazy_imports import NDArray, Tensor, np, torch

IGNORED = -100  # label of a token without a class


@dataclass(frozen=True)
class ImageRef:
    """An image of a sequence: where it is read from, and the placeholder tokens that its features take the place of."""

    digest: str  # of the file's bytes and of how it is processed: equal ones have equal features
    path: str
    tokens: int  # number of placeholder tokens
    token_id: int  # the placeholder
    grid: tuple[int, int, int] | None = None  # patches in time, height and width, where positions follow them


@dataclass(frozen=True, eq=False)
class TeacherText:
    """The text of a sample in the tokens of a teacher, and which of them begin where a taught token begins."""

    ids: NDArray[np.int64]
    at: NDArray[np.int64]  # one for each taught token, in order
    unread: int = 0  # scored tokens in text that the teacher does not read as it is


@dataclass(frozen=True, eq=False)
class Sample:
    """One token sequence, the mask of its scored tokens, and the values that the method needs."""

    ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]  # True at tokens whose log-probs, or at positions whose scores, are computed
    labels: NDArray[np.int64] | None = None  # class at each scored position, for score heads
    label: int | None = None  # becomes Batch.label_S
    prompt: NDArray[np.bool_] | None = None  # over scored tokens: True if the token belongs to the prompt
    advantage: float | None = None
    share: float = 1.0  # share of its completion's scored tokens, where a completion is several sequences
    # One entry for each True in `loss_mask`, in order.
    old_logps: NDArray[np.float32] | None = None
    sampler_logps: NDArray[np.float32] | None = None  # where the loss weighs tokens by them
    drawn_logps: NDArray[np.float32] | None = None  # the same, wherever the sampler reports them: their gap is logged
    ref_logps: NDArray[np.float32] | None = None
    versions: NDArray[np.float32] | None = None  # policy version that sampled each token
    lag: NDArray[np.float32] | None = None  # optimizer steps since then
    teacher_ids: NDArray[np.int64] | None = None  # [., K]: the tokens that a teacher listed, -1 where there are fewer
    teacher_logps: NDArray[np.float32] | None = None  # [., K]: their log-probs at temperature 1
    token_advantages: NDArray[np.float32] | None = None  # None: each token has the sequence's
    taught: NDArray[np.bool_] | None = None  # whether it is compared with a teacher's; None: all are
    teacher_text: TeacherText | None = None  # the same text in the tokens of a teacher with another vocabulary
    images: tuple[ImageRef, ...] = ()  # in the order of their placeholder tokens
    routes: NDArray[np.int16] | None = None  # [tokens, L, A]: the experts that the sampler chose, -1: not known

    @property
    def has_advantage(self) -> bool:
        """Whether any of its tokens has an advantage other than zero."""
        return bool(self.advantage) if self.token_advantages is None else bool(self.token_advantages.any())


@dataclass(frozen=True, eq=False)
class Unit:
    """Samples that must share a forward: one, a (chosen, rejected) pair, or the segments of a completion."""

    samples: tuple[Sample, ...]
    group: int = 0  # units of a group share a prefix; they are packed together where the token budget allows
    margin: float | None = None  # becomes Batch.margin_P
    teacher: str | None = None  # the name of its teacher, where there are several
    # The length of the prompt of its samples, and the tokens that the teacher sees in place of it.
    teacher_prompt: tuple[int, NDArray[np.int64]] | None = None


@dataclass(frozen=True, eq=False)
class BatchImages:
    """The images of a batch: each distinct one, and where its features lie.

    Without any, the vision tower reads a blank image, and nothing its features: other ranks have images.
    """

    refs: tuple[ImageRef, ...]  # the features of all, one after the other, are rows of one tensor
    at_I: Tensor  # flat positions of placeholder tokens, in order
    feature_I: Tensor  # the row of the features at each
    position_3BN: Tensor | None = None  # positions in time, height and width; None: those of the batch

    def to(self, device: torch.device | str) -> BatchImages:
        """Return the images with their tensors on `device`."""
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        return dataclasses.replace(self, **{name: x.to(device, non_blocking=True) for name, x in tensors.items()})


@dataclass(frozen=True, eq=False)
class Batch:
    """One forward: the tokens in the model's layout, the scored positions, and the values that the method needs."""

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
    margin_P: Tensor | None = None  # by how much the chosen completion should score higher, for reward models
    # KTO: 1 desirable, 0 undesirable, -1 mismatched (for the KL only). EBFT: 1 demonstration, 0 sampled, -1 failed.
    label_S: Tensor | None = None
    prompt_T: Tensor | None = None  # True where a scored token belongs to the prompt (ORPO's likelihood term)
    advantage_S: Tensor | None = None
    advantage_T: Tensor | None = None  # where tokens of a sequence differ in their advantages; None: advantage_S
    share_S: Tensor | None = None  # Sample.share; None: each sequence is a whole completion
    old_logps_T: Tensor | None = None  # under the policy when the rollout was scored; None: the current policy
    sampler_logps_T: Tensor | None = None  # as the sampler reported them
    drawn_logps_T: Tensor | None = None  # the same, also where the loss does not use them
    ref_logps_T: Tensor | None = None  # precomputed reference log-probs
    version_T: Tensor | None = None  # Sample.versions
    lag_T: Tensor | None = None  # Sample.lag
    longest: int | None = None  # most scored tokens of a sequence, known without asking the device
    teacher_ids_TK: Tensor | None = None  # the tokens that a teacher lists, -1 where there are fewer
    teacher_logps_TK: Tensor | None = None  # their log-probs; minus infinity where there are fewer
    taught_T: Tensor | None = None  # whether a token is compared with a teacher's; None: all are
    teacher_tail_T: Tensor | None = None  # log of the mass of all other tokens; None: what the listed ones leave
    # For how many sequences a token counts where routers are balanced, 0 for padding; None: they are not.
    weight_BN: Tensor | None = None
    images: BatchImages | None = None
    routes_NLA: Tensor | None = None  # the experts that the sampler chose for all tokens, -1 where routers choose

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on `device`."""
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        moved: dict[str, Any] = {name: x.to(device, non_blocking=True) for name, x in tensors.items()}
        if self.images is not None:
            moved["images"] = self.images.to(device)
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, eq=False)
class Outputs:
    """The engine's results for a batch; a field is None unless the method requested it."""

    logps_T: Tensor | None = None
    ref_logps_T: Tensor | None = None
    entropy_T: Tensor | None = None
    log_sum_exp_T: Tensor | None = None
    mean_logit_T: Tensor | None = None  # mean over the vocabulary
    log_collision_T: Tensor | None = None  # log of the sum of squared probabilities
    is_top_T: Tensor | None = None  # whether the scored token is the most likely one
    scores_TC: Tensor | None = None
    features_TF: Tensor | None = None
    # Comparisons with a teacher, over the whole vocabulary or the tokens that it lists.
    divergence_T: Tensor | None = None
    forward_kl_T: Tensor | None = None
    reverse_kl_T: Tensor | None = None
    teacher_entropy_T: Tensor | None = None
    teacher_logps_T: Tensor | None = None  # of the scored tokens
    agrees_T: Tensor | None = None  # whether both find the same token most likely
    other_mass_T: Tensor | None = None  # probability of tokens that a teacher's other vocabulary does not have
    teacher_other_mass_T: Tensor | None = None  # the teacher's of tokens that the policy's does not have
    listed_logps_TK: Tensor | None = None  # the policy's log-probs of `Batch.teacher_ids_TK`
    listed_tail_T: Tensor | None = None  # log of the mass that the policy gives all other tokens
    # Sums over the tokens of a row, by `Batch.weight_BN`, for each router.
    router_load_LX: Tensor | None = None  # how often an expert is chosen
    router_prob_LX: Tensor | None = None  # its probabilities
    router_entropy_L: Tensor | None = None  # of the routers' distributions
    # Over tokens with `routes_NLA`: choices that routers would change, tokens with other experts, choices, tokens.
    router_changes_4: Tensor | None = None


@dataclass(frozen=True)
class Divergence:
    """Which divergence from a teacher is computed, and the temperature of both models."""

    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "reverse_kl"
    beta: float = 0.5  # the teacher's share of the mixture in jsd
    temperature: float = 1.0
    summed: bool = False  # whether losses are a multiple of its sum over tokens: its gradient is known in the forward


@dataclass(frozen=True, eq=False)
class Mean:
    """A metric as a sum and a weight, so that the mean over micro-batches and ranks is exact."""

    total: Tensor
    weight: Tensor

    @staticmethod
    def of(values: Tensor) -> Mean:
        values = values.detach().float()
        total = values.sum()
        return Mean(total, torch.full_like(total, float(values.numel())))

    @staticmethod
    def over(values: Tensor, mask: Tensor) -> Mean:
        """Return the mean of the values where `mask` is True."""
        mask = mask.detach().float()
        return Mean((values.detach().float() * mask).sum(), mask.sum())


@dataclass(frozen=True, eq=False)
class Extreme:
    """A metric as the largest value over micro-batches and ranks, or the smallest with `sign` -1."""

    value: Tensor  # the largest of sign * values; minus infinity where there are none
    sign: int = 1

    @staticmethod
    def over(values: Tensor, mask: Tensor | None = None, sign: int = 1) -> Extreme:
        """Return the extreme of the values where `mask` is True, or of all."""
        values = sign * values.detach().float()
        values = values if mask is None else values.masked_fill(~mask, -torch.inf)
        return Extreme(torch.cat([values, values.new_full((1,), -torch.inf)]).max(), sign)


Metric = Mean | Extreme
Metrics = Mapping[str, Metric]


@dataclass(frozen=True, eq=False)
class Loss:
    """Summed loss terms by the count that normalises them (`pairs`, `tokens`, ...), and metrics."""

    sums: dict[str, Tensor]
    metrics: Metrics = field(default_factory=dict)


Credit = list[
    tuple[int, float]
]  # (end, value): a reward for the completion's tokens up to `end`, which follows the last


@dataclass(frozen=True)
class Completion:
    """The tokens after a prompt: sampled, or alternately sampled and written by an environment."""

    ids: list[int]
    logps: list[float]  # sampler log-prob of each token, with temperature and without top-k or top-p; empty: unknown
    versions: list[int]  # policy version that sampled each token
    finished: bool  # ended by an end token or stop string, not by the length limit
    sampled: list[bool] | None = None  # False where an environment wrote the token; None: the policy wrote all
    text: str | None = None  # the text that rewards read, if a rollout function sets it
    messages: list[Mapping[str, Any]] | None = None  # the conversation after the prompt, where an environment took part
    # Earlier segments: the chat template rewrote the history after each, so each is trained as a separate sequence.
    earlier: list[Completion] = field(default_factory=list)
    failure: str | None = None  # the environment's error; the completion is not trained on
    demonstration: bool = False  # the data's, in place of one that the policy would have sampled
    prompt_len: int = 0  # number of leading ids that belong to the prompt, where prompts within the group differ
    advantages: list[float] = field(default_factory=list)  # of each token, where they differ; empty: the group's
    images: tuple[ImageRef, ...] | None = None  # of prompt and completion, in order; None: the row's
    # [tokens, L, A]: the experts that the sampler chose, from the first token of the prompt on; -1: not known.
    routes: NDArray[np.int16] | None = field(default=None, compare=False)

    @property
    def completion_ids(self) -> list[int]:
        """Return the tokens after the prompt."""
        return self.ids[self.prompt_len :]

    @property
    def segments(self) -> list[Completion]:
        """Return the sequences that are trained on: this one, and those before it."""
        return [self, *(segment for one in self.earlier for segment in one.segments)]


Prompts = Sequence[Sequence[int]]  # token ids of each
Completions = list[list[Completion]]  # of each prompt, in order
Done = Callable[[int, list[Completion]], None]  # called with the index of a prompt and its completions
GroupDone = Callable[[int], None]  # called with the index of a group that has all its completions


@dataclass
class Group:
    """A prompt with its completions, rewards and advantages."""

    number: int  # index of the data row of the prompt
    row: Mapping[str, Any]  # that data row; rewards receive its columns
    prompt_ids: list[int]
    completions: list[Completion] = field(default_factory=list)
    rewards_SR: Tensor | None = None
    advantage_S: Tensor | None = None
    extras: dict[str, list[Any]] = field(default_factory=dict)  # further columns, one value for each completion
    environments: list[Any] = field(default_factory=list)  # the users' objects of its episodes, until it is scored
    version: int = 0  # policy version that sampled its oldest token
    replayed: bool = False  # came from the replay buffer
    credits: dict[tuple[int, int], Credit] = field(default_factory=dict)  # by completion and reward; else at its end


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of completions."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    first: int = 0  # index of the first prompt, where several processes divide the prompts of one seed
    seeds: tuple[int, ...] | None = None  # one seed for each completion, ordered by prompt; replaces `seed` and `first`
    images: tuple[tuple[ImageRef, ...], ...] = ()  # of each prompt; empty: no prompt has any
    suppress_ids: tuple[int, ...] = ()  # tokens that are never drawn: those that stand for images


class Generator(Protocol):
    """The interface of every sampling backend: those here, and a user's that `trl.rollout_backend` names.

    A user's class with `rank0_only = True` is built on rank 0 alone, which then samples for all ranks.
    """

    def generate(self, prompts: Prompts, count: int, sampling: Sampling, done: Done | None = None) -> Completions:
        """Return `count` completions for each prompt, in order; `done` is called for each finished prompt."""
        ...

    def require_room(self, prompt: int, new: int) -> None:
        """Raise if `prompt` tokens and `new` tokens together exceed the longest sequence that can be sampled."""

    def sync(self, version: int) -> None:
        """Load the policy's current weights as `version`; the next request samples from them."""

    def version(self) -> int:
        """Return the policy version that the next request samples from."""
        ...

    def close(self) -> None:
        """Release all resources; a later call acquires them again."""


@runtime_checkable
class Compiles(Protocol):
    """A sampling backend that compiles or records what it runs, and counts the seconds of it."""

    @property
    def compile_seconds(self) -> float:
        """The seconds that this has taken so far."""
        ...


@runtime_checkable
class ChecksSampling(Protocol):
    """A sampling backend that is checked on the model before it first samples, on all ranks together."""

    def check_sampling(self, prompts: Prompts, sampling: Sampling, gather: Callable[[Any], list[Any]]) -> None:
        """Raise where its log-probs are not the model's; `gather` returns the values of all ranks on every rank."""
