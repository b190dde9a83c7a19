"""Calls for rewards, and reward files as users write them."""

from pathlib import Path
from typing import Any

from upweight.rewards.load import load_rewards
from upweight.rewards.reward import RewardCall
from upweight.rewards.scorer import Scorer


def reward_call(*groups: list[str], **columns: list[Any]) -> RewardCall:
    """Groups of plain completions; columns have one value for each completion."""
    texts = [text for group in groups for text in group]
    group_S = [number for number, group in enumerate(groups) for _ in group]
    return RewardCall(
        prompts=[f"prompt {number}" for number in group_S],
        completions=texts,
        completion_ids=[[len(text)] for text in texts],
        columns=columns,
        group_S=group_S,
    )


def file_scorer(folder: Path, code: str, *names: str, workers: int = 1, timeout: float = 30.0) -> Scorer:
    """A scorer of functions in a file of the user's, whose module name is that of the folder."""
    module = f"rewards_{folder.name}".replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    return Scorer(load_rewards([f"{module}.{name}" for name in names], folder), workers=workers, timeout=timeout)
