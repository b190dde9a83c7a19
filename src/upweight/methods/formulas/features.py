"""Features of texts, and the rewards that pull sampled features to true ones (EBFT, arXiv:2603.12248).

Samples of one group lie together, `size` of them to a group; targets have one row for each group.
"""

from __future__ import annotations

from typing import Literal

from upweight.lazy_imports import F, NDArray, Tensor, np, torch

Pooling = Literal["last_token", "mean_pooling", "completion_mean", "concat"]

# Singular values below this fraction of the largest one are noise, from samples that are equal.
_SMALLEST_SINGULAR = 1e-5


def pooled_positions(pooling: Pooling, begin: int, answer: int, end: int) -> NDArray[np.int64]:
    """Return the pooled tokens of a text from `begin` to `end` whose completion starts at `answer`."""
    if pooling == "last_token":
        return np.array([end - 1])
    if pooling == "concat":
        return np.array([begin + (end - begin) * quarter // 4 for quarter in (1, 2, 3)])
    return np.arange(answer if pooling == "completion_mean" else begin, end)


def pooled(state_TF: Tensor, sequence_T: Tensor, sequences: int, pooling: Pooling) -> Tensor:
    """Return a feature vector of norm 1 for each text, from hidden states at its pooled positions."""
    state_TF = F.normalize(state_TF.float(), dim=1)
    if pooling == "concat":
        return F.normalize(state_TF.reshape(sequences, -1), dim=1)
    total_SF = state_TF.new_zeros(sequences, state_TF.shape[1]).index_add(0, sequence_T, state_TF)
    return F.normalize(total_SF, dim=1)


def whitened(feature_SF: Tensor, target_GF: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Whiten features and targets by the inverse root of the second moment of each group's features."""
    # The moment of n samples has rank n at most: its pseudo-inverse is taken through their n x n inner products.
    rows = feature_SF.double().view(-1, size, feature_SF.shape[1])
    square, basis = torch.linalg.eigh(rows @ rows.mT / size)
    kept = square > _SMALLEST_SINGULAR**2 * square[:, -1:]
    root = torch.where(kept, square, 1.0).rsqrt() * kept
    white = basis * root[:, None] @ basis.mT @ rows
    along = basis.mT @ (rows @ target_GF.double()[:, :, None]) * root[:, :, None] ** 3
    target = (rows.mT @ (basis @ along))[:, :, 0] / size
    return white.reshape(feature_SF.shape).to(feature_SF.dtype), target.to(target_GF.dtype)


def alignment(feature_SF: Tensor, target_GF: Tensor, size: int) -> Tensor:
    """Return the cosine between each sample's features and those of the ground-truth completion."""
    return F.cosine_similarity(feature_SF, target_GF.repeat_interleave(size, 0), dim=1)


def crowding(feature_SF: Tensor, size: int) -> Tensor:
    """Return each sample's mean inner product with the other samples of its group; 0 in a group of one."""
    rows = feature_SF.view(-1, size, feature_SF.shape[1])
    others = rows.sum(1, keepdim=True) - rows
    return (rows * others).sum(2).flatten() / max(size - 1, 1)


def distance(feature_SF: Tensor, target_GF: Tensor, size: int) -> Tensor:
    """Return the feature-matching loss: squared distance between each group's mean features and its target."""
    return (feature_SF.view(-1, size, feature_SF.shape[1]).mean(1) - target_GF).square().sum(1)


def leave_one_out_crowding(term_S: Tensor, group_S: Tensor) -> Tensor:
    """Return a crowding term minus its mean over the pairs without the sample."""
    # The plain leave-one-out mean would not do: the others' crowding holds their products with the sample itself, which
    # takes 1 / (n - 1) of the penalty back (all of it for two samples).
    groups = int(group_S.max()) + 1 if len(group_S) else 0
    total_S = term_S.new_zeros(groups).index_add(0, group_S, term_S)[group_S]
    size_S = torch.bincount(group_S, minlength=groups)[group_S]
    return torch.where(size_S > 2, term_S - (total_S - 2 * term_S) / (size_S - 2).clamp(min=1), term_S)
