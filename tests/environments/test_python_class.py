"""A user's class as an environment."""

import asyncio

import pytest

from upweight.environments.episode import ToolCall, Turn
from upweight.environments.python_class import CallTimeout, PythonEnvironment
from upweight.errors import UserError

ROW = {"prompt": "hello", "prompt_ids": [1], "answer": "7"}


class Door:
    reward_names = ("opened", "speed")

    def reset(self, answer):
        self.answer, self.done = answer, False
        return "a door"

    def turn(self, key: str) -> str:
        """Turn a key.

        Args:
            key: which one.
        """
        self.done = key == self.answer
        return "it does not open"

    def get_reward(self):
        return {"opened": self.done, "speed": 0.5}


def said(text="", *calls):
    return Turn(text, text, [ToolCall(name, arguments) for name, arguments in calls], True)


def through(environment, *turns, row=ROW):
    """Opening, replies and outcome of an episode."""

    async def episode():
        one = environment.episode()
        opening = await one.open(row)
        replies = [await one.reply(turn) for turn in turns]
        outcome = await one.outcome()
        await one.close()
        return opening, replies, outcome

    return asyncio.run(episode())


def test_methods_are_tools_and_done_ends_the_episode():
    environment = PythonEnvironment(Door)
    opening, replies, outcome = through(environment, said("", ("turn", {"key": "3"})), said("", ("turn", {"key": "7"})))
    assert opening.messages == [{"role": "user", "content": "hello\n\na door"}]
    assert [tool["function"]["name"] for tool in opening.tools] == ["turn"]
    assert replies[0].messages == [{"role": "tool", "name": "turn", "content": "it does not open"}]
    assert replies[1].messages == []
    assert outcome.rewards == {"opened": 1.0, "speed": 0.5}
    assert environment.reward_names == ["opened", "speed"]


def test_without_a_class_there_are_the_tools_alone():
    def look(key: str) -> dict:
        """Look.

        Args:
            key: what.
        """
        return {"found": key}

    environment = PythonEnvironment(None, [look])
    opening, replies, outcome = through(environment, said("", ("look", {"key": "x"})), said("done"))
    assert opening.messages == [{"role": "user", "content": "hello"}]
    assert replies[0].messages[0]["content"] == '{"found": "x"}'
    assert not replies[1].messages
    assert outcome.rewards == {}
    assert environment.reward_names == []


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, []),
        ("more", [{"role": "user", "content": "more"}]),
        (("more", False), [{"role": "user", "content": "more"}]),
        (("last", True), []),
        ([{"role": "tool", "content": "t"}], [{"role": "tool", "content": "t"}]),
    ],
)
def test_step_answers_plain_turns(returned, told):
    class Steps:
        def reset(self):
            return [{"role": "user", "content": "begin"}]

        def step(self, text):
            assert text == "my words"
            return returned

    opening, (reply,), _ = through(PythonEnvironment(Steps), said("my words"))
    assert [message["content"] for message in opening.messages] == ["hello", "begin"]
    assert list(reply.messages) == told


def test_a_method_that_hangs_is_a_fault_of_the_environment():
    import time

    class Stuck(Door):
        def turn(self, key: str) -> str:
            """Turn a key.

            Args:
                key: which one.
            """
            time.sleep(30)
            return key

    with pytest.raises(CallTimeout):
        through(PythonEnvironment(Stuck, tool_timeout=0.1), said("", ("turn", {"key": "3"})))


def test_rows_choose_among_environments():
    environment = PythonEnvironment({"door": Door})
    opening, _, _ = through(environment, row={**ROW, "environment": "door"})
    assert opening.messages[0]["content"].endswith("a door")
    with pytest.raises(UserError, match="no environment 'window'; known: door"):
        through(environment, row={**ROW, "environment": "window"})
    with pytest.raises(UserError, match="a row has no column 'environment', which chooses among: door"):
        through(environment, row=ROW)


def test_classes_that_cannot_be_environments_are_named():
    class Undescribed:
        def reset(self):
            return None

        def look(self):
            return "a door"

    with pytest.raises(UserError, match="Undescribed cannot reply to the policy: give 'look' a docstring"):
        PythonEnvironment(Undescribed)
    with pytest.raises(UserError, match="has no method 'reset"):
        PythonEnvironment(int)

    def turn(key: str) -> str:
        """Turn.

        Args:
            key: which.
        """
        return key

    with pytest.raises(UserError, match="'turn' is also a method of Door"):
        PythonEnvironment(Door, [turn])
