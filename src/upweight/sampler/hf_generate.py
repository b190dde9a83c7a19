"""Sampling by transformers' generate, for architectures whose prompt states cannot be shared."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from upweight.engine import Engine
from upweight.engine.packing import build_batch
from upweight.models.modules import unwrap_peft
from upweight.models.processor import ImageReader
from upweight.sampler.collect import CompletionCollector, StopStrings
from upweight.types import ImageRef, Prompts, Sample, Sampling, Unit

Images = tuple[ImageRef, ...]  # of one prompt
_TOKENS_AT_ONCE = 1 << 16  # of prompts and completions


def hf_generate(
    model: nn.Module,
    engine: Engine | None,
    prompts: Prompts,
    rows: CompletionCollector,
    sampling: Sampling,
    *,
    cached: bool = True,
    reader: ImageReader | None = None,
) -> None:
    """Sample the completions of each prompt into `rows`; log-probs are the engine's, or without one `generate`'s."""
    # Prompts of one length are batched, because not every recurrent layer supports padding.
    count = rows.count
    by_length: dict[tuple[int, bool], list[int]] = {}
    for number, prompt in enumerate(prompts):
        with_images = bool(sampling.images and sampling.images[number])
        by_length.setdefault((len(prompt), with_images), []).extend(range(number * count, (number + 1) * count))
    base = unwrap_peft(model)
    with torch.random.fork_rng(devices=[base.device] if base.device.type == "cuda" else []):
        torch.manual_seed(sampling.seed or 0)
        for (length, with_images), numbers in by_length.items():
            size = max(1, _TOKENS_AT_ONCE // (length + sampling.max_new_tokens))
            for start in range(0, len(numbers), size):
                part = np.asarray(numbers[start : start + size])
                ids_BN = torch.tensor([list(prompts[row // count]) for row in part], device=base.device)
                images = [sampling.images[row // count] for row in part] if with_images else []
                inputs = {} if reader is None or not images else reader.plain_inputs(images, ids_BN)
                out = _generate(base, ids_BN, sampling, rows, cached=cached, logits=engine is None, inputs=inputs)
                out_BN, temperature = out.sequences.cpu(), sampling.temperature or 1.0
                if engine is None:  # from the logits of each step, before any penalty or truncation
                    each = [(step_BV.float().cpu() / temperature).log_softmax(-1) for step_BV in out.logits]
                    logps_BN = torch.stack(each, 1).gather(2, out_BN[:, length:, None])[:, :, 0]
                else:
                    logps_BN = _logps_after(model, engine, out_BN, length, temperature, images)
                rows.take(0, out_BN[:, length:].T.numpy(), logps_BN.T.numpy(), part)


def _generate(
    base: Any,
    ids_BN: Tensor,
    sampling: Sampling,
    rows: CompletionCollector,
    *,
    cached: bool,
    logits: bool,
    inputs: Mapping[str, Tensor],
) -> Any:
    """Run `generate` on prompts of one length; return `sequences` with prompts, and `logits` of each step if set."""
    config = generation_config(sampling, rows.ends.tolist() or [base.config.get_text_config().vocab_size])
    config.use_cache, config.return_dict_in_generate, config.output_logits = cached, True, logits
    # Fields that are unset here would be read from the model's config, such as a forced last token.
    stock, base.generation_config = base.generation_config, config
    try:
        return base.generate(
            input_ids=ids_BN,
            attention_mask=torch.ones_like(ids_BN),
            **inputs,
            generation_config=config,
            synced_gpus=False,  # weights are whole meanwhile, and ranks call it for as many prompts as they have
            stopping_criteria=StoppingCriteriaList([_AtStopString(ids_BN.shape[1], rows.stops)] if rows.stops else []),
        )
    finally:
        base.generation_config = stock


def _logps_after(  # noqa: PLR0917
    model: nn.Module, engine: Engine, ids_BN: Tensor, length: int, temperature: float, images: Sequence[Images]
) -> Tensor:
    """Return log-probs of all tokens after the first `length`, by the training forward; `images`: of each row."""
    loss_mask = np.arange(ids_BN.shape[1]) >= length
    each = zip(ids_BN.numpy(), images or [()] * len(ids_BN), strict=True)
    units = [Unit((Sample(ids=ids, loss_mask=loss_mask, images=some),)) for ids, some in each]
    batch = build_batch(units, "padded").to(unwrap_peft(model).device)
    logps_T = engine(model, batch, temperature=temperature).logps_T
    assert logps_T is not None
    return logps_T.view(len(ids_BN), -1).float().cpu()


def generation_config(sampling: Sampling, ends: Any, padding: Any = 0) -> GenerationConfig:
    """Return the settings of `generate`; each is set, because unset ones would be read from the model's config."""
    greedy = sampling.temperature == 0
    shape = {} if greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=not greedy,
        use_cache=True,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=ends,
        pad_token_id=padding,
        disable_compile=True,
        suppress_tokens=list(sampling.suppress_ids) or None,
        **shape,
    )


class _AtStopString(StoppingCriteria):
    """Ends a row when its newest token completes a stop string."""

    def __init__(self, length: int, stops: StopStrings) -> None:
        self._length, self._stops = length, stops

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        ids = input_ids[:, self._length :].tolist()
        ended = [self._stops.first(row, len(row) - 1) is not None for row in ids]
        return torch.tensor(ended, device=input_ids.device)
