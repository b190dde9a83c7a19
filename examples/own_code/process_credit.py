"""Credit by step from a process reward model: each step earns what it adds to the probability of being right."""

import os
from itertools import pairwise

from upweight.config.sections.model import ModelSection
from upweight.inference.score import load_score_model

MODEL = os.environ.get("PROCESS_REWARD_MODEL", "outputs/process_reward")


class StepGains:
    """Scores of steps, less that of the step before: their sum does not grow with the number of steps."""

    __name__ = "step_gains"

    def __init__(self):
        self.model = load_score_model(ModelSection(base_model=MODEL))

    def __call__(self, prompts, completions):
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        asked = [one if isinstance(one, str) else one[-1]["content"] for one in prompts]
        rewards = []
        for prompt, text in zip(asked, texts, strict=True):
            ends = [end for _, end in self.model.steps(text)]  # characters up to the end of each step
            scores = self.model([{"prompt": prompt, "completion": text}])[0] if ends else []
            gains = [now - before for before, now in pairwise([0.5, *scores])]
            rewards.append({"characters": list(zip(ends, gains, strict=True))})
        return rewards
