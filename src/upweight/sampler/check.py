"""Check sampling on the real model: log-probs of a few sampled tokens against those of a plain forward."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from upweight.errors import UserError
from upweight.models.processor import ImageReader
from upweight.types import Completion, Completions, ImageRef, Prompts, Sampling

_PROMPTS, _COUNT, _NEW_TOKENS, _LONGEST = 2, 2, 24, 2048
# Wider than for the training forward: one token at a time rounds differently, and a wrong cache is off by 0.1 and more.
_LARGEST_IN_FLOAT32 = 1e-3
# As in `engine/check.py`: another kernel in bfloat16 differs by 0.06, a wrong one by 0.3 and more.
_MEAN_IN_HALF_PRECISION = 0.15


@dataclass(frozen=True)
class TrialPrompts:
    """A few prompts to check a sampling strategy on: some of a call, and one as long as its sequences may become."""

    prompts: list[list[int]]  # a model that computes differently from some position on shows it on the long one
    sampling: Sampling
    count: int = _COUNT

    @staticmethod
    def of(prompts: Prompts, sampling: Sampling, max_positions: int | None) -> "TrialPrompts":
        """Choose from the prompts of a call; `max_positions`: of the model."""
        new = _NEW_TOKENS if max_positions is None else max(1, min(_NEW_TOKENS, max_positions - 1))
        most = None if max_positions is None else max(1, max_positions - new)
        longest = max(len(prompt) for prompt in prompts)
        length = max(longest, min(longest + sampling.max_new_tokens - new, _LONGEST))
        long_prompt = list(itertools.islice(itertools.cycle(itertools.chain.from_iterable(prompts)), length))
        chosen = [list(prompt)[:most] for prompt in [*prompts[:_PROMPTS], long_prompt]]
        plain = replace(sampling, max_new_tokens=new, stop_ids=(), stop_strings=(), seed=0, seeds=None, first=0)
        if sampling.images:  # prompts stay whole: each has all tokens of its images
            shown = sorted(range(len(prompts)), key=lambda number: not sampling.images[number])[:_PROMPTS]
            plain = replace(plain, images=tuple(sampling.images[number] for number in shown))
            return TrialPrompts([list(prompts[number]) for number in shown], plain)
        return TrialPrompts(chosen, plain)


@dataclass(frozen=True)
class CheckResult:
    """The difference of a sampling strategy from plain forwards, and its tolerance; `error`: why it does not run."""

    difference: float
    tolerance: float
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is None and self.difference <= self.tolerance  # a NaN does not pass

    def __str__(self) -> str:
        if self.error is not None:
            return f"fails ({self.error})"
        return f"gives log-probs that differ by {self.difference:.3g} (limit {self.tolerance:g}) from a plain forward's"


def compare_sampling(
    base: PreTrainedModel,
    trial: TrialPrompts,
    draw: Callable[[], Completions],
    reader: ImageReader | None = None,
    *,
    rounded: bool = False,
) -> CheckResult:
    """Check a sampling strategy by its worst prompt, so that an error on the long prompt only is not averaged away.

    `rounded`: completions are drawn from weights of less precision than the model's.
    """
    # Whether forwards compute in float32: they may read copies of the weights in another dtype.
    embeddings: Any = base.get_input_embeddings()
    dtype = embeddings(torch.zeros(1, 1, dtype=torch.long, device=base.device)).dtype
    exact = dtype in (torch.float32, torch.float64) and all(p.dtype != torch.int8 for p in base.parameters())
    exact = exact and not rounded
    tolerance = _LARGEST_IN_FLOAT32 if exact else _MEAN_IN_HALF_PRECISION
    try:
        differences = []
        for number, (prompt, group) in enumerate(zip(trial.prompts, draw(), strict=True)):
            images = trial.sampling.images[number] if trial.sampling.images else ()
            plain = _plain_logps(base, prompt, group, trial, images, reader)
            differences.append((torch.tensor([completion.logps for completion in group]) - plain).abs())
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever foreign model code raises
        first = str(error).strip().partition("\n")[0]
        return CheckResult(float("inf"), tolerance, f"{type(error).__name__}: {first}")
    each = torch.stack([x.max() if exact else x.mean() for x in differences])
    return CheckResult(float(each.max()), tolerance)


def _plain_logps(  # noqa: PLR0917
    base: PreTrainedModel,
    prompt: list[int],
    group: list[Completion],
    trial: TrialPrompts,
    images: tuple[ImageRef, ...],
    reader: ImageReader | None,
) -> Tensor:
    """Return log-probs of completions of one length by the model's forward, without a cache or padding."""
    ids_BN = torch.tensor([prompt + completion.ids for completion in group], device=base.device)
    new = len(group[0].ids)
    can_select = "logits_to_keep" in inspect.signature(type(base).forward).parameters
    kept: dict[str, Any] = {"logits_to_keep": new + 1} if can_select else {}
    if images and reader is not None:
        kept |= reader.plain_inputs([images] * len(group), ids_BN)
    logits_BKV = base(input_ids=ids_BN, attention_mask=torch.ones_like(ids_BN), use_cache=False, **kept).logits
    logps_BKV = (logits_BKV[:, -new - 1 : -1].float() / (trial.sampling.temperature or 1.0)).log_softmax(-1)
    return logps_BKV.gather(2, ids_BN[:, -new:, None])[:, :, 0].cpu()
