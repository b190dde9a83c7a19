"""Environments of scripts written for TRL: who gives prompts, tools and rewards."""

import pytest
from datasets import Dataset

from light_rewards import message_length
from parity_script import TEMPLATE, made_tokenizer, said, write_model
from upweight import GRPOConfig, GRPOTrainer
from upweight.errors import UserError

COMMON = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4,
          "save_strategy": "no", "learning_rate": 1e-2, "max_steps": 2, "num_generations": 4,
          "max_completion_length": 4}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model", made_tokenizer(TEMPLATE, bos=False), trainer="DPO")
    return tmp_path


def grpo(folder, factory, rows=None, reward_funcs=None, eval_rows=None, **config):
    args = GRPOConfig(output_dir=str(folder / "out"), **{**COMMON, **config})
    tokenizer = made_tokenizer(TEMPLATE, bos=False)
    return GRPOTrainer(
        str(folder / "model"), reward_funcs, args, rows, eval_rows, tokenizer, environment_factory=factory
    )


def logged(trainer, name):
    trainer.train()
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry]


class Asking:
    """Has its data itself, and no tools: one answer is the episode."""

    def reset(self, **row):
        self.columns = row
        self.asked = row.get("number", 7)
        return f"Say {self.asked}."

    def get_reward(self):
        return float(self.asked)


class Adding:
    """Has a tool, and leaves the reward to others."""

    def reset(self, **row):
        self.total = 2

    def add(self, number: int) -> int:
        """Add a number.

        Args:
            number: how much.
        """
        self.total += number
        return self.total


@pytest.mark.parametrize(("rows", "reward"), [(None, 7.0), ([{"number": 3}] * 2, 3.0)])
def test_an_environment_may_own_the_prompts(rows, reward, folder):
    assert logged(grpo(folder, Asking, rows), "reward") == [reward] * 2


def test_rows_may_only_choose_the_environment(folder):
    rows = Dataset.from_list([{"environment": "ask"}, {"environment": "add"}] * 4)
    trainer = grpo(folder, {"ask": Asking, "add": Adding}, rows, [message_length], eval_rows=rows.select([0]))
    assert trainer.reward_func_names == ["message_length", "reward_env"]
    assert trainer.evaluate()["eval_rewards/reward_env/mean"] == 7.0
    assert all(value > 0 for value in logged(trainer, "rewards/message_length/mean"))


def test_rewards_may_read_the_objects_of_episodes(folder):
    seen = []

    def of_objects(environments, **kwargs):
        seen.append(environments)
        return [float(getattr(one, "total", 0)) for one in environments]

    rows = [{"environment": "ask"}, {"environment": "add"}]
    trainer = grpo(folder, {"ask": Asking, "add": Adding}, rows, [of_objects], per_device_train_batch_size=8)
    assert logged(trainer, "rewards/of_objects/mean") == [1.0, 1.0]
    assert sorted(type(one).__name__ for one in seen[0]) == ["Adding"] * 4 + ["Asking"] * 4
    assert len({id(one) for one in seen[0]}) == 8
    assert all("environment" not in one.columns for one in seen[0] if isinstance(one, Asking))  # it only chooses
    assert not any(group.environments for group in trainer.rollouts.producer.evaluate(trainer.train_rows, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"factory": Asking, "max_steps": -1}, "max_steps: without train_dataset"),
        ({"factory": {"ask": Asking}}, "train_dataset: several environments need rows"),
        ({"factory": Adding}, "reward_funcs: empty"),
        (
            {"factory": Asking, "reward_funcs": [message_length], "reward_weights": [1.0]},
            r"2 rewards \(.*length, reward_env\)",
        ),
        ({"factory": {"ask": Asking}, "rows": [{"environment": "b"}]}, "no environment 'b'; known: ask"),
    ],
)
def test_what_an_environment_cannot_do_without_is_named(given, words, folder):
    with pytest.raises(ValueError, match=words):
        grpo(folder, **given).train()


def test_objects_of_episodes_need_a_class(folder):
    def of_objects(environments, **kwargs):
        return [0.0] * len(environments)

    args = GRPOConfig(output_dir=str(folder / "out"), **COMMON)
    with pytest.raises(UserError, match="needs the column 'environments'"):
        GRPOTrainer(str(folder / "model"), of_objects, args, [{"prompt": said("user", "Why?")}] * 4)
