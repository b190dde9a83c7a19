"""What can be said of a config's reward functions without running their files."""

from collections.abc import Iterator

from upweight.config import Config
from upweight.user_modules import is_path, problem_unrun


def reward_problems(config: Config) -> Iterator[str]:
    """Yield an error for each entry of `trl.reward_funcs` whose file is here and does not define its name."""
    for stage in config.stages or (config,):
        for path in filter(is_path, stage.rollout.reward_funcs):
            if (problem := problem_unrun(path, stage.folder)) is not None:
                yield f"trl.reward_funcs: {problem}"
