"""Try a config's rewards without training, on completions of its model or of a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from upweight.config import Config
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.models.tokenizer import load_tokenizer
from upweight.rewards.builtin.text import texts_of
from upweight.rewards.reward import Reward, RewardCall
from upweight.rewards.trial import Trial, remarks, try_rewards
from upweight.rollout.fed_prompts import FedPrompts
from upweight.rollout.plan import PromptOrder
from upweight.rollout.scoring import reward_call
from upweight.train.online.assemble import build_rewards
from upweight.train.online.environments import environment_setup
from upweight.train.run import build
from upweight.types import Group

EXAMPLES = 2  # of the best and of the worst, for each reward


@dataclass(frozen=True)
class TriedRewards:
    """The scores of rewards on some completions, and remarks on them."""

    call: RewardCall
    trials: list[Trial]
    remarks: list[str]

    def as_plain(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "completions": len(self.call),
            "prompts": len(self.call.groups()),
            "rewards": [trial.summary() | self.best_and_worst(trial) for trial in self.trials],
            "remarks": self.remarks,
            "works": self.works,
        }

    @property
    def works(self) -> bool:
        """Whether training could learn from them: none fails, and one at least separates completions."""
        fails = any(trial.failed or trial.failure for trial in self.trials)
        # Without two completions of a prompt nothing can be compared, and values that differ are all that can be seen.
        separates = (len(set(trial.known)) > 1 if trial.spread is None else trial.spread > 0 for trial in self.trials)
        return not fails and any(separates)

    def best_and_worst(self, trial: Trial) -> dict[str, list[dict[str, Any]]]:
        """A reward's best and worst completions with their prompts and scores."""
        texts, prompts = texts_of(self.call.completions), self.call.prompts
        best, worst = (
            [{"score": trial.scores[n], "prompt": prompts[n], "completion": texts[n]} for n in numbers]
            for numbers in trial.extremes(EXAMPLES)
        )
        return {"best": best, "worst": worst}


def try_on_samples(config: Config, prompts: int, count: int | None = None) -> TriedRewards:
    """Rewards on completions that the config's model writes for some prompts of its data."""
    config = _online_stage(config)
    trainer = build(config)
    rollouts = trainer.rollouts
    assert rollouts is not None
    producer = rollouts.producer
    rows = producer.rows
    order = rows if isinstance(rows, FedPrompts) else PromptOrder(len(rows), config.order_seed)
    numbers = order.take(min(prompts, len(rows)))
    groups = [Group(number, rows[number], list(rows[number]["prompt_ids"])) for number in numbers]
    trainer.model.eval()
    if rollouts.generator is not None:
        rollouts.generator.sync(0)
    producer.completion_source(groups, count or producer.plan.group_size, producer.sampling, None)
    rollouts.close()
    return _try_rewards(config, producer.scorer.rewards, reward_call(groups, producer.decode))


def try_on_rows(config: Config, rows: Sequence[Mapping[str, Any]]) -> TriedRewards:
    """Rewards on rows of prompt, completion and columns; rows of one prompt that follow each other are a group."""
    config = _online_stage(config)
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("completion"), str | list):
            raise UserError(f"row {number} of the completions has no 'completion', a text or a list of messages.")
    columns = sorted({name for row in rows for name in row} - {"prompt", "completion"})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rewards = build_rewards(config, device, columns, environment_setup(config))
    completions = [_in_prompt_form(row) for row in rows]
    ids = _token_ids(config, rewards, texts_of(completions))
    prompts = [row.get("prompt") for row in rows]
    group_S = [number for number, (_, group) in enumerate(groupby(prompts)) for _ in group]
    values = {name: [row.get(name) for row in rows] for name in columns}
    return _try_rewards(config, rewards, RewardCall(prompts, completions, ids, values, group_S))


def _token_ids(config: Config, rewards: Sequence[Reward], texts: Sequence[str]) -> list[list[int]]:
    """The token ids of completions, where a reward may read them."""
    must = any("completion_ids" in reward.takes.named for reward in rewards)
    may = any(reward.takes.everything for reward in rewards)
    try:
        tokenizer = load_tokenizer(config.model) if must or may else None
    except UserError as error:
        if must:
            raise
        warn_once(f"rewards get no completion_ids: {error}")
        tokenizer = None
    return [list(tokenizer.encode(text, add_special_tokens=False)) if tokenizer else [] for text in texts]


def _online_stage(config: Config) -> Config:
    """Return the config, or the last of its stages that is online; raise where it has no rewards."""
    online = next((stage for stage in reversed((*config.stages, config)) if stage.method.online), None)
    if online is None or not online.rollout.reward_funcs:
        raise UserError("trl.reward_funcs is empty: there is nothing to try. Name rewards there, with an online `rl`.")
    return online


def _in_prompt_form(row: Mapping[str, Any]) -> Any:
    """A completion in the form that rewards get in training: messages where the prompt is."""
    completion = row["completion"]
    if isinstance(completion, str) and isinstance(row.get("prompt"), list):
        return [{"role": "assistant", "content": completion}]
    return completion


def _try_rewards(config: Config, rewards: Sequence[Reward], call: RewardCall) -> TriedRewards:
    section, method = config.rollout, config.method
    trials = try_rewards(rewards, call, workers=section.reward_workers, timeout=section.reward_timeout)
    online = method.online_settings
    weights = online.reward_weights if online else None
    return TriedRewards(call, trials, remarks(trials, weights, each_scaled=method.scales_each_reward))
