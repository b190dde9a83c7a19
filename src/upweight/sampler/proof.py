"""Proof on the real model: what a way of sampling says of the tokens it draws, against a plain forward of them."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from upweight.errors import UserError
from upweight.types import Completion, Prompts, Sampling

_PROMPTS, _COUNT, _TOKENS = 2, 2, 24
_STRETCHED = 2048
# Wider than for the training forward: one token at a time rounds otherwise, and a wrong cache is off by 0.1 and more.
_LARGEST_IN_FLOAT32 = 1e-3
# As in `engine/check.py`: another kernel in bfloat16 makes 0.06, a wrong one 0.3 and more.
_MEAN_IN_HALF_PRECISION = 0.15


@dataclass(frozen=True)
class Trial:
    """A few prompts that a way of sampling is tried on: some of a call, and one as long as a sequence of it may be.

    Where a model does something else from some position on, only the long one shows it.
    """

    prompts: list[list[int]]
    sampling: Sampling
    count: int = _COUNT

    @staticmethod
    def of(prompts: Prompts, sampling: Sampling, limit: int | None) -> "Trial":
        """`limit`: the positions of the model."""
        new = _TOKENS if limit is None else max(1, min(_TOKENS, limit - 1))
        most = None if limit is None else max(1, limit - new)
        longest = max(len(prompt) for prompt in prompts)
        length = max(longest, min(longest + sampling.max_new_tokens - new, _STRETCHED))
        stretched = list(itertools.islice(itertools.cycle(itertools.chain.from_iterable(prompts)), length))
        chosen = [list(prompt)[:most] for prompt in [*prompts[:_PROMPTS], stretched]]
        plain = replace(sampling, max_new_tokens=new, stop_ids=(), stop_strings=(), seed=0, seeds=None, first=0)
        return Trial(chosen, plain)


@dataclass(frozen=True)
class Verdict:
    """How far a way of sampling lies from plain forwards, and how far it may; `error`: why it does not run at all."""

    difference: float
    limit: float
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is None and self.difference <= self.limit  # a NaN does not pass

    def __str__(self) -> str:
        if self.error is not None:
            return f"fails ({self.error})"
        return f"gives log-probs that differ by {self.difference:.3g} (limit {self.limit:g}) from a plain forward's"


def verdict(base: PreTrainedModel, trial: Trial, draw: Callable[[Trial], list[list[Completion]]]) -> Verdict:
    """Try a way of sampling. The worst prompt counts, so that what only the long one shows is not averaged away."""
    exact = _is_exact(base)
    limit = _LARGEST_IN_FLOAT32 if exact else _MEAN_IN_HALF_PRECISION
    try:
        drawn = draw(trial)
        differences = [
            (torch.tensor([one.logps for one in group]) - _plain_logps(base, prompt, group, trial)).abs()
            for prompt, group in zip(trial.prompts, drawn, strict=True)
        ]
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever foreign model code raises
        first = str(error).strip().partition("\n")[0]
        return Verdict(float("inf"), limit, f"{type(error).__name__}: {first}")
    each = torch.stack([x.max() if exact else x.mean() for x in differences])
    return Verdict(float(each.max()), limit)


def worst(verdicts: list[Verdict]) -> Verdict:
    """Of all ranks, so that they decide alike."""
    return next((one for one in verdicts if not one.passed), verdicts[0])


def _plain_logps(base: PreTrainedModel, prompt: list[int], group: list[Completion], trial: Trial) -> Tensor:
    """Log-probs of completions of one length by the model's own forward, without a cache or padding."""
    ids_BN = torch.tensor([prompt + one.ids for one in group], device=base.device)
    new = len(group[0].ids)
    fewer = "logits_to_keep" in inspect.signature(type(base).forward).parameters
    kept: dict[str, Any] = {"logits_to_keep": new + 1} if fewer else {}
    logits_BKV = base(input_ids=ids_BN, attention_mask=torch.ones_like(ids_BN), use_cache=False, **kept).logits
    logps_BKV = (logits_BKV[:, -new - 1 : -1].float() / (trial.sampling.temperature or 1.0)).log_softmax(-1)
    return logps_BKV.gather(2, ids_BN[:, -new:, None])[:, :, 0].cpu()


def _is_exact(base: PreTrainedModel) -> bool:
    """Whether nothing is rounded but to float32: weights may have copies in another dtype that forwards read."""
    embeddings: Any = base.get_input_embeddings()
    dtype = embeddings(torch.zeros(1, 1, dtype=torch.long, device=base.device)).dtype
    return dtype in (torch.float32, torch.float64) and all(p.dtype != torch.int8 for p in base.parameters())
