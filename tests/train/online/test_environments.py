"""Runs that act, from their config."""

import json
import logging

import pytest
import torch

from light_rewards import letters
from made_rollouts import online_trainer
from made_runs import metrics_of, on_ranks, write_model, write_online
from made_vllm import FakeVllm
from upweight.config import load_config
from upweight.environments.python_class import PythonEnvironment
from upweight.errors import UserError
from upweight.methods import GDPO, GRPO
from upweight.rollout.episodes.loop import EpisodeLimits
from upweight.rollout.vllm.server import VllmServer
from upweight.train.distributed.ranks import join_ranks
from upweight.train.online.environments import EnvironmentSetup
from upweight.train.run import evaluate, train

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STOPS = list(range(0, 400, 3))
CLASS = '''
class Guess:
    """Says once more, and likes vowels."""

    reward_names = ("vowels", "turns")

    def reset(self, answer, **row):
        self.said = []
        return "think of " + answer

    def step(self, text):
        self.said.append(text)
        if answer_is_broken(text):
            raise RuntimeError("broken")
        return "again" if len(self.said) < 3 else None

    def get_reward(self):
        text = "".join(self.said)
        return {"vowels": sum(letter in "aeiou" for letter in text) / (len(text) + 1), "turns": len(self.said)}


def answer_is_broken(text):
    return len(text) % 5 == 4
'''


class Nag:
    """Answers three turns; breaks in some episodes."""

    def reset(self, answer, **row):
        self.turns, self.answer = 0, answer

    def step(self, text):
        self.turns += 1
        if self.answer == "be" and len(text) % 2:
            raise RuntimeError("broken")
        return f"and {self.answer}?" if self.turns < 3 else None

    def get_reward(self):
        return float(self.turns)


def acting_trainer(folder, *, kind=GRPO, factory=Nag, **options):
    policy = {"num_generations": 4, "max_completion_length": 90}
    env_setup = EnvironmentSetup(PythonEnvironment(factory, timeout=20.0), EpisodeLimits(max_turns=4))
    section = {"generation_args": {"stop_token_ids": STOPS}, **options.pop("section", {})}
    return online_trainer(folder, method=kind(**policy), rewards=[letters], section=section, env_setup=env_setup,
                          template=CHATML, **options)  # fmt: skip


def write_acting(folder, model, **keys):
    module = f"envs_{folder.name}".replace("-", "_")
    (folder / f"{module}.py").write_text(CLASS)
    keys = {
        "environment": {"type": "python", "class": f"{module}.Guess", "max_turns": 4},
        "trl": {"num_generations": 4, "max_completion_length": 150, "generation_kwargs": {"stop_token_ids": STOPS}},
        **keys,
    }
    return write_online(folder, model, **keys)


def test_a_config_with_an_environment_trains_evaluates_and_shows_conversations(tmp_path):
    model = write_model(tmp_path / "model")
    config = load_config(write_acting(tmp_path, model, val_set_size=2, eval_steps=2, rl="gdpo"))
    train(config)
    first, *_ = [row for row in metrics_of(tmp_path / "out") if "loss" in row]
    assert {"rewards/vowels/mean", "rewards/turns/mean", "environment/turns_mean", "environment/masked"} <= set(first)
    rows = [json.loads(line) for line in (tmp_path / "out/completions/step_00001.jsonl").read_text().splitlines()]
    whole = [row for row in rows if "failure" not in row]
    assert whole
    assert [message["role"] for message in whole[0]["completion"]] == ["assistant", "user"] * 2 + ["assistant"]
    assert whole[0]["episode"]["turns"] == 3
    found = evaluate(config)
    assert found["eval_environment/turns_mean"] > 1


def test_keys_that_cannot_work_are_told_of_before_the_model_is_loaded(tmp_path):
    (tmp_path / "empty_envs.py").write_text("class Nothing:\n    pass\ndef tool(x):\n    return x\n")
    model = tmp_path / "model"
    write_model(model)
    for keys, words in (
        (
            {"environment": {"type": "python", "class": "empty_envs.Nothing"}},
            "environment.class: Nothing has no method",
        ),
        (
            {"environment": {"type": "python", "class": "empty_envs.Nobody"}},
            "environment.class: .* has no function 'Nobody'",
        ),
        ({"tools": ["empty_envs.tool"]}, "tools: 'tool' cannot be described"),
    ):
        with pytest.raises(UserError, match=words):
            train(load_config(write_online(tmp_path, model, **keys)))


def test_masked_samples_leave_the_others_as_they_were(tmp_path):
    """The advantages of what is left equal those of a group that never had the failed ones."""
    for kind in (GRPO, GDPO):
        trainer = acting_trainer(tmp_path, kind=kind, rows=5, wanted=20, step=20)
        rollout = trainer.rollouts.producer.produce(0)
        trainer.rollouts.close()
        failed_S = torch.tensor([one.failure is not None for group in rollout.groups for one in group.completions])
        assert 0 < int(failed_S.sum()) < len(failed_S)
        assert rollout.metrics["environment/masked"] == int(failed_S.sum())
        rewards_SR = torch.cat([group.rewards_SR for group in rollout.groups])
        advantage_S = torch.cat([group.advantage_S for group in rollout.groups])
        assert rewards_SR[failed_S].isnan().all()
        assert not rewards_SR[~failed_S].isnan().any()
        group_S = torch.arange(5).repeat_interleave(4)[~failed_S]
        assert torch.equal(advantage_S[~failed_S], trainer.method.advantages(rewards_SR[~failed_S], group_S))
        assert (advantage_S[failed_S] == 0).all()


def test_a_step_with_masked_samples_trains_and_its_log_probs_are_kept(tmp_path):
    trainer = acting_trainer(tmp_path, rows=5, wanted=20, step=4, iterations=2, max_steps=6, save_strategy="steps",
                             save_steps=3)  # fmt: skip
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 6
    assert all(torch.isfinite(torch.tensor(losses)))
    later = acting_trainer(tmp_path, rows=5, wanted=20, step=4, iterations=2, max_steps=6, save_strategy="no")
    later.rollouts.restore(tmp_path / "checkpoint-3")
    later.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    again = [row["loss"] for row in later.state.log_history if "loss" in row]
    assert again == pytest.approx(losses, abs=1e-6)


def test_an_environment_that_always_fails_stops_the_run(tmp_path):
    class Broken(Nag):
        def reset(self, **row):
            raise RuntimeError("no server")

    trainer = acting_trainer(tmp_path, factory=Broken)
    with pytest.raises(UserError, match="failed in all 8 episodes of a rollout: open: RuntimeError: no server"):
        trainer.rollouts.producer.produce(0)
    trainer.rollouts.close()


def test_a_rollout_in_which_all_fail_is_played_once_more(tmp_path):
    class Restarted(Nag):
        fails = 8

        def reset(self, **row):
            if Restarted.fails:
                Restarted.fails -= 1
                raise RuntimeError("no server")
            return super().reset(**row)

    trainer = acting_trainer(tmp_path, factory=Restarted)
    rollout = trainer.rollouts.producer.produce(0)
    assert rollout.metrics["rollout/played_again"] == 1
    assert all(one.failure is None for group in rollout.groups for one in group.completions)
    trainer.rollouts.close()


def written(folder, world):
    join_ranks(60)
    trainer = acting_trainer(folder, rows=5, wanted=8 // world, step=8 // world, world=world)
    rollout = trainer.rollouts.producer.produce(0)
    trainer.rollouts.close()
    (folder / f"tokens-{world}.json").write_text(
        json.dumps([one.ids for group in rollout.groups for one in group.completions])
    )


@pytest.mark.slow
def test_two_ranks_play_what_one_plays(tmp_path):
    on_ranks(written, 1, tmp_path, 1)
    on_ranks(written, 2, tmp_path, 2)
    assert json.loads((tmp_path / "tokens-1.json").read_text()) == json.loads((tmp_path / "tokens-2.json").read_text())


def test_turns_go_to_a_server_as_they_come(tmp_path, monkeypatch):
    from upweight.rollout.vllm import client as vllm_client

    monkeypatch.setattr(vllm_client, "BACKOFF_SECONDS", (0.01,))
    model_folder = write_model(tmp_path / "model")
    fake = FakeVllm(model_folder, longest=512)
    trainer = acting_trainer(tmp_path, rows=2, wanted=8)
    trainer.model.config.name_or_path = trainer.model.name_or_path = str(model_folder)
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    server = VllmServer(
        fake.url, policy, trainer.processing_class, dtype=torch.float32, folder=tmp_path / "vllm", timeout=5.0
    )
    server.sync(3)
    fake.requests.clear()
    trainer.rollouts.producer.completion_source.generator = server
    rollout = trainer.rollouts.producer.produce(3)
    asked = fake.asked("/v1/completions")
    assert sorted({body["n"] for body in asked}) == [1, 4]
    assert sum(body["n"] == 4 for body in asked) == 2
    for group in rollout.groups:
        for one in group.completions:
            if one.failure is None:
                assert set(one.versions) == {3}
                assert len(one.messages) == 5
    logging.getLogger().debug("%d requests", len(asked))
    trainer.rollouts.close()
    fake.close()
