import functools
import math

import pytest

from made_rewards import reward_call
from upweight.errors import UserError
from upweight.rewards.load import as_rewards, load_rewards
from upweight.rewards.scorer import Scorer


def write(folder, name, code):
    (folder / f"{name}.py").write_text(code)


def test_functions_by_dotted_path_run_in_workers(tmp_path):
    write(
        tmp_path,
        "load_plain",
        "def one(completions):\n    return [1.0]\nasync def two(completions):\n    return [2.0]\n",
    )
    one, two = load_rewards(["load_plain.one", "load_plain.two"], tmp_path)
    assert (one.name, one.runs, two.runs) == ("one", "worker", "async")
    assert one.source == ("load_plain", "one", str((tmp_path / "load_plain.py").resolve()))


def test_a_file_with_the_name_of_a_module_that_is_taken(tmp_path):
    write(tmp_path, "json", "def mine(completions):\n    return [5.0] * len(completions)\n")
    with Scorer(load_rewards(["json.mine"], tmp_path)) as scorer:
        assert scorer.score(reward_call(["a"])).rewards_SR.item() == 5.0


def test_functions_of_a_package_in_a_folder(tmp_path):
    package = tmp_path / "load_package"
    package.mkdir()
    (package / "__init__.py").write_text("from load_package.inner import two\n")
    (package / "inner.py").write_text("def two(completions):\n    return [2.0] * len(completions)\n")
    with Scorer(load_rewards(["load_package.two", "load_package.inner.two"], tmp_path)) as scorer:
        assert scorer.names == ["two", "two_2"]
        assert scorer.score(reward_call(["a"])).rewards_SR.tolist() == [[2.0, 2.0]]


def test_classes_objects_and_closures_stay_here(tmp_path):
    write(
        tmp_path,
        "load_objects",
        "class Kind:\n    def __call__(self, completions, **kwargs):\n        return [1.0]\n"
        "class Needy:\n    def __init__(self, x): ...\n"
        "class Leaving:\n    def __init__(self): raise SystemExit(3)\n"
        "made = Kind()\nclosed = (lambda: lambda completions: [1.0])()\n",
    )
    kinds = load_rewards(["load_objects.Kind", "load_objects.made"], tmp_path)
    assert [(reward.name, reward.runs) for reward in kinds] == [("Kind", "here"), ("Kind_2", "here")]
    with pytest.raises(UserError, match="a Needy cannot be created without arguments"):
        load_rewards(["load_objects.Needy"], tmp_path)
    with pytest.raises(UserError, match=r"a Leaving cannot be created .* SystemExit: 3 \(load_objects\.py, line 7\)"):
        load_rewards(["load_objects.Leaving"], tmp_path)
    partial = functools.partial(lambda scale, completions: [scale], 2.0)
    (reward,) = as_rewards(partial)
    assert (reward.name, reward.runs) == ("partial", "here")


def test_functions_that_a_script_imports_run_in_workers_and_its_own_stay_here(tmp_path, monkeypatch):
    write(tmp_path, "load_imported", "def one(completions):\n    return [1.0] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import load_imported  # pyright: ignore[reportMissingImports]

    def own(completions):
        return [2.0] * len(completions)

    rewards = as_rewards([load_imported.one, own])
    assert [reward.runs for reward in rewards] == ["worker", "here"]
    with Scorer(rewards) as scorer:
        assert scorer.score(reward_call(["a"])).rewards_SR.tolist() == [[1.0, 2.0]]
    replaced = load_imported.one
    monkeypatch.setattr(load_imported, "one", own)
    assert as_rewards(replaced)[0].runs == "here", "a worker would find another function under its name"


def test_built_ins_by_name_and_with_options(tmp_path):
    rewards = load_rewards(["length(maximum=3)", "adaptive(reward='length(maximum=3)')"], tmp_path)
    assert [reward.runs for reward in rewards] == ["worker", "here"]
    with Scorer(rewards) as scorer:
        scores = scorer.score(reward_call(["one two", "one two three four"]))
        assert scores.rewards_SR[:, 0].tolist() == [1.0, 0.0]
        assert list(scorer.state()) == [rewards[1].name]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lenght", r"there is no reward 'lenght'.*Did you mean 'length'\?"),
        ("accuracy_reward", r"there is no reward 'accuracy_reward'.* Write 'upweight\.rewards\.accuracy_reward'\."),
        ("length(5)", r"options are given by name, as in length\(minimum=\.\.\.\)"),
        ("adaptive(reward='load_wrong.reward')", "To wrap your function"),
        ("no_such_file.reward", "no no_such_file.py in"),
        ("load_wrng.reward", r"no load_wrng\.py in .* Did you mean 'load_wrong'\?$"),
        ("load_wrong.reword", r"Did you mean 'reward'\?"),
        ("load_wrong.other", r"has no function 'other'\. It has reward, arity\.$"),
        ("load_wrong.arity", "never gets the completions"),
        ("load_broken.reward", r"cannot be imported: ZeroDivisionError.*line 1"),
        ("./nowhere", "is no folder here"),
        ("owner/nothing-there", "could not load the reward model of 'owner/nothing-there'"),
    ],
)
def test_what_is_not_there_is_said_with_its_key(tmp_path, name, said):
    write(tmp_path, "load_wrong", "def reward(completions): ...\ndef arity(): ...\n")
    write(tmp_path, "load_broken", "1 / 0\n")
    with pytest.raises(UserError, match=said) as caught:
        load_rewards([name], tmp_path)
    assert str(caught.value).startswith("trl.reward_funcs")


def test_other_things_are_no_rewards():
    with pytest.raises(UserError, match="a int is no reward"):
        as_rewards([3])
    with pytest.raises(UserError, match="2 given for 1 reward;"):
        as_rewards(lambda completions: [], [None, None])


def test_a_wrapped_function_of_a_file_is_named_as_an_object(tmp_path):
    code = """
from upweight.rewards.builtin.adaptive import AdaptiveReward
def words(completions, **_):
    return [float(len(text.split())) for text in completions]
mine = AdaptiveReward(words)
"""
    write(tmp_path, "load_adaptive", code)
    with Scorer(load_rewards(["load_adaptive.mine"], tmp_path)) as scorer:
        assert scorer.score(reward_call(["one two", "one"])).rewards_SR.tolist() == [[2.0], [1.0]]


EPISODES = [{"rewards": {"right": 1.0, "short": 0.5}}, {"rewards": {"right": 0.0}}, None]


@pytest.mark.parametrize(
    ("named", "given", "columns"),
    [
        ([], ["only"], ["reward_env"]),
        ([], ["right", "short"], ["right", "short"]),
        (["reward_env", "reward_nemo_gym_verify"], ["right", "short"], ["right", "short"]),
        (["axolotl.integrations.nemo_gym.rewards.reward_env", "repetition"], ["only"], ["reward_env", "repetition"]),
        (["repetition"], ["only"], ["repetition"]),
    ],
)
def test_environment_rewards_come_once_and_where_they_are_named(named, given, columns, tmp_path):
    assert [reward.name for reward in load_rewards(named, tmp_path, environment=given)] == columns


def test_scripts_get_them_beside_their_own():
    assert [reward.name for reward in as_rewards(["repetition"], environment=["only"])] == ["repetition", "reward_env"]
    assert [reward.name for reward in as_rewards(["reward_env", "repetition"], environment=["only"])] == [
        "reward_env",
        "repetition",
    ]


def test_without_an_environment_there_is_no_such_reward(tmp_path):
    with pytest.raises(UserError, match="'reward_env' needs an environment"):
        load_rewards(["reward_env"], tmp_path)


def test_a_component_that_an_episode_does_not_give_does_not_apply(tmp_path):
    with Scorer(load_rewards([], tmp_path, environment=["right", "short"])) as scorer:
        found = scorer.score(reward_call(["a", "b", "c"], episode=EPISODES)).rewards_SR.tolist()
    assert found[0] == [1.0, 0.5]
    assert found[1][0] == 0.0
    assert all(map(math.isnan, [found[1][1], *found[2]]))
