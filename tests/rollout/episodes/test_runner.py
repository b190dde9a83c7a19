"""Episodes of scripted and sampled policies."""

import asyncio
import sys
import threading
import time

import numpy as np
import pytest
import torch

from light_rewards import message_length
from made_players import Script, Talk, episode_runner, run_episodes, tokenizer_for
from made_rollouts import chat_model, online_trainer
from tiny_models import plain_statistics
from upweight.data.tokenize.messages import Conversation
from upweight.environments.python_class import PythonEnvironment
from upweight.errors import UserError
from upweight.methods import GRPO
from upweight.rollout.episodes.loop import EpisodeLimits
from upweight.rollout.units import units_of_groups
from upweight.train.online.environments import EnvironmentSetup

ROWS = [{"prompt": "what?", "answer": "7"}, {"prompt": [{"role": "user", "content": "and?"}], "answer": "8"}]
CALL = '<tool_call>{"name": "look", "arguments": {"key": "x"}}</tool_call>'
CHATML = tokenizer_for().chat_template


def look(key: str) -> str:
    """Look a thing up.

    Args:
        key: what to find.
    """
    return f"{key} is 7"


def test_a_conversation_is_one_stream_of_exact_tokens():
    tokenizer = tokenizer_for()
    script = Script(tokenizer, ["first answer", "second", "third"])
    made = episode_runner(script, factory=Talk)
    groups = run_episodes(made, ROWS, count=3)
    for group, row in zip(groups, ROWS, strict=True):
        opening = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        assert len(group.completions) == 3
        for one in group.completions:
            assert [m["role"] for m in one.messages] == ["assistant", "user", "assistant", "user", "assistant"]
            whole = made.setup.template.render(Conversation([*opening, *map(dict, one.messages)]))
            assert tokenizer.decode([*group.prompt_ids, *one.ids]) + "\n" == whole
            own = tokenizer.decode([t for t, mine in zip(one.ids, one.sampled, strict=True) if mine])
            assert own == "first answer<|im_end|>second<|im_end|>third<|im_end|>"
            assert one.finished
            assert one.versions == [3] * len(one.ids)
            assert [logp for logp, mine in zip(one.logps, one.sampled, strict=True) if not mine].count(
                0.0
            ) == one.sampled.count(False)
        assert [one["turns"] for one in group.extras["episode"]] == [3, 3, 3]
        assert [one["rewards"] for one in group.extras["episode"]] == [{"reward": 1.0}] * 3


def test_first_turns_of_a_group_are_sampled_together_and_every_prompt_extends_the_last():
    script = Script(tokenizer_for(), ["one", "two", "three"])
    run_episodes(episode_runner(script, factory=Talk), ROWS, count=3)
    assert (2, 3) in script.calls or script.calls[:2] == [(1, 3), (1, 3)]
    for group in range(2):
        lengths = sorted({len(p) for p in script.prompts if ("what?" in script.tokenizer.decode(p)) == (group == 0)})
        assert len(lengths) == 3


def test_tools_are_called_and_their_results_shown():
    script = Script(tokenizer_for("qwen_25"), [f"let me see {CALL}", "it is 7"])
    (group,) = run_episodes(episode_runner(script, functions=[look]), ROWS[:1])
    said = group.completions[0].messages
    call = {"type": "function", "function": {"name": "look", "arguments": {"key": "x"}}}
    assert said[0] == {"role": "assistant", "content": "let me see", "tool_calls": [call]}
    assert said[1] == {"role": "tool", "name": "look", "content": "x is 7"}
    assert said[2]["content"] == "it is 7"
    text = script.tokenizer.decode(script.prompts[-1])
    assert '"name": "look"' in text  # the schema
    assert f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\nx is 7\n</tool_response>" in text
    assert group.extras["episode"][0]["tool_calls"] == 1


def raises(key: str) -> str:
    """Fail.

    Args:
        key: anything.
    """
    raise ValueError("no such key")


def hangs(key: str) -> str:
    """Hang.

    Args:
        key: anything.
    """
    time.sleep(60)
    return key


async def blocks(key: str) -> str:
    """Block the loop.

    Args:
        key: anything.
    """
    time.sleep(1.5)
    return key


async def leaves(key: str) -> str:
    """End the program.

    Args:
        key: anything.
    """
    sys.exit(f"no {key}")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ('<tool_call>{"name": "look", "arguments": {"key": </tool_call>', "the call is no JSON"),
        ('<tool_call>{"name": "look", "arguments": {"kee": "x"}}</tool_call>', "look: missing a required argument"),
        ('<tool_call>{"name": "lok", "arguments": {}}</tool_call>', "there is no tool 'lok'. Did you mean 'look'?"),
        (CALL.replace("look", "raises"), "ValueError: no such key"),
        (CALL.replace("look", "leaves"), "RuntimeError: the code called sys.exit('no x') (test_runner.py, line "),
        (CALL.replace("look", "hangs"), "it took longer than 0.2 seconds"),
        (CALL.replace("look", "blocks"), "it took longer than 0.2 seconds"),
    ],
    ids=["malformed", "wrong arguments", "unknown", "raises", "leaves", "hangs", "blocks its loop"],
)  # fmt: skip
def test_what_goes_wrong_with_a_call_is_told_to_the_policy(call, error):
    script = Script(tokenizer_for("qwen_25"), [call, "I give up"])
    began = time.monotonic()
    (group,) = run_episodes(
        episode_runner(script, functions=[look, raises, leaves, hangs, blocks], limit=0.2), ROWS[:1], tokens=500
    )
    assert time.monotonic() - began < 30
    for one in group.completions:
        assert one.failure is None
        assert one.messages[1]["role"] == "tool"
        assert error in one.messages[1]["content"]
        assert one.messages[2]["content"] == "I give up"
    assert [one["tool_failures"] for one in group.extras["episode"]] == [1, 1]


class Faulty(Talk):
    """Breaks where the row says so, in every second episode."""

    made = 0
    lock = threading.Lock()

    def reset(self, answer=None, fault=None, **row):
        super().reset()
        with self.lock:
            Faulty.made += 1
            self.fault = fault if Faulty.made % 2 else None
        self.break_at("reset")

    def break_at(self, place):
        if self.fault == f"raise in {place}":
            raise RuntimeError(f"broken {place}")
        if self.fault == f"hang in {place}":
            time.sleep(60)
        if self.fault == f"exit in {place}":
            sys.exit()

    def step(self, text):
        self.break_at("step")
        return super().step(text)

    def get_reward(self):
        self.break_at("get_reward")
        return 1.0

    def close(self):
        if self.fault == "raise in close":
            raise RuntimeError("broken close")


@pytest.mark.parametrize("how", ["raise", "hang", "exit"])
@pytest.mark.parametrize("place", ["reset", "step", "get_reward"])
def test_a_broken_environment_masks_its_sample_and_no_other(how, place):
    script = Script(tokenizer_for(), ["first answer", "second", "third"])
    rows = [{**ROWS[0], "fault": f"{how} in {place}"}]
    began = time.monotonic()
    (group,) = run_episodes(episode_runner(script, factory=Faulty, limit=0.3), rows, count=4)
    assert time.monotonic() - began < 30
    failed = [one for one in group.completions if one.failure is not None]
    assert len(failed) == 2
    reasons = {"raise": f"broken {place}", "hang": "took longer than 0.3 seconds", "exit": "the code called sys.exit()"}
    assert all(reasons[how] in one.failure and one.ids == [] for one in failed)
    well = [one for one in group.completions if one.failure is None]
    assert all(one.finished and len(one.messages) == 5 for one in well)


def test_an_episode_that_does_not_close_well_is_kept():
    script = Script(tokenizer_for(), ["a", "b", "c"])
    (group,) = run_episodes(episode_runner(script, factory=Faulty), [{**ROWS[0], "fault": "raise in close"}])
    assert all(one.failure is None for one in group.completions)


def test_all_its_calls_together_are_bounded():
    class Slow(Talk):
        lines = ("on",) * 20

        def step(self, text):
            time.sleep(0.15)
            return super().step(text)

    script = Script(tokenizer_for(), ["a"])
    limits = EpisodeLimits(max_turns=20, call_seconds=5.0, episode_seconds=0.4)
    (group,) = run_episodes(episode_runner(script, factory=Slow, limits=limits), ROWS[:1], tokens=2000)
    assert all("took longer than" in one.failure for one in group.completions)


def test_turns_and_tokens_are_bounded():
    script = Script(tokenizer_for(), ["answer"])
    (group,) = run_episodes(episode_runner(script, factory=Talk, limits=EpisodeLimits(max_turns=2)), ROWS[:1])
    assert [one["turns"] for one in group.extras["episode"]] == [2, 2]
    assert not any(one.finished for one in group.completions)
    assert all(one.sampled[-1] for one in group.completions)

    long = Script(tokenizer_for(), ["answer " * 5])
    for tokens in range(3, 60, 7):
        (group,) = run_episodes(episode_runner(long, factory=Talk), ROWS[:1], tokens=tokens)
        assert all(0 < len(one.ids) <= tokens and one.sampled[-1] for one in group.completions)


def test_a_prompt_that_leaves_no_room_is_left_out():
    tokenizer = tokenizer_for()
    script = Script(tokenizer, ["a"])
    script.require_room = lambda prompt, new: (_ for _ in ()).throw(UserError("too long")) if prompt > 60 else None
    groups = run_episodes(episode_runner(script, factory=Talk), [ROWS[0], {"prompt": "long " * 100}])
    assert [one.failure for group in groups for one in group.completions] == [None, None, "too long", "too long"]


def test_openings_that_differ_share_what_they_share():
    class Own(Talk):
        def reset(self, **row):
            super().reset()
            return f"number {id(self)}"

    script = Script(tokenizer_for(), ["a", "b", "c"])
    (group,) = run_episodes(episode_runner(script, factory=Own), ROWS[:1], count=3)
    texts = [script.tokenizer.decode([*group.prompt_ids, *one.ids]) for one in group.completions]
    assert len(set(texts)) == 3
    assert all(text.startswith("<|im_start|>user\nwhat?\n\nnumber ") for text in texts)
    assert len({tuple(one.sampled[:3]) for one in group.completions}) == 1
    assert not group.completions[0].sampled[0]


def test_seeds_belong_to_group_place_and_turn():
    def seeds(rows, **options):
        script = Script(tokenizer_for(), [lambda seed: f"n{seed % 97}"])
        return [
            one.ids
            for group in run_episodes(episode_runner(script, factory=Talk), rows, **options)
            for one in group.completions
        ]

    whole = seeds(ROWS * 2, count=3)
    assert len(set(map(tuple, whole))) == len(whole)
    assert whole == seeds(ROWS * 2, count=3)
    assert whole == seeds(ROWS * 2, count=3)[:6] + seeds(ROWS, count=3, first=2)
    assert whole != seeds(ROWS * 2, count=3, seed=8)


def test_groups_are_told_of_as_they_end():
    ended = []
    script = Script(tokenizer_for(), ["a", "b", "c"])
    run_episodes(episode_runner(script, factory=Talk), ROWS * 3, done=ended.append)
    assert sorted(ended) == list(range(6))


def test_a_failing_backend_stops_the_rollout():
    class Dead(Script):
        def generate(self, prompts, count, sampling, done=None):
            raise UserError("the sampler is gone")

    with pytest.raises(UserError, match="the sampler is gone"):
        run_episodes(episode_runner(Dead(tokenizer_for(), ["a"]), factory=Talk), ROWS)


def test_a_class_that_breaks_the_contract_stops_the_rollout():
    class Wrong(Talk):
        def get_reward(self):
            return {"unheard of": 1.0}

    with pytest.raises(UserError, match="not in the class's `reward_names`"):
        run_episodes(episode_runner(Script(tokenizer_for(), ["a"]), factory=Wrong), ROWS)


def test_environments_answer_while_others_are_sampled():
    """A slow episode does not keep quick ones from going on."""

    quick_is_over = threading.Event()

    class OneSlow(Talk):
        def step(self, text):
            if self.answer == "slow":
                assert quick_is_over.wait(20)
            return super().step(text)

        def reset(self, answer, **row):
            super().reset()
            self.answer = answer

        def get_reward(self):
            quick_is_over.set()
            return 1.0

    script = Script(tokenizer_for(), ["a", "b", "c"])
    order = []
    rows = [{"prompt": "p", "answer": "slow"}, {"prompt": "q", "answer": "quick"}]
    run_episodes(episode_runner(script, factory=OneSlow, limit=20.0), rows, count=1, done=order.append)
    assert order == [1, 0]


def acting(factory, **bounds):
    environment = PythonEnvironment(factory, timeout=5.0)
    return EnvironmentSetup(environment, EpisodeLimits(**{"max_turns": 5, "call_seconds": 5.0, **bounds}))


def sampled_rollout(tmp_path, *, adapter=False, model=None, template=CHATML, factory=Talk, **options):
    """A rollout of a tiny random model; a third of the tokens end a turn."""
    stops = list(range(0, 400, 3))
    section = {"generation_args": {"stop_token_ids": stops}}
    policy = {"num_generations": 4, "max_completion_length": 120}
    trainer = online_trainer(tmp_path, method=GRPO(**policy), rewards=[message_length], section=section, model=model,
                             adapter=adapter, template=template, env_setup=acting(factory), **options)  # fmt: skip
    producer = trainer.rollouts.producer
    rollout = producer.produce(0)
    trainer.rollouts.close()
    return trainer, rollout


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_the_training_forward_says_of_each_token_what_the_sampler_said(tmp_path, adapter):
    trainer, rollout = sampled_rollout(tmp_path, adapter=adapter)
    completions = [one for group in rollout.groups for one in group.completions]
    assert {len(one.messages) for one in completions} == {5}
    assert rollout.metrics["environment/turns_mean"] == 3
    units = units_of_groups(rollout.groups, mask_truncated=False, sampler_logps=True)
    said = np.concatenate([sample.sampler_logps for unit in units for sample in unit.samples])
    with torch.no_grad():
        plain = plain_statistics(trainer.model, units)["logps_T"].numpy()
    forward = np.concatenate([part for parts in trainer.runner.logps(trainer.model, units) for part in parts])
    assert len(said) == sum(sum(one.sampled) for one in completions) > 30
    assert np.abs(plain - said).max() < 1e-4
    assert np.abs(forward - said).max() < 1e-4


def test_split_conversations_are_trained_on_as_the_policy_saw_them():
    tokenizer = tokenizer_for("qwen3")
    model = chat_model(tokenizer)
    texts = ["<think>\nhm\n</think>\n\nfirst", "<think>\nwell\n</think>\n\nsecond", "third"]
    script = Script(tokenizer, texts, model)
    (group,) = run_episodes(episode_runner(script, factory=Talk), ROWS[:1])
    group.advantage_S = torch.tensor([1.0, -1.0])
    assert [len(one.earlier) for one in group.completions] == [2, 2]
    assert [one["splits"] for one in group.extras["episode"]] == [2, 2]
    units = units_of_groups([group], mask_truncated=False, sampler_logps=True)
    assert [len(unit.samples) for unit in units] == [3, 3]
    assert {sample.advantage for sample in units[0].samples} == {1.0}
    said = np.concatenate([sample.sampler_logps for unit in units for sample in unit.samples])
    with torch.no_grad():
        assert np.abs(plain_statistics(model, units)["logps_T"].numpy() - said).max() < 1e-4
    written = [tokenizer.decode(sample.ids[sample.loss_mask]) for sample in units[0].samples]
    assert written == [f"{text}<|im_end|>" for text in (texts[2], texts[0], texts[1])]


def test_a_rollout_does_not_depend_on_ranks_or_on_who_is_ready_when(tmp_path):
    class Late(Talk):
        def step(self, text):
            time.sleep(0.02 * (len(text) % 3))
            return super().step(text)

    def tokens(rollout):
        return [one.ids for group in rollout.groups for one in group.completions]

    _, rollout = sampled_rollout(tmp_path)
    _, again = sampled_rollout(tmp_path, factory=Late)
    assert tokens(rollout) == tokens(again)


def test_async_environments_run_on_a_loop_of_their_own():
    class Async(Talk):
        async def reset(self, **row):
            self.left = list(self.lines)
            self.loop = asyncio.get_running_loop()

        async def step(self, text):
            assert asyncio.get_running_loop() is self.loop
            await asyncio.sleep(0)
            return self.left.pop(0) if self.left else None

    (group,) = run_episodes(episode_runner(Script(tokenizer_for(), ["a", "b", "c"]), factory=Async), ROWS[:1])
    assert all(one.finished and len(one.messages) == 5 for one in group.completions)


def test_an_environment_that_could_not_start_is_started_again_by_the_next_call():
    made = episode_runner(Script(tokenizer_for(), ["an answer"]), factory=Talk)
    environment, starts = made.setup.environment, []

    async def start():
        starts.append(len(starts))
        if len(starts) == 1:
            raise UserError("no answer yet")

    environment.start = start
    with pytest.raises(UserError, match="no answer yet"):
        run_episodes(made, ROWS, count=1)
    groups = run_episodes(made, ROWS, count=1)
    made.close()
    assert starts == [0, 1]
    assert all(one.failure is None for group in groups for one in group.completions)
