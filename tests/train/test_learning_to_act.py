"""It learns to act: a tiny model looks a thing up and answers with what it found."""

import itertools
import random

import pytest
import torch
from datasets import Dataset

from made_rollouts import chat_model, online_trainer
from made_tokenizers import byte_tokenizer
from upweight.environments.python_class import PythonEnvironment
from upweight.methods import GDPO
from upweight.rollout.episodes.loop import EpisodeLimits
from upweight.train.online.environments import EnvironmentSetup

KEYS, SECRETS = "abcd", "wxyz"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALL_BEGINS, CALL_ENDS = '{"name": "look", "arguments": {"key": "', '"}}'


class Library:
    """Knows the secret of one key; right is who says it."""

    reward_names = ("found", "answered")

    def reset(self, wanted, secret, **row):
        self.wanted, self.secret, self.found, self.said = wanted, secret, False, ""

    def look(self, key: str) -> str:
        """Look a key up.

        Args:
            key: a letter.
        """
        self.found = key == self.wanted
        return self.secret if self.found else "-"

    def step(self, text):
        self.said = text

    def get_reward(self):
        return {"found": self.found, "answered": self.found and self.said == self.secret}


def made_tokenizer():
    """A tokenizer for which a call is three tokens."""
    tokenizer = byte_tokenizer("chatml", TEMPLATE)
    tokenizer.add_tokens([CALL_BEGINS, CALL_ENDS])
    return tokenizer


def taught_to_try(tokenizer, steps=100):
    """A model that can repeat a letter it was told, but asked to find one calls and answers by chance."""
    model = chat_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random.seed(0)

    def row(*parts):
        """Token ids of texts end to end, and labels where the model wrote: every second text."""
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in parts]
        labels = [part if own % 2 else [-100] * len(part) for own, part in enumerate(ids)]
        return list(itertools.chain(*ids)), list(itertools.chain(*labels))

    def asked(text):
        return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    def trial(verb, *, repeats):
        key, secret = random.choice(KEYS), random.choice(SECRETS)
        told = f"\n<|im_start|>tool\n{secret}<|im_end|>\n<|im_start|>assistant\n"
        call = f"{CALL_BEGINS}{key}{CALL_ENDS}<|im_end|>"
        said = secret if repeats else random.choice(SECRETS)
        return row(asked(f"{verb} {random.choice(KEYS)}"), call, told, f"{said}<|im_end|>")

    for _ in range(steps):
        loss = torch.zeros(())
        letters = random.choices(KEYS + SECRETS, k=16)
        repeated = [row(asked(f"say {letter}"), f"{letter}<|im_end|>") for letter in letters]
        tried = [trial("find", repeats=False) for _ in range(16)]
        for rows in (tried, repeated, [trial("read", repeats=True) for _ in range(16)]):
            given, labels = (torch.tensor([one[part] for one in rows]) for part in range(2))
            logits = model(input_ids=given).logits[:, :-1]
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.slow
def test_from_chance_to_looking_up_and_answering(tmp_path):
    tokenizer = made_tokenizer()
    rows = [
        {"prompt": [{"role": "user", "content": f"find {key}"}], "prompt_ids": [1], "wanted": key, "secret": secret}
        for key, secret in itertools.product(KEYS, SECRETS)
    ]
    env_setup = EnvironmentSetup(
        PythonEnvironment(Library, timeout=20.0), EpisodeLimits(max_turns=3), tool_format="json"
    )
    policy = {"num_generations": 8, "max_completion_length": 32, "entropy_coef": 0.02}
    trainer = online_trainer(
        tmp_path, method=GDPO(**policy), rewards=[], model=taught_to_try(tokenizer), tokenizer=tokenizer,
        data=Dataset.from_list(rows), env_setup=env_setup, step=128, max_steps=80,
        optim="adamw_torch", learning_rate=3e-3, max_grad_norm=1.0,
    )  # fmt: skip
    trainer.train()
    trainer.rollouts.close()
    curve = [row["rewards/answered/mean"] for row in trainer.state.log_history if "rewards/answered/mean" in row]
    assert sum(curve[:3]) / 3 < 0.15
    assert sum(curve[-10:]) / 10 > 0.8
    assert trainer.state.log_history[-2]["environment/turns_mean"] > 1.9
