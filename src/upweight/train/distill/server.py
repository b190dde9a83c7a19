"""A vLLM server as teacher: it scores the tokens of sequences, and lists the likeliest tokens at each."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from accelerate import PartialState
from numpy.typing import NDArray
from torch import nn

from upweight.data.formats.distill import MINUS_INFINITY
from upweight.data.units import filled_lists
from upweight.engine.packing import count_batch
from upweight.errors import UserError
from upweight.heartbeat import activity
from upweight.methods.base import Method
from upweight.rollout.vllm.client import RequestFailed, RequestRefused, VllmClient
from upweight.train.distill.teachers import ModelLogps, Teacher, TokenLogps, as_seen, listed_row
from upweight.train.distributed.ranks import all_gather_objects
from upweight.train.packed_rows import PackedRow
from upweight.types import Sample, Unit

AT_ONCE = 64  # requests under way
# Texts whose token ids tell tokenizers apart: words, numbers, code, white space, other scripts.
PROBES = (
    "Ask what 12345 times 6789 is, and it's answered: 83,810,205.",
    "def f(x):\n    return {'a': [x ** 2, None]}  # tabs\t\tand  spaces\n\n",
    "Größe, niño, Привет, 你好世界, こんにちは, مرحبا, 🙂🚀",
)
Scores = list[list[tuple[int, float]]]  # token ids with log-probs, likeliest first, for each token of a sequence


@dataclass(frozen=True)
class ServerTeacher(Teacher):
    """Scores sequences by `prompt_logprobs`, which are those at temperature 1 whatever is asked for."""

    method: Method
    client: VllmClient
    model: str  # its name on the server

    def logps(self, policy: nn.Module, units: Sequence[Unit], compute: ModelLogps) -> TokenLogps:
        state = PartialState()
        numbers = range(state.process_index, len(units), state.num_processes)
        units = as_seen(units)
        samples = [sample for number in numbers for sample in units[number].samples]
        scores = iter(self._scored(samples, 0))
        mine = {number: [_actual(sample, next(scores)) for sample in units[number].samples] for number in numbers}
        known = {number: logps for part in all_gather_objects(mine) for number, logps in part.items()}
        return [known[number] for number in range(len(units))]

    def taught(self, policy: nn.Module, rows: Sequence[PackedRow], units: Sequence[Unit]) -> Iterator[PackedRow]:
        units = as_seen(units)
        chosen = [[units[number] for number in row.unit_numbers] for row in rows]
        samples = [sample for part in chosen for unit in part for sample in unit.samples]
        scores = iter(self._scored(samples, self.method.teacher_top_k or 1))
        for row, part in zip(rows, chosen, strict=True):
            listed = [
                replace(unit, samples=tuple(self._listed(sample, next(scores)) for sample in unit.samples))
                for unit in part
            ]
            if not listed:
                yield listed_row(row, None, None, self.method)
                continue
            lists = count_batch(listed).to(row.batch.ids_BN.device)
            yield listed_row(row, lists.teacher_ids_TK, lists.teacher_logps_TK, self.method)

    def _listed(self, sample: Sample, scores: Scores) -> Sample:
        """Return a sample with the lists of its scored tokens, without an actual token beyond `top_k`."""
        scored = [scores[at][: self.method.teacher_top_k] for at in np.flatnonzero(sample.loss_mask)]
        ids, logps = [[token for token, _ in row] for row in scored], [[logp for _, logp in row] for row in scored]
        return replace(sample, **filled_lists(ids, logps))

    def _scored(self, samples: Sequence[Sample], count: int) -> list[Scores]:
        """Return the server's lists of `count` tokens, and the actual one, for every token of the samples."""
        with activity(f"scoring {len(samples)} sequences by the teacher at {self.client.url} (distill.server_timeout)"):
            try:
                return self.client.run(self._all(samples, count))
            except RequestRefused as error:
                remedy = f"with over 20 listed tokens, start it with --max-logprobs {count}"
                raise UserError(f"distill.teacher: {self.client.url} refuses to score: {error} ({remedy}).") from error

    async def _all(self, samples: Sequence[Sample], count: int) -> list[Scores]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(sample: Sample) -> Scores:
            body = {"model": self.model, "prompt": sample.ids.tolist(), "max_tokens": 1, "prompt_logprobs": count}
            async with slots:
                seconds = self.client.timeout
                ask = lambda: self.client.ask("/v1/completions", body, seconds=seconds)  # noqa: E731
                answer = await self.client.retry_until_answered(ask)
            return [_tokens(row) for row in answer["choices"][0]["prompt_logprobs"]]

        return await asyncio.gather(*map(one, samples))


def _tokens(row: Mapping[str, Any] | None) -> list[tuple[int, float]]:
    """Return the entries of one token's row, likeliest first, without those of probability zero; none for the first."""
    pairs = [(int(token), float(entry["logprob"])) for token, entry in (row or {}).items()]
    return sorted((pair for pair in pairs if pair[1] > MINUS_INFINITY), key=lambda pair: -pair[1])


def _actual(sample: Sample, scores: Scores) -> NDArray[np.float32]:
    """Return the log-probs of the scored tokens; those of probability zero are bounded, as is the advantage."""
    scored = [(int(sample.ids[at]), dict(scores[at])) for at in np.flatnonzero(sample.loss_mask)]
    return np.array(
        [known.get(token, -100.0 if known or number else 0.0) for number, (token, known) in enumerate(scored)],
        np.float32,
    )


def connect(url: str, method: Method, tokenizer: Any, timeout: float) -> ServerTeacher:
    """Return the teacher at a URL, once it answers and has the student's tokenizer."""
    client = VllmClient(url.rstrip("/").removesuffix("/v1"), timeout)

    async def checked() -> str:
        await client.until_healthy()
        entries = (await client.ask("/v1/models"))["data"]
        name = next(str(entry["id"]) for entry in entries if entry.get("parent") is None)
        for text in (*PROBES, "".join(tokenizer.all_special_tokens)):
            ours = tokenizer(text, add_special_tokens=False)["input_ids"]
            body = {"model": name, "prompt": text, "add_special_tokens": False}
            theirs = (await client.ask("/tokenize", body))["tokens"]
            if list(ours) != theirs:
                differing = f"{text[:30]!r} is {list(ours)[:8]} here and {theirs[:8]} there"
                raise UserError(f"distill.teacher: {url} has another tokenizer than the student: {differing}.")
        return name

    try:
        return ServerTeacher(method, client, client.run(checked()))
    except (RequestRefused, RequestFailed) as error:
        raise UserError(f"distill.teacher: {url} is no vLLM server that can be asked: {error}.") from error
