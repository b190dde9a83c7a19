"""Outcome reward models as rewards: the score of a sequence classifier at the last token of the conversation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from upweight.data.tokenize.tokens import TextTokens
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.models.load import load_failures, source_of
from upweight.models.patches import keep_soft_cap
from upweight.rewards.call import parameters_of
from upweight.rewards.process import is_process_model, load_process_reward, run_config
from upweight.rewards.reward import Reward

TOKENS_AT_ONCE = 16384  # tokens of a batch, padding included


@dataclass(frozen=True)
class ModelOptions:
    """Options for loading reward models."""

    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    trust_remote_code: bool = False


class ModelReward:
    """Scores prompts with completions by a reward model."""

    def __init__(self, model: Any, tokenizer: Any, name: str, *, strips_space: bool = False) -> None:
        self.model, self.tokenizer, self.name, self.strips_space = model.eval(), tokenizer, name, strips_space
        keep_soft_cap(model)
        self._tokens = TextTokens(tokenizer, [])
        positions = getattr(model.config, "max_position_embeddings", None)
        self._max_length = min(positions or 10**9, tokenizer.model_max_length or 10**9)

    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        """Return one score for each completion."""
        ids = [self._ids(prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]
        order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
        batches = _batches(order, [len(row) for row in ids])
        scores = list(chain.from_iterable(self._scores([ids[number] for number in batch]) for batch in batches))
        placed = dict(zip(order, scores, strict=True))
        return [placed[number] for number in range(len(ids))]

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = self._tokens.with_eos(self._tokens.ids([prompt + str(completion)])[0])
        else:
            text = self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
            ids = self._tokens.ids([text.rstrip() if self.strips_space else text])[0]
        ids = self._tokens.with_bos(ids)
        if len(ids) > self._max_length:
            warn_once(f"reward '{self.name}': conversations over {self._max_length} tokens are truncated on the left")
            ids = ids[-self._max_length :]
        return ids

    @torch.no_grad()
    def _scores(self, rows: Sequence[list[int]]) -> list[float]:
        """Return the scores of one right-padded batch."""
        device = next(self.model.parameters()).device
        padding = self._pad_id(rows)
        width = max(len(row) for row in rows)
        ids_BN = torch.tensor([row + [padding] * (width - len(row)) for row in rows], device=device)
        mask_BN = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        config = self.model.config.get_text_config()
        # The model locates the last token by the padding id in its config.
        old_pad_id, config.pad_token_id = config.pad_token_id, padding
        try:
            return self.model(input_ids=ids_BN, attention_mask=mask_BN).logits[:, 0].float().tolist()
        finally:
            config.pad_token_id = old_pad_id

    def _pad_id(self, rows: Sequence[list[int]]) -> int:
        """Return a padding id that no row ends with; else the model would take the last token for padding."""
        ends = {row[-1] for row in rows}
        usual = self.tokenizer.pad_token_id
        return (
            usual if usual is not None and usual not in ends else next(n for n in range(len(ends) + 1) if n not in ends)
        )


def _batches(order: list[int], lengths: list[int]) -> list[list[int]]:
    """Split row numbers, shortest first, into batches within the token budget after padding."""
    batches: list[list[int]] = [[]]
    for number in order:
        if batches[-1] and (len(batches[-1]) + 1) * lengths[number] > TOKENS_AT_ONCE:
            batches.append([])
        batches[-1].append(number)
    return [batch for batch in batches if batch]


def model_reward(
    model: Any, tokenizer: Any = None, name: str | None = None, *, strips_space: bool = False, key: str
) -> Reward:
    """Build a reward from a loaded model; without a tokenizer, load it from the model's source."""
    config = model.config
    place = getattr(config, "name_or_path", "") or ""
    if getattr(config, "num_labels", 1) != 1:
        raise UserError(
            f"{key}: {place or type(model).__name__} has {config.num_labels} labels; a reward model has one."
        )
    if tokenizer is None:
        if not place:
            raise UserError(f"{key}: a model built in code needs its tokenizer: pass (model, tokenizer).")
        with load_failures(key, place, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(place)
    name = name or Path(place).name or type(model).__name__
    function = ModelReward(model, tokenizer, name, strips_space=strips_space)
    return Reward(name, function, parameters_of(function, name, key), has_timeout=False)


def load_model_reward(place: str, options: ModelOptions, key: str) -> Reward:
    """Load the reward model of a folder or the hub, or an adapter with the base model it names."""
    place, _ = source_of(place, None, key)
    if is_process_model(place):
        return load_process_reward(place, key, trust_remote_code=options.trust_remote_code)
    is_adapter = (Path(place) / "adapter_config.json").is_file()
    model = _adapted(place, options, key) if is_adapter else _loaded(place, options, key)
    with load_failures(key, place, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=options.trust_remote_code)
    model = model.to(options.device).requires_grad_(False)
    # Upweight trains reward models on conversations without white space after their last turn.
    is_ours = run_config(Path(place)).get("reward_model") is True
    return model_reward(model, tokenizer, Path(place).name, strips_space=is_ours, key=key)


def _loaded(place: str, options: ModelOptions, key: str) -> Any:
    with load_failures(key, place, "reward model"):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            place,
            num_labels=1,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"{key}: {place!r} is no reward model: its files lack {', '.join(missing[:3])}, which would be random. "
            "Train one with `reward_model: true`."
        )
    return model


def _adapted(place: str, options: ModelOptions, key: str) -> Any:
    from peft import PeftConfig, PeftModel

    adapter = PeftConfig.from_pretrained(place)
    base = str(adapter.base_model_name_or_path)
    task = str(adapter.task_type).rpartition(".")[2]
    if task != "SEQ_CLS":
        raise UserError(f"{key}: the adapter in {place!r} is for {task}, not for a reward model (SEQ_CLS).")
    with load_failures(key, base, "base model of the reward model"):
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=1, dtype=options.dtype, trust_remote_code=options.trust_remote_code
        )
        # Not merged: rounding to half precision would lose a small adapter.
        return PeftModel.from_pretrained(model, place, config=adapter)
