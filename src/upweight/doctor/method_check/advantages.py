"""Whether advantages are sound: in any order of groups and completions, and where rewards are equal or missing."""

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from upweight.errors import UserError
from upweight.methods.base import Method
from upweight.rollout.user_advantages import add_user_advantages
from upweight.types import Completion, Group

SMALLEST = 5  # completions of a group
REWARDS = (
    (0.0, 1.0, 0.5, 0.25, 0.0, 0.75),
    (1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    (2.0, -1.0, float("nan"), 0.0, 0.5, 1.5),
)


def unknown_to_advantages(method: Method) -> str | None:
    """Return why advantages cannot be tried: there are none, or they read what only a real rollout has."""
    if not method.online or method.computed_rewards:
        return "the method has no advantages of its own"
    call = method.advantage_function
    read = [name for name in ("columns", "extras") if call is not None and name in call.asks]
    return f"it reads {' and '.join(read)}, which only a rollout of yours has" if read else None


def advantages_are_sound(method: Method) -> Iterator[str]:
    """Advantages are finite where rewards are equal or missing, and follow their completions in any order."""
    has_size = "num_generations" in type(method).model_fields
    asked = max(SMALLEST, method.group_size)
    # No number but 1 and 3 divides the completions of both rollouts, so that a size which is written into a function,
    # in place of `groups` or `num_generations`, does not fit.
    for size in (asked + 1, asked):
        sized = method.model_copy(update={"num_generations": size}) if has_size else method
        try:
            yield from _problems(sized, size)
        except UserError as error:
            if isinstance(error.__cause__, RuntimeError) and "size" in str(error.__cause__):
                yield f"it does not fit {len(REWARDS)} groups of {size} completions. {BY_GROUPS}: {error}"
            raise


BY_GROUPS = "Read which completions belong together from `groups`, not from their places or a size of your own"


def _problems(method: Method, size: int) -> Iterator[str]:
    groups = range(len(REWARDS))
    in_order = [(group, list(range(size))) for group in groups]
    plain, again = _advantages(method, in_order), _advantages(method, in_order)
    if not all(torch.equal(values, again[place]) for place, values in plain.items()):
        yield "the same rollout has other advantages at the second call. Draw no random numbers, and keep nothing"
    if not all(bool(values.isfinite().all()) for values in plain.values()):
        yield "an advantage is NaN or infinite where all rewards of a group are equal, or one is missing (NaN)"
    order = [(group, random.Random(group).sample(range(size), size)) for group in reversed(groups)]
    shuffled = _advantages(method, order)
    for place, values in plain.items():
        if not torch.allclose(values, shuffled[place], rtol=1e-4, atol=1e-5):
            yield f"a completion has another advantage when groups or completions come in another order. {BY_GROUPS}"
            return


def _advantages(method: Method, order: list[tuple[int, list[int]]]) -> dict[tuple[int, int], Tensor]:
    """Return the advantages of every completion, by its group and number, for groups in some order."""
    groups = []
    for group, members in order:
        completions = [_completion(group, member) for member in members]
        rewards_SR = torch.tensor([[_reward(group, member)] for member in members])
        groups.append(Group(group, {"prompt": str(group), "prompt_ids": [1]}, [1], completions, rewards_SR))
    size = len(order[0][1])
    group_S = torch.repeat_interleave(torch.arange(len(groups)), size)
    log_ratio_S = torch.tensor([0.1 * group + 0.01 * one for group, members in order for one in members])
    if (call := method.advantage_function) is not None:
        add_user_advantages(call, groups, group_S, method, log_ratio_S)
    else:
        rewards_SR = torch.cat([group.rewards_SR for group in groups if group.rewards_SR is not None])
        advantage_S = method.advantages(
            rewards_SR, group_S, log_ratio_S.double() if method.needs_kl_in_reward else None
        )
        for group, values_S in zip(groups, advantage_S.split(size), strict=True):
            group.advantage_S = values_S
    advantages = {}
    for (number, members), group in zip(order, groups, strict=True):
        assert group.advantage_S is not None
        for member, one, value in zip(members, group.completions, group.advantage_S, strict=True):
            advantages[number, member] = torch.tensor(one.advantages) if one.advantages else value[None].float()
    return advantages


def _reward(group: int, member: int) -> float:
    """Return a reward of the table, whose last three values repeat where a group is larger."""
    return REWARDS[group][member if member < len(REWARDS[group]) else 3 + member % 3]


def _completion(group: int, member: int) -> Completion:
    length = 2 + (group + 2 * member) % 5
    return Completion(list(range(3, 3 + length)), [-1.0] * length, [0] * length, finished=member != 1)
