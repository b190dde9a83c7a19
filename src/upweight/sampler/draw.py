"""Sample tokens from logits, with their log-probs.

A token is drawn by inverting the cumulative distribution at a uniform number from the caller: nothing here holds random
state, so that a CUDA graph can replay it, and a row's tokens depend only on the numbers of that row.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from upweight.types import Sampling

_CHUNK = 128  # the vocabulary is searched in two levels: chunks of this many tokens, then one chunk


def only_draws(sampling: Sampling) -> Sampling:
    """Return the settings that change the draw of a token, the others as if unset."""
    unset = {"stop_ids": (), "stop_strings": (), "seed": None, "seeds": None, "first": 0, "images": ()}
    return replace(sampling, max_new_tokens=0, **unset)


def draw(
    logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling, seen_BV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return tokens and their log-probs at the temperature, from logits and float64 numbers in [0, 1).

    `seen_BV` marks the tokens that a repetition penalty applies to. Log-probs are those of the training forward:
    of the whole distribution, before any penalty or truncation. Temperature 0 takes the most likely token, and
    returns log-probs at temperature 1.
    """
    logits_BV = logits_BV.float()
    tempered_BV = _apply_temperature(logits_BV, sampling.temperature)
    weight_BCK, top_B = _exp_weights(tempered_BV)
    sum_BC = weight_BCK.sum(-1).double()
    log_sum_exp_B = sum_BC.sum(-1).log() + top_B
    chosen_BV = tempered_BV
    if seen_BV is not None:
        chosen_BV = _apply_temperature(penalised(logits_BV, seen_BV, sampling.repetition_penalty), sampling.temperature)
    if sampling.suppress_ids:
        chosen_BV = chosen_BV.clone()
        for token in sampling.suppress_ids:  # no index on the device, which would be copied there
            chosen_BV[:, token].fill_(-torch.inf)
    if sampling.temperature == 0:
        token_B = chosen_BV.argmax(-1)
    else:
        if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
            chosen_BV = truncated(chosen_BV, sampling)
        if chosen_BV is not tempered_BV:
            weight_BCK, _ = _exp_weights(chosen_BV)
            sum_BC = weight_BCK.sum(-1).double()
        token_B = inverted(weight_BCK, sum_BC, uniform_B)
    return token_B, (tempered_BV.gather(1, token_B[:, None])[:, 0] - log_sum_exp_B).float()


def inverted(weight_BCK: Tensor, sum_BC: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the token of each row at its number in [0, 1), from weights in chunks and the chunks' sums."""
    below_BC = sum_BC.cumsum(-1)
    target_B1 = below_BC[:, -1:] * uniform_B[:, None]
    chunk_B1 = (below_BC <= target_B1).sum(-1, keepdim=True).clamp_(max=sum_BC.shape[1] - 1)
    share_B1 = 1 - (below_BC.gather(1, chunk_B1) - target_B1) / sum_BC.gather(1, chunk_B1)
    inside_BK = weight_BCK.gather(1, chunk_B1[:, :, None].expand(-1, 1, _CHUNK))[:, 0].double().cumsum(-1)
    # just below one, so that rounding never leads to a token of weight zero behind the last
    target_B1 = share_B1.clamp(0, 1 - 1e-12) * inside_BK[:, -1:]
    return (chunk_B1 * _CHUNK + (inside_BK <= target_B1).sum(-1, keepdim=True))[:, 0]


def penalised(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Apply the repetition penalty of transformers to the logits of seen tokens."""
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def truncated(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Set the logits that top-k, then top-p, then min-p exclude to minus infinity; ties at the threshold stay."""
    width = logits_BV.shape[1]
    if sampling.top_k or sampling.top_p < 1:
        kept = min(sampling.top_k or width, width)
        best_BK = logits_BV.topk(kept).values if kept < width else logits_BV.sort(-1, descending=True).values
        last_B1 = best_BK[:, -1:]
        if sampling.top_p < 1:
            p_BK = best_BK.softmax(-1)
            before_BK = p_BK.cumsum(-1) - p_BK
            last_B1 = best_BK.gather(1, (before_BK < sampling.top_p).sum(-1, keepdim=True).clamp_(min=1) - 1)
        logits_BV = logits_BV.masked_fill(logits_BV < last_B1, -torch.inf)
    if sampling.min_p > 0:
        floor_B1 = logits_BV.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -torch.inf)
    return logits_BV


def _apply_temperature(logits_BV: Tensor, temperature: float) -> Tensor:
    return logits_BV if temperature in (0, 1) else logits_BV / temperature


def _exp_weights(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(logit - largest) as [B, chunks, _CHUNK], padded with zeros, and the largest logit of each row."""
    top_B1 = logits_BV.amax(-1, keepdim=True)
    weight_BV = (logits_BV - top_B1).exp_()
    missing = -weight_BV.shape[1] % _CHUNK
    if missing:
        weight_BV = F.pad(weight_BV, (0, missing))
    return weight_BV.view(len(weight_BV), -1, _CHUNK), top_B1[:, 0]
