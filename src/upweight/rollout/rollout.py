"""A rollout, and its conversion to JSON values for checkpoints and for the completions file."""

import base64
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from upweight.data.images.records import image_column, image_refs
from upweight.types import Completion, Group, ImageRef

TOKEN_COLUMNS = (
    "prompt_ids",
    "teacher_prompt_ids",
    "truth_ids",
    "input_ids",
    "loss_mask",
)  # of a row; other columns have the same as text


class PromptRows(Protocol):
    """Prepared data rows, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Mapping[str, Any]: ...


@dataclass
class Rollout:
    """The scored groups of one rollout over all ranks, and its metrics."""

    number: int
    version: int  # policy version that sampled it
    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)


def to_plain(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as JSON values, without the data rows, which are looked up by number later."""
    return {**vars(rollout), "groups": [group_to_plain(group) for group in rollout.groups]}


def from_plain(plain: Mapping[str, Any], rows: PromptRows) -> Rollout:
    groups = [group_from_plain(group, rows) for group in plain["groups"]]
    return Rollout(plain["number"], plain["version"], groups, plain["metrics"])


def group_to_plain(group: Group) -> dict[str, Any]:
    """Return a group as JSON values, without its data row."""
    return {
        "row": group.number,
        "version": group.version,
        "replayed": group.replayed,
        "prompt_ids": group.prompt_ids,
        "completions": [_completion_to_plain(completion) for completion in group.completions],
        "rewards": None if group.rewards_SR is None else group.rewards_SR.tolist(),
        "advantages": None if group.advantage_S is None else group.advantage_S.tolist(),
    }


def group_from_plain(plain: Mapping[str, Any], rows: PromptRows) -> Group:
    return Group(
        plain["row"],
        rows[plain["row"]],
        plain["prompt_ids"],
        [_completion_from_plain(completion) for completion in plain["completions"]],
        None if plain["rewards"] is None else torch.tensor(plain["rewards"]),
        None if plain["advantages"] is None else torch.tensor(plain["advantages"]),
        version=plain["version"],
        replayed=plain["replayed"],
    )


def _completion_to_plain(completion: Completion) -> dict[str, Any]:
    images = None if completion.images is None else image_column(completion.images)
    routes = None if completion.routes is None else _routes_to_plain(completion.routes)
    earlier = [_completion_to_plain(segment) for segment in completion.earlier]
    return {**vars(completion), "earlier": earlier, "images": images, "routes": routes}


def _completion_from_plain(plain: Mapping[str, Any]) -> Completion:
    earlier = [_completion_from_plain(segment) for segment in plain.get("earlier", ())]
    images = None if plain.get("images") is None else image_refs(plain)
    fields = {**plain, "earlier": earlier, "images": images}
    if "given" in fields:  # its name in older checkpoints
        fields["prompt_len"] = fields.pop("given")
    if fields.get("routes") is not None:
        fields["routes"] = _routes_from_plain(fields["routes"])
    return Completion(**fields)


def _routes_to_plain(routes: NDArray[np.int16]) -> dict[str, Any]:
    """Return the experts of a completion's tokens as text: numbers would take several times as much."""
    return {"shape": routes.shape, "bytes": base64.b64encode(zlib.compress(routes.tobytes(), 1)).decode()}


def _routes_from_plain(plain: Mapping[str, Any]) -> NDArray[np.int16]:
    return np.frombuffer(zlib.decompress(base64.b64decode(plain["bytes"])), np.int16).reshape(plain["shape"])


def images_of(group: Group, completion: Completion) -> tuple[ImageRef, ...]:
    """Return the images of a prompt with its completion."""
    return image_refs(group.row) if completion.images is None else completion.images


def images_before(group: Group, stop: int) -> tuple[ImageRef, ...]:
    """Return the images of a document whose tokens are before a position, which is inside of none."""
    refs = image_refs(group.row)
    left = group.prompt_ids[:stop].count(refs[0].token_id) if refs else 0
    ends = accumulate(ref.tokens for ref in refs)
    return tuple(ref for ref, end in zip(refs, ends, strict=True) if end <= left)


def observed_images(group: Group, completion: Completion) -> list[ImageRef]:
    """Return the images that tools and the environment returned in an episode, each once: not those of the row."""
    segments = [*completion.earlier, completion]
    seen = {ref.digest: ref for segment in segments for ref in segment.images or ()}
    of_row = {ref.digest for ref in image_refs(group.row)}
    return [ref for digest, ref in seen.items() if digest not in of_row]


def content_of(completion: Completion, decode: Callable[[list[int]], str]) -> Any:
    """Return the messages of a completion where it has any, else its text."""
    if completion.messages is not None:
        return list(completion.messages)
    return decode(completion.completion_ids) if completion.text is None else completion.text


def readable(rollout: Rollout, names: Sequence[str], decode: Callable[[list[int]], str]) -> Iterator[dict[str, Any]]:
    """Yield one flat object for each completion: the columns of its row, its text, rewards and advantage."""
    for group in rollout.groups:
        rewards = [] if group.rewards_SR is None else group.rewards_SR.tolist()
        advantages = [] if group.advantage_S is None else group.advantage_S.tolist()
        for index, completion in enumerate(group.completions):
            scores = zip(names, rewards[index], strict=True)
            parts = {names[number]: credit for (at, number), credit in group.credits.items() if at == index}
            observed = image_column(observed_images(group, completion))
            yield {
                **{name: value for name, value in group.row.items() if name not in TOKEN_COLUMNS},
                "rollout": rollout.number,
                "version": rollout.version,
                "row": group.number,
                "prompt": group.row.get("prompt", decode(group.prompt_ids)),
                "completion": content_of(completion, decode),
                "tokens": len(completion.completion_ids),
                "finished": completion.finished,
                "rewards": {name: None if math.isnan(value) else value for name, value in scores},
                "advantage": advantages[index] if advantages else None,
                **({"reward_parts": parts} if parts else {}),
                **({"observed_images": observed} if observed else {}),
                **{name: values[index] for name, values in group.extras.items()},
                **({} if completion.failure is None else {"failure": completion.failure}),
            }
