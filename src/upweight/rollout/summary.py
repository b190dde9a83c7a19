"""What a rollout looks like in numbers, under the names people know."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress

import torch
from torch import Tensor

from upweight.data.formats.nemo_gym import SERVER
from upweight.methods.base import Method
from upweight.methods.formulas.advantages import weighted_reward
from upweight.types import Completion, Group


def has_signal(group: Group) -> bool:
    """Whether some reward tells a group's completions apart."""
    return any(bool(column.max() > column.min()) for column in _known(group) if len(column))


def spread(group: Group) -> float:
    """Standard deviations of a group's rewards, summed over the rewards."""
    return sum(float(column.std()) for column in _known(group) if len(column) > 1)


def summary(groups: Sequence[Group], names: Sequence[str], method: Method) -> dict[str, float]:
    """Metrics of scored groups: rewards, their spread, lengths of completions."""
    rewards_SR = torch.cat([group.rewards_SR for group in groups if group.rewards_SR is not None])
    policy = method.policy_settings
    reward_S = weighted_reward(rewards_SR, policy.reward_weights if policy else None)
    flat = [not has_signal(group) for group in groups]
    sizes = [len(group.rewards_SR) for group in groups if group.rewards_SR is not None]
    spreads = [value for part_S in reward_S.split(sizes) if not math.isnan(value := _std(part_S))]
    found = {
        "reward": _mean(reward_S),
        "reward_std": _std(reward_S),
        "group_reward_std": sum(spreads) / len(spreads) if spreads else float("nan"),
        "frac_reward_zero_std": sum(flat) / len(flat),
    }
    # A method that makes its rewards itself says more of them under names of its own.
    for name, column_S in () if method.reward_names else zip(names, rewards_SR.T, strict=True):
        found |= {f"rewards/{name}/mean": _mean(column_S), f"rewards/{name}/std": _std(column_S)}
    found |= _lengths(groups) | acting(groups)
    return {name: value for name, value in found.items() if not math.isnan(value)}


def pass_rates(groups: Sequence[Group], names: Sequence[str]) -> dict[str, float]:
    """For each reward, the share of completions that earn any, and of prompts of which one completion does."""
    scored = [_known(group) for group in groups if group.rewards_SR is not None]
    found: dict[str, float] = {}
    for place, name in enumerate(names):
        known = [column for columns in scored if len(column := columns[place])]
        if known:
            most = max(len(column) for column in known)
            found[f"rewards/{name}/pass@1"] = float(
                torch.stack([(column > 0).float().mean() for column in known]).mean()
            )
            found[f"rewards/{name}/pass@{most}"] = sum(bool((column > 0).any()) for column in known) / len(known)
    return found


def _known(group: Group) -> list[Tensor]:
    """What each reward gave those of a group's completions that it applies to."""
    assert group.rewards_SR is not None
    return [column[~column.isnan()] for column in group.rewards_SR.T]


def _lengths(groups: Sequence[Group]) -> dict[str, float]:
    completions = [one for group in groups for one in group.completions if one.failure is None]
    if not completions:
        return {}
    lengths = torch.tensor([len(one.written) for one in completions], dtype=torch.float64)
    ended = torch.tensor([one.finished for one in completions])
    written = [[tuple(one.written) for one in group.completions if one.failure is None] for group in groups]
    distinct = [len(set(members)) / len(members) for members in written if members]
    found = {
        "completions/clipped_ratio": float(1 - ended.double().mean()),
        "completions/distinct_share": sum(distinct) / len(distinct),
    }
    for kind, values in (("", lengths), ("terminated_", lengths[ended])):
        if len(values):
            found |= {
                f"completions/mean_{kind}length": float(values.mean()),
                f"completions/min_{kind}length": float(values.min()),
                f"completions/max_{kind}length": float(values.max()),
            }
    parts = [part for one in completions for part in (one, *one.earlier)]
    logps = torch.tensor([logp for one in parts for logp in _written_logps(one)], dtype=torch.float64)
    if len(logps):
        found["sampling/entropy"] = -float(logps.mean())
    return found


def _written_logps(completion: Completion) -> Iterable[float]:
    """Log-probs of the tokens that the policy wrote."""
    return completion.logps if completion.sampled is None else compress(completion.logps, completion.sampled)


def acting(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of played episodes: turns, calls, time, and what became of them; nothing where none were played."""
    pairs = [pair for group in groups for pair in zip(group.completions, group.extras.get("episode", ()), strict=False)]
    episodes = [episode for _, episode in pairs if episode is not None]
    if not episodes:
        return {}
    turns, calls = [one["turns"] for one in episodes], sum(one["tool_calls"] for one in episodes)
    found = {
        "environment/turns_mean": sum(turns) / len(turns),
        "environment/turns_max": float(max(turns)),
        "environment/seconds": sum(one["seconds"] for one in episodes),
        "environment/masked": float(sum(one.failure is not None for one, _ in pairs)),
        "environment/truncated": float(sum(one.failure is None and not one.finished for one, _ in pairs)),
        "rollout/splits": float(sum(one["splits"] for one in episodes)),
        "tools/call_frequency": calls / len(episodes),
    }
    if calls:
        found["tools/failure_frequency"] = sum(one["tool_failures"] for one in episodes) / calls
    return found | by_server(groups)


def by_server(groups: Sequence[Group]) -> dict[str, float]:
    """For each server that verifies rows: what it gave, and how often nothing came of it."""
    given: dict[str, list[float]] = {}
    masked: Counter[str] = Counter()
    for group in groups:
        names = group.extras.get(SERVER) or [None] * len(group.completions)
        for name, one, episode in zip(names, group.completions, group.extras.get("episode", ()), strict=False):
            known = name or group.row.get(SERVER)
            if known is not None and one.failure is not None:
                masked[known] += 1
            elif known is not None:
                given.setdefault(known, []).append(sum(episode["rewards"].values()))
    found = {f"environment/{name}/reward": sum(values) / len(values) for name, values in given.items()}
    return found | {f"environment/{name}/masked": float(masked[name]) for name in {*given, *masked}}


def _mean(values_S: Tensor) -> float:
    return float(values_S.double().nanmean())


def _std(values_S: Tensor) -> float:
    known = values_S[~values_S.isnan()].double()
    return float(known.std()) if len(known) > 1 else float("nan") if not len(known) else 0.0
