"""Reward models as rewards: the score of a conversation, or of the steps of a completion, each or the lowest."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, ProcessorMixin

from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.config.sections.model import ModelSection
from upweight.data.images.marks import GENERIC
from upweight.data.images.row_images import IMAGE_TYPES
from upweight.data.tokenize.tokens import TextTokens
from upweight.errors import UserError
from upweight.inference.score import ScoreModel, load_score_model
from upweight.log import warn_once
from upweight.models.load import load_failures, resolve_source
from upweight.models.patches import keep_soft_cap
from upweight.models.processor import attach_processor, image_reader, with_processor
from upweight.models.score_heads import add_score_class
from upweight.rewards.parts import CHARACTERS
from upweight.rewards.reward import Reward, parameters_of
from upweight.types import Credit
from upweight.watchdog import TimeUp, time_limit

TOKENS_AT_ONCE = 16384  # tokens of a batch, padding included


@dataclass(frozen=True)
class ModelOptions:
    """Options for loading reward models."""

    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    trust_remote_code: bool = False
    template_timeout: float = DataSection().template_timeout
    by_step: bool = False  # a process reward model scores each step at its end, in place of the lowest for all


class ModelReward:
    """Scores prompts with completions by a reward model."""

    def __init__(self, model: Any, tokenizer: Any, name: str, seconds: float, *, strips_space: bool = False) -> None:
        """`seconds`: limit of the chat template for one conversation."""
        self.model, self.tokenizer, self.name, self.seconds = model.eval(), tokenizer, name, seconds
        self.strips_space = strips_space
        keep_soft_cap(model)
        self._tokens = TextTokens(tokenizer, [])
        positions = getattr(model.config, "max_position_embeddings", None)
        self._max_length = min(positions or 10**9, tokenizer.model_max_length or 10**9)

    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        """Return one score for each completion."""
        ids = [self._token_ids(prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]
        batches: list[list[int]] = [[]]
        for number in sorted(range(len(ids)), key=lambda number: len(ids[number])):
            if batches[-1] and (len(batches[-1]) + 1) * len(ids[number]) > TOKENS_AT_ONCE:
                batches.append([])
            batches[-1].append(number)
        scores: dict[int, float] = {}
        for batch in batches:
            scores |= zip(batch, self._score_batch([ids[number] for number in batch]), strict=True)
        return [scores[number] for number in range(len(ids))]

    def _token_ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = self._tokens.with_eos(self._tokens.ids([prompt + str(completion)])[0])
        else:
            try:
                with time_limit(self.seconds):
                    text = self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
            except TimeUp as error:
                limit = f"chat_template_timeout, {self.seconds:g} seconds"
                raise UserError(f"reward '{self.name}': its chat template took longer than {limit}.") from error
            ids = self._tokens.ids([text.rstrip() if self.strips_space else text])[0]
        ids = self._tokens.with_bos(ids)
        if len(ids) > self._max_length:
            warn_once(f"reward '{self.name}': conversations over {self._max_length} tokens are truncated on the left")
            ids = ids[-self._max_length :]
        return ids

    @torch.no_grad()
    def _score_batch(self, rows: list[list[int]]) -> list[float]:
        """Return the scores of one right-padded batch."""
        device = next(self.model.parameters()).device
        # The model locates the last token by the padding id in its config, so no row may end with that id.
        ends = {row[-1] for row in rows}
        ids = [self.tokenizer.pad_token_id, *range(len(ends) + 1)]
        padding = next(number for number in ids if number is not None and number not in ends)
        ids_BN = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding).to(device)
        length_B1 = torch.tensor([[len(row)] for row in rows], device=device)
        mask_BN = (torch.arange(ids_BN.shape[1], device=device) < length_B1).long()
        config = self.model.config.get_text_config()
        old_pad_id, config.pad_token_id = config.pad_token_id, padding
        try:
            return self.model(input_ids=ids_BN, attention_mask=mask_BN).logits[:, 0].float().tolist()
        finally:
            config.pad_token_id = old_pad_id


def model_reward(
    model: Any, tokenizer: Any, options: ModelOptions, key: str, name: str | None = None, *, strips_space: bool = False
) -> Reward:
    """Build a reward from a loaded model; without a tokenizer, load it from the model's source."""
    config = model.config
    source = getattr(config, "name_or_path", "") or ""
    labels, shown = getattr(config, "num_labels", 1), source or type(model).__name__
    if labels != 1:
        raise UserError(f"{key}: {shown} has {labels} labels; a reward model has one.")
    if tokenizer is None:
        if not source:
            raise UserError(f"{key}: a model built in code needs its tokenizer: pass (model, tokenizer).")
        with load_failures(key, source, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer = with_processor(tokenizer, ModelSection(base_model=source))
    name = name or Path(source).name or type(model).__name__
    if isinstance(tokenizer, ProcessorMixin):
        tokenizer = attach_processor(tokenizer, config)
    if image_reader(tokenizer) is not None:
        function: Any = partial(image_scores, ScoreModel(model, tokenizer, "sequence_score"))
    else:
        function = ModelReward(model, tokenizer, name, options.template_timeout, strips_space=strips_space)
    return Reward(name, function, parameters_of(function, name, key), has_timeout=False)


def load_model_reward(source: str, options: ModelOptions, key: str) -> Reward:
    """Load the reward model of a folder or the hub, or an adapter with the base model it names."""
    source, _ = resolve_source(source, None, key)
    folder, remote = Path(source), options.trust_remote_code
    trained = _run_config(folder)
    adapter = _read_json(folder / "adapter_config.json")
    base = adapter.get("base_model_name_or_path") or source
    if is_process_model(source):
        section = ModelSection(base_model=base, trust_remote_code=remote)
        (rows, *_) = trained.get("datasets") or [{}]
        entry = DatasetSpec(step_separator=rows.get("step_separator"))
        score = step_scores if options.by_step else lowest_step_scores
        steps = partial(score, load_score_model(section, folder if adapter else None, entry=entry))
        return Reward(folder.name, steps, parameters_of(steps, folder.name, key), has_timeout=False)
    if adapter and (task := adapter.get("task_type")) != "SEQ_CLS":
        raise UserError(f"{key}: the adapter in {source!r} is for {task}, not for a reward model (SEQ_CLS).")
    with load_failures(key, base, "base model of the reward model" if adapter else "reward model"):
        add_score_class(AutoConfig.from_pretrained(base, trust_remote_code=remote))
        model, report = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=1, dtype=options.dtype, trust_remote_code=remote, output_loading_info=True
        )
        if adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, source)  # not merged: that could round a small adapter away
    if report["missing_keys"] and not adapter:
        problem = f"its files lack {', '.join(sorted(report['missing_keys'])[:3])}, which would be random"
        raise UserError(f"{key}: {source!r} is no reward model: {problem}. Train one with `reward_model: true`.")
    with load_failures(key, source, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=remote)
        tokenizer = with_processor(tokenizer, ModelSection(base_model=base, trust_remote_code=remote), folder)
    model = model.to(options.device).requires_grad_(False)
    # Upweight trains reward models on conversations without white space after their last turn.
    strips_space = trained.get("reward_model") is True
    return model_reward(model, tokenizer, options, key, folder.name, strips_space=strips_space)


def image_scores(
    model: ScoreModel, prompts: list[Any], completions: list[Any], images: list[list[Any]] | None = None
) -> list[float]:
    """Return one score for each completion; an image is encoded once for all completions of its prompt."""
    texts = _image_texts(model)
    rows = [
        {"prompt": prompt, "completion": _without(texts, completion)}
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    for row, of_prompt in zip(rows, images or (), strict=False):
        row["images"] = [getattr(image, "filename", None) or image for image in of_prompt]
    return [score for (score,) in model(rows)]


def _image_texts(model: ScoreModel) -> tuple[str, ...]:
    """Return the texts that stand for an image."""
    reader = model.engine.images
    assert reader is not None
    return GENERIC, reader.placeholder, model.encoder.setup.tokens.tokenizer.convert_ids_to_tokens(reader.token_id)


def _without(texts: Sequence[str], completion: Any) -> Any:
    """Return a completion, text or messages, without texts that would be read as images that are not there."""
    if isinstance(completion, str):
        return re.sub("|".join(map(re.escape, texts)), "", completion)
    if isinstance(completion, list):
        return [_without(texts, part) for part in completion]
    if isinstance(completion, dict):
        return {name: _without(texts, value) for name, value in completion.items()}
    return completion


def is_process_model(source: str) -> bool:
    """Return whether a folder holds a process reward model or an adapter of one."""
    if adapter := _read_json(Path(source) / "adapter_config.json"):
        return adapter.get("task_type") == "TOKEN_CLS"
    (name, *_) = _read_json(Path(source) / "config.json").get("architectures") or [""]
    return name.endswith("ForTokenClassification")


def lowest_step_scores(
    model: ScoreModel, prompts: list[Any], completions: list[Any], images: list[list[Any]] | None = None
) -> list[float | None]:
    """Return the lowest step probability of each completion; None if it is empty."""
    steps = step_scores(model, prompts, completions, images)
    return [None if one is None else min(score for _, score in one[CHARACTERS]) for one in steps]


def step_scores(
    model: ScoreModel, prompts: list[Any], completions: list[Any], images: list[list[Any]] | None = None
) -> list[dict[str, Credit] | None]:
    """Return the probability of each step with its end in the text of its completion; None if that is empty."""
    texts = [_last_text(completion) for completion in completions]
    ends = [[end for _, end in model.steps(text)] for text in texts]
    reads = model.engine.images is not None
    shown = images if reads and images is not None else [[]] * len(prompts)
    rows = [
        {**_last_prompt(prompt, of_prompt), "completion": _without(_image_texts(model), text) if reads else text}
        for prompt, of_prompt, text in zip(prompts, shown, texts, strict=True)
    ]
    scores: list[dict[str, Credit] | None] = [None] * len(rows)
    filled = [number for number, of_row in enumerate(ends) if of_row]
    for number, of_row in zip(filled, model([rows[number] for number in filled]), strict=True):
        scores[number] = {CHARACTERS: list(zip(ends[number], of_row, strict=True))}
    return scores


def _last_prompt(prompt: Any, images: list[Any]) -> dict[str, Any]:
    """Return the text of a prompt's last message and the images in it; those of earlier messages come first."""
    *_, last = [prompt] if isinstance(prompt, str) else prompt or [{}]
    content = last if isinstance(last, str) else last.get("content")
    if isinstance(content, str) or not content:
        text, shown = str(content or ""), len(images) if isinstance(prompt, str) else 0
    else:
        kinds = [part.get("type") in IMAGE_TYPES for part in content]
        shown = sum(kinds)
        text = "".join(
            GENERIC if is_image else str(part.get("text") or "") for part, is_image in zip(content, kinds, strict=True)
        )
    files = [getattr(image, "filename", None) or image for image in images[len(images) - shown :]]
    return {"prompt": text, **({"images": files} if files else {})}


def _last_text(value: Any) -> str:
    """Return a text, or the content of the last message, because steps are scored without a chat template."""
    return value if isinstance(value, str) else str(value[-1].get("content") or "") if value else ""


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _run_config(folder: Path) -> dict[str, Any]:
    """Return the config of the run that wrote a folder, from it or its parent; empty if there is none."""
    file = next((file for file in (folder / "config.yaml", folder.parent / "config.yaml") if file.is_file()), None)
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file else None
    return content if isinstance(content, dict) else {}
