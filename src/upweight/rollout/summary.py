"""Metrics of a rollout, under the names that TRL users know."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress

import torch
from torch import Tensor

from upweight.data.formats.nemo_gym import SERVER
from upweight.methods.base import Method
from upweight.methods.formulas.advantages import weighted_reward
from upweight.types import Group


def has_signal(group: Group) -> bool:
    """Whether some reward, or where in a completion it was earned, differs between a group's completions."""
    if any(bool(column.max() > column.min()) for column in _applicable_rewards(group) if len(column)):
        return True
    placed = {(reward, tuple(credit)) for (_, reward), credit in group.credits.items()}
    return len(placed) > len({reward for reward, _ in placed})


def spread(group: Group) -> float:
    """Return the standard deviations of a group's rewards, summed over the reward functions."""
    return sum(float(column.std()) for column in _applicable_rewards(group) if len(column) > 1)


def summary(groups: Sequence[Group], names: Sequence[str], method: Method) -> dict[str, float]:
    """Return the metrics of scored groups: rewards, their spread, completion lengths, episodes."""
    rewards_SR = torch.cat([group.rewards_SR for group in groups if group.rewards_SR is not None])
    online = method.online_settings
    reward_S = weighted_reward(rewards_SR, online.reward_weights if online else None)
    without_signal = [not has_signal(group) for group in groups]
    sizes = [len(group.rewards_SR) for group in groups if group.rewards_SR is not None]
    spreads = [value for part_S in reward_S.split(sizes) if not math.isnan(value := _std(part_S))]
    metrics: dict[str, float] = {}
    if rewards_SR.shape[1]:
        metrics = {
            "reward": _mean(reward_S),
            "reward_std": _std(reward_S),
            "group_reward_std": sum(spreads) / len(spreads) if spreads else float("nan"),
            "frac_reward_zero_std": sum(without_signal) / len(without_signal),
        }
    if len(known_S := reward_S[~reward_S.isnan()]):
        metrics |= {"reward_min": float(known_S.min()), "reward_max": float(known_S.max())}
    # A method that computes its rewards itself logs them under other names.
    for name, column_S in () if method.computed_rewards else zip(names, rewards_SR.T, strict=True):
        metrics |= {f"rewards/{name}/mean": _mean(column_S), f"rewards/{name}/std": _std(column_S)}
    metrics |= _completion_metrics(groups) | _episode_metrics(groups)
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def pass_rates(groups: Sequence[Group], names: Sequence[str]) -> dict[str, float]:
    """Return, for each reward, the share of completions that earn it (pass@1), and of prompts with any (pass@n)."""
    scored = [_applicable_rewards(group) for group in groups if group.rewards_SR is not None]
    metrics: dict[str, float] = {}
    for index, name in enumerate(names):
        known = [column for columns in scored if len(column := columns[index])]
        if known:
            most = max(len(column) for column in known)
            shares = torch.stack([(column > 0).float().mean() for column in known])
            metrics[f"rewards/{name}/pass@1"] = float(shares.mean())
            metrics[f"rewards/{name}/pass@{most}"] = float((shares > 0).float().mean())
    return metrics


def _applicable_rewards(group: Group) -> list[Tensor]:
    """Return the values of each reward for the completions of a group that it applies to."""
    assert group.rewards_SR is not None
    return [column[~column.isnan()] for column in group.rewards_SR.T]


def _completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    completions = [completion for group in groups for completion in group.completions if completion.failure is None]
    if not completions:
        return {}
    lengths = torch.tensor([len(completion.completion_ids) for completion in completions], dtype=torch.float64)
    ended = torch.tensor([completion.finished for completion in completions])
    token_ids = [[tuple(one.completion_ids) for one in group.completions if one.failure is None] for group in groups]
    distinct = [len(set(members)) / len(members) for members in token_ids if members]
    clipped = float(1 - ended.double().mean())
    metrics = {"completions/clipped_ratio": clipped, "completions/distinct_share": sum(distinct) / len(distinct)}
    empty = [one.finished and len(one.completion_ids) <= 1 and not one.earlier for one in completions]  # the end alone
    metrics["completions/empty_share"] = sum(empty) / len(empty)
    for kind, values in (("", lengths), ("terminated_", lengths[ended])):
        if len(values):
            ways = {"mean": values.mean(), "min": values.min(), "max": values.max()}
            metrics |= {f"completions/{way}_{kind}length": float(value) for way, value in ways.items()}
    segments = [segment for completion in completions for segment in completion.segments]
    sampled = [one.logps if one.sampled is None else compress(one.logps, one.sampled) for one in segments]
    logps = torch.tensor([*chain.from_iterable(sampled)], dtype=torch.float64)
    if len(logps):
        metrics["sampling/entropy"] = -float(logps.mean())
    return metrics


def _episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of episodes: turns, tool calls, time, failures; none where there are no episodes."""
    pairs = [pair for group in groups for pair in zip(group.completions, group.extras.get("episode", ()), strict=False)]
    episodes = [episode for _, episode in pairs if episode is not None]
    if not episodes:
        return {}
    turns = [episode["turns"] for episode in episodes]
    calls = sum(episode["tool_calls"] for episode in episodes)
    metrics = {
        "environment/turns_mean": sum(turns) / len(turns),
        "environment/turns_max": float(max(turns)),
        "environment/seconds": sum(episode["seconds"] for episode in episodes),
        "environment/masked": float(sum(one.failure is not None for one, _ in pairs)),
        "environment/truncated": float(sum(one.failure is None and not one.finished for one, _ in pairs)),
        "rollout/splits": float(sum(episode["splits"] for episode in episodes)),
        "tools/call_frequency": calls / len(episodes),
    }
    if calls:
        metrics["tools/failure_frequency"] = sum(episode["tool_failures"] for episode in episodes) / calls
    return metrics | _server_metrics(groups)


def _server_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean reward and the failed episodes of each Gym server."""
    rewards: dict[str, list[float]] = {}
    masked: Counter[str] = Counter()
    for group in groups:
        names = group.extras.get(SERVER) or [None] * len(group.completions)
        for name, completion, episode in zip(names, group.completions, group.extras.get("episode", ()), strict=False):
            server = name or group.row.get(SERVER)
            if server is not None and completion.failure is not None:
                masked[server] += 1
            elif server is not None:
                rewards.setdefault(server, []).append(sum(episode["rewards"].values()))
    metrics = {f"environment/{name}/reward": sum(values) / len(values) for name, values in rewards.items()}
    return metrics | {f"environment/{name}/masked": float(masked[name]) for name in {*rewards, *masked}}


def _mean(values_S: Tensor) -> float:
    return float(values_S.double().nanmean())


def _std(values_S: Tensor) -> float:
    known = values_S[~values_S.isnan()].double()
    return float(known.std()) if len(known) > 1 else float("nan") if not len(known) else 0.0


def join_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Join the metrics of several calls or ranks: failures and seconds add up, all others are averaged."""
    values: dict[str, list[float]] = {}
    for name, value in (item for part in parts for item in part.items()):
        values.setdefault(name, []).append(value)
    added = ("/failed", "/seconds")
    return {name: sum(each) / (1 if name.endswith(added) else len(each)) for name, each in sorted(values.items())}
