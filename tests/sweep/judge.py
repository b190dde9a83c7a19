"""What training and sampling make of a model type, against plain forwards of single sequences by an untouched model."""

import contextlib
import logging
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import transformers as hf

from sweep.tiny import tiny_model
from tiny_models import drawn, gradients, identical, relative_difference, sample, three_levels, weighted
from upweight.config.sections.model import ModelSection
from upweight.engine import Engine
from upweight.engine.check import check_first_batch
from upweight.engine.packing import build_batch
from upweight.errors import UserError
from upweight.models.load import load_model_config
from upweight.sampler.in_process import InProcess, Strategy
from upweight.types import Sampling, Unit

Task = Literal["language model", "classifier", "sampling"]
_LANGUAGE = hf.AutoModelForCausalLM, hf.MODEL_FOR_CAUSAL_LM_MAPPING
_CLASSIFIER = hf.AutoModelForSequenceClassification, hf.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
CLASSES: dict[Task, tuple[Any, Any]] = {
    "language model": _LANGUAGE,
    "classifier": _CLASSIFIER,
    "sampling": _LANGUAGE,
}
WAYS = {
    Strategy.SHARED_PREFIX: "shared",
    Strategy.GENERATE: "generate",
    Strategy.GENERATE_UNCACHED: "generate without a cache",
}
_LARGEST, _LARGEST_GRADIENT = 1e-4, 1e-3
_LARGEST_SAMPLED = 1e-3  # one token at a time rounds otherwise
_GREEDY = Sampling(max_new_tokens=20, temperature=0.0)
_PROMPTS = [drawn(seed, length).tolist() for seed, length in enumerate((9, 3, 17))]


class Verdict(NamedTuple):
    """What became of a model type: an outcome, and why."""

    outcome: str
    remark: str = ""


def types_of(task: Task) -> list[Any]:
    """The config classes that have a model for a task."""
    return sorted(set(CLASSES[task][1].keys()), key=lambda config: config.model_type)


def judge(task: Task, config_class: Any) -> Verdict:
    """Load, build and compare as a user's run does; what a user's run refuses is refused here.

    Encoders that can be decoders are tried as such where they are refused as language models.
    """
    with _quiet():
        if words := _refused_by_loader(config_class):
            return Verdict("refused", words)
        verdict = _judged(task, config_class)
        if verdict.outcome == "refused" and task != "classifier" and not getattr(config_class(), "is_decoder", True):
            decoder = _judged(task, config_class, is_decoder=True)
            if decoder.outcome not in ("refused", "not built"):
                return Verdict(decoder.outcome, decoder.remark or "only with `is_decoder: true` in its config")
    return verdict


def _judged(task: Task, config_class: Any, **given: Any) -> Verdict:
    try:
        model, untouched = (tiny_model(CLASSES[task][0], config_class, **given) for _ in range(2))
    except Exception as error:
        return Verdict("not built", _first_line(error))
    try:
        return _sampled(model, untouched) if task == "sampling" else _trained(model, untouched)
    except UserError as error:
        return Verdict("refused", _first_line(error))
    except Exception as error:
        return Verdict("wrong", _first_line(error))


def _refused_by_loader(config_class: Any) -> str | None:
    """What the loader says of a checkpoint with this config, where it refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            seeing = {"vision_config": {}} if "vision_config" in config_class.sub_configs else {}
            config_class(**seeing).save_pretrained(folder)
            load_model_config(ModelSection(base_model=folder))
        except UserError as error:
            return _first_line(error).replace(f"base_model: {folder!r} ({config_class.model_type})", "it")
        except Exception:  # a config without values cannot be written; the real ones can
            return None
    return None


def _units() -> list[Unit]:
    """Nested branches, duplicates, and a sequence longer than the windows and the lengths that scales begin at."""
    return [*three_levels(), *identical(), Unit((sample(drawn(99, 40), prompt=3),))]


def _trained(model: Any, untouched: Any) -> Verdict:
    """The engine's log-probs or scores of one batch, and all gradients."""
    engine = Engine(model)
    try:
        right = _plain_scores(untouched) if engine.scores else _plain_logps(untouched)
    except Exception as error:
        return Verdict("not built", f"its own forward: {_first_line(error)}")
    check = check_first_batch(engine, model, build_batch(_units(), engine.layout, predict=not engine.scores))
    if not check.passed:
        return Verdict("refused", f"its numbers fail the check of the first batch. {check.advice}")
    ours = _ours(engine, model)
    difference = float((ours - right).detach().abs().max())
    turned = relative_difference(gradients(model, weighted({"x": ours})), gradients(untouched, weighted({"x": right})))
    if not (difference <= _LARGEST and turned <= _LARGEST_GRADIENT):
        return Verdict("wrong", f"{engine.layout}: off by {difference:.2g}, gradients by {turned:.2g}")
    return Verdict({"tree": "trees", "padded": "padded"}[engine.layout])


def _ours(engine: Engine, model: Any) -> torch.Tensor:
    """All sequences in one batch: every log-prob, or each sequence's last two scores."""
    batch = build_batch(_units(), engine.layout, predict=not engine.scores)
    out = engine(model, batch)
    if out.logps_T is not None:
        return out.logps_T
    assert out.scores_TC is not None
    return out.scores_TC[torch.cat([(batch.sequence_T == s).nonzero()[-2:, 0] for s in range(batch.num_sequences)])]


def _plain_logps(model: Any) -> torch.Tensor:
    """Log-probs of scored tokens, each sequence by itself."""
    items = [item for unit in _units() for item in unit.samples]
    return torch.cat([_logps(model, torch.from_numpy(item.ids), np.flatnonzero(item.loss_mask)) for item in items])


def _logps(model: Any, ids: torch.Tensor, at: Any) -> torch.Tensor:
    logits_NV = model(input_ids=ids[None], use_cache=False).logits[0, at - 1].float()
    return logits_NV.log_softmax(-1).gather(1, ids[at][:, None])[:, 0]


def _plain_scores(model: Any) -> torch.Tensor:
    """Scores at the last two scored positions, each from a text that ends there."""
    items = [item for unit in _units() for item in unit.samples]
    texts = [
        torch.from_numpy(item.ids)[None, : int(at) + 1] for item in items for at in np.flatnonzero(item.loss_mask)[-2:]
    ]
    return torch.cat([model(input_ids=text, use_cache=False).logits.reshape(-1, 1)[-1:] for text in texts])


@torch.no_grad()
def _sampled(model: Any, untouched: Any) -> Verdict:
    """Greedy completions: tokens that a plain forward takes for most likely, and its log-probs of them."""
    sampler = InProcess(model, end_ids=())
    out = sampler.generate(_PROMPTS, 2, _GREEDY)
    for prompt, group in zip(_PROMPTS, out, strict=True):
        for one in group:
            ids = torch.tensor(prompt + one.ids)
            at = np.arange(len(prompt), len(ids))
            log_p = untouched(input_ids=ids[None], use_cache=False).logits[0, at - 1].float().log_softmax(-1)
            chosen = log_p.gather(1, ids[at][:, None])[:, 0]
            short = float((log_p.amax(1) - chosen).max())
            difference = float((torch.tensor(one.logps) - chosen).abs().max())
            if not (len(at) == _GREEDY.max_new_tokens and max(short, difference) <= _LARGEST_SAMPLED):
                way = WAYS[sampler._strategy]
                return Verdict("wrong", f"{way}: log-probs off by {difference:.2g}, tokens by {short:.2g}")
    return Verdict(WAYS[sampler._strategy])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers and we say about tiny configs."""
    before = hf.logging.get_verbosity(), (ours := logging.getLogger("upweight")).level
    hf.logging.set_verbosity_error()
    ours.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf.logging.set_verbosity(before[0])
        ours.setLevel(before[1])


def _first_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, UserError) else textwrap.shorten(f"{type(error).__name__}: {words}", 160)
