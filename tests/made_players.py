"""Episode runners around scripted policies and small environments, for tests of rollouts that act."""

import torch

from made_tokenizers import byte_tokenizer
from upweight.data.tokenize.messages import Conversation
from upweight.data.tokenize.templates import ChatTemplate, template_source
from upweight.environments.python_class import PythonEnvironment
from upweight.models.tokenizer import eos_token_ids
from upweight.rollout.episodes.loop import EpisodeLimits, EpisodeSetup
from upweight.rollout.episodes.runner import EpisodeRunner
from upweight.types import Completion, Group, Sampling


def tokenizer_for(name="chatml", family="chatml"):
    """A tokenizer with one of the templates that ship."""
    tokenizer = byte_tokenizer(family)
    tokenizer.chat_template = template_source(name, None, tokenizer, None)
    return tokenizer


class Script:
    """A backend that writes given texts, turn by turn; log-probs are those of a model where there is one.

    `texts[turn]` is a text, or what makes one of the seed; it ends in the end token unless `ends` says otherwise.
    """

    def __init__(self, tokenizer, texts, model=None, ends=True):
        self.tokenizer, self.texts, self.model, self.ends = tokenizer, texts, model, ends
        self.prompts, self.calls, self.seeds = [], [], []

    def generate(self, prompts, count, sampling, done=None):
        self.calls.append((len(prompts), count))
        seeds = iter(sampling.seeds)
        return [[self.one(prompt, next(seeds), sampling) for _ in range(count)] for prompt in prompts]

    def require_room(self, prompt, new):
        pass

    def one(self, prompt, seed, sampling):
        self.prompts.append(list(prompt))
        self.seeds.append(seed)
        turn = self.tokenizer.decode(prompt).count("<|im_start|>assistant") - 1
        text = self.texts[min(turn, len(self.texts) - 1)]
        text = text(seed) if callable(text) else text
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        ids = [*ids, self.tokenizer.eos_token_id] if self.ends else ids
        finished, ids = len(ids) <= sampling.max_new_tokens, ids[: sampling.max_new_tokens]
        return Completion(ids, self.logps(prompt, ids), [3] * len(ids), finished)

    @torch.no_grad()
    def logps(self, prompt, ids):
        if self.model is None:
            return [-1.0] * len(ids)
        logits = self.model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()

    def version(self):
        return 3


class Talk:
    """Answers each plain turn by the next of its lines."""

    lines = ("go on", "and then?")

    def reset(self, **row):
        self.left = list(self.lines)

    def step(self, text):
        return self.left.pop(0) if self.left else None

    def get_reward(self):
        return 1.0


def episode_runner(
    generator, *, factory=None, functions=(), tokenizer=None, limits=None, form="hermes", limit=1.0, **options
):
    tokenizer = tokenizer or generator.tokenizer
    environment = PythonEnvironment(factory, functions, timeout=limit, tool_timeout=limit)
    ends = eos_token_ids(None, tokenizer)
    limits = limits or EpisodeLimits(max_turns=5, call_seconds=5 * limit)
    template = ChatTemplate(tokenizer, None, {})
    return EpisodeRunner(EpisodeSetup(environment, template, ends, limits, tool_format=form, **options), generator)


def groups_of(made, rows):
    """Groups as the producer makes them: message prompts as the template writes them."""
    groups = []
    for number, row in enumerate(rows):
        prompt = row["prompt"]
        text = prompt if isinstance(prompt, str) else made.setup.template.prompt(Conversation(list(prompt)))
        ids = made.setup.tokenizer.encode(text, add_special_tokens=False)
        groups.append(Group(number, {"prompt_ids": ids, **row}, ids))
    return groups


def run_episodes(made, rows, *, count=2, tokens=200, seed=7, first=0, done=None):
    """Groups filled by an episode runner, which is then closed."""
    groups = groups_of(made, rows)
    try:
        made(groups, count, Sampling(tokens, seed=seed, first=first), done)
    finally:
        made.close()
    return groups
