"""Answers of an offline run to a few held-out prompts, before its first and after its last step, for its page."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from upweight.config.sections.run import RunSection
from upweight.data.stream.feed import RowFeed
from upweight.data.tokenize.turns import TurnReader
from upweight.errors import UserError
from upweight.files import write_text
from upweight.log import warn_once
from upweight.runs.files import COMPLETIONS
from upweight.sampler.in_process import InProcess
from upweight.types import Sampling

LIMIT_SECONDS = 30.0  # for all answers, each time


class HeldOutAnswers(TrainerCallback):
    """Samples answers on rank 0 and writes them as an evaluation's completions."""

    def __init__(self, trainer: Any, run: RunSection, folder: Path) -> None:
        self.trainer, self.run, self.folder = trainer, run, folder
        self.sampler: InProcess | None = None
        self.last_step: int | None = None  # an evaluation of several sets is announced once for each

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._answer(state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run.generate_samples:
            self._answer(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end:  # after the last evaluation, and answers otherwise
            self.last_step = None
        self._answer(state)

    def _answer(self, state: Any) -> None:
        if not state.is_world_process_zero or state.global_step == self.last_step:
            return
        self.last_step = state.global_step
        held_out = self.trainer.eval_rows
        for name, rows in (held_out if isinstance(held_out, Mapping) else {"": held_out}).items():
            if not isinstance(rows, RowFeed):
                chosen = [(number, rows[number]) for number in range(min(self.run.answered_prompts, len(rows)))]
                self._write(
                    [row for row in (_prompt_and_answer(*one) for one in chosen) if row], name, state.global_step
                )

    def _write(self, rows: Sequence[tuple[int, list[int], list[int]]], name: str, step: int) -> None:
        """Answer prompts (row, prompt, the data's answer) and write one object for each."""
        if not rows:
            return
        decode, turns = self.trainer.processing_class.decode, TurnReader(self.trainer.processing_class)
        answers = self._sampled([prompt for _, prompt, _ in rows])
        if answers is None:
            return
        lines = []
        for (number, prompt, expected), (ids, finished) in zip(rows, answers, strict=True):
            asked = decode(prompt)
            texts = {"prompt": turns.messages(asked) or asked, "completion": decode(ids, skip_special_tokens=True)}
            in_data = {"in the data": decode(expected, skip_special_tokens=True)}
            lines.append({"step": step, "row": number, **texts, "tokens": len(ids), "finished": finished, **in_data})
        prefix = f"eval_{re.sub(r'[^0-9A-Za-z_.-]', '_', name)}" if name else "eval"
        file = self.folder / COMPLETIONS / f"{prefix}_step_{step:05d}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def _sampled(self, prompts: list[list[int]]) -> list[tuple[list[int], bool]] | None:
        """Return the tokens of each answer and whether it ended; None where the model cannot be sampled."""
        answers: list[list[int]] = [[] for _ in prompts]
        deadline = time.monotonic() + LIMIT_SECONDS

        def take(row: int, ids: list[int]) -> None:
            answers[row] += ids
            if time.monotonic() > deadline:
                raise _TimeIsUp

        if self.sampler is None:
            engine, tokenizer = self.trainer.runner.engine, self.trainer.processing_class
            self.sampler = InProcess(self.trainer.model, tokenizer, engine=engine)
        devices = [self.trainer.args.device] if self.trainer.args.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):  # what a run trains does not depend on whether it answers
                wanted = (self.run.answer_tokens, self.run.answer_temperature, self.run.answer_top_p)
                self.sampler.sync(self.trainer.state.global_step)
                sampling = Sampling(*wanted, self.run.answer_top_k, seed=0)
                groups = self.sampler.generate(prompts, 1, sampling, on_tokens=take)
        except _TimeIsUp:
            warn_once(f"eval_samples: answers are cut after {LIMIT_SECONDS:g} s")
            return [(ids, False) for ids in answers]
        except UserError as error:  # a model that cannot be sampled here trains all the same
            warn_once(f"eval_samples: {error}")
            return None
        return [(group[0].ids, group[0].finished) for group in groups]


class _TimeIsUp(Exception):
    """Answers have taken as long as they may."""


def _prompt_and_answer(number: int, row: Mapping[str, Any]) -> tuple[int, list[int], list[int]] | None:
    """Return a prepared row's number, prompt and answer; None for a text that is trained on from its beginning."""
    if "prompt_ids" in row:
        return number, list(row["prompt_ids"]), list(row.get("chosen_ids") or row.get("completion_ids") or ())
    mask: list[bool] = list(row.get("loss_mask") or ())
    start = mask.index(True) if True in mask else 0
    return (number, list(row["input_ids"][:start]), list(row["input_ids"][start:])) if start > 1 else None
