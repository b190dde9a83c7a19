"""How a built-in reward is named."""

import pickle
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from upweight.errors import UserError
from upweight.rewards.builtin import BUILTINS, builtin_reward, options_of

NEEDED = {
    "xml_tags": "(tags=['a'])",
    "regex": "(pattern='a')",
    "length": "(maximum=3)",
    "judge": "(url='http://127.0.0.1:1/v1', model='m')",
    "adaptive": "(reward='exact')",
}


@pytest.mark.parametrize(
    "spec", ["my_module.reward", "org/model", "nothing", "./folder", "", "exact.score", "nothing(a=1)"]
)
def test_what_is_not_a_built_in_is_left_to_others(spec):
    assert builtin_reward(spec) is None


@pytest.mark.parametrize("name", sorted(set(BUILTINS) - (set() if find_spec("math_verify") else {"math"})))
def test_every_built_in_survives_pickling_with_its_name(name):
    reward = builtin_reward(name + NEEDED.get(name, ""))
    again = pickle.loads(pickle.dumps(reward))
    assert again.__name__.startswith(name)
    assert BUILTINS[name].__doc__


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("exact(colum='x')", "Did you mean 'column'"),
        ("length(unit='wrods', maximum=3)", "Did you mean 'words'"),
        ("length(minimum=-1)", "minimum"),
        ("length(minimum=5, maximum=2)", "below minimum"),
        ("length", "minimum"),
        ("exact(", "cannot be read"),
        ("exact('x')", "by name"),
        ("exact(**{'column': 'x'})", "by name"),
        ("exact(column=__import__('os').getcwd())", "plain values"),
        ("exact(column='a')(column='b')", "write exact"),
        ("regex", "needs pattern"),
        ("regex(pattern='(')", "does not compile"),
        ("json(types={'a': 'strin'})", "types"),
        ("xml_tags(tags=['a b'])", "tags"),
        ("format(tags=[])", "tags"),
        ("judge(url='ftp://x', model='m')", "http"),
        ("judge(url='http://x', model='m', template='nothing')", "{completion}"),
        ("judge(url='http://x', model='m', api_key_env='NOT_SET_ANYWHERE')", "NOT_SET_ANYWHERE"),
        ("adaptive(reward='nothing')", "names no built-in"),
        ("adaptive(reward='exact', low=0.9, high=0.1)", "low below high"),
        ("cosine_length(by='nothing')", "names no built-in"),
        ("exact(score=" + "(" * 5000 + ")", "cannot be read"),
    ],
)
def test_a_bad_spec_is_explained(spec, words):
    with pytest.raises(UserError) as error:
        builtin_reward(spec)
    assert words in str(error.value)


def test_options_reach_the_reward():
    reward = builtin_reward(" numeric( column = 'result', tolerance=0.5, wrong=-1 ) ")
    assert reward is not None
    assert reward(completions=["1.4", "2"], result=["1", "1"]) == [1.0, -1.0]
    assert list(options_of("debug")) == ["show", "width"]


def test_the_package_does_not_import_torch():
    check = "import sys, upweight.rewards.builtin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize("name", BUILTINS)
def test_the_page_names_every_built_in_and_option(name):
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
    same_as_exact = set(options_of("exact")) if "those of `exact`" in line else set()
    named = set(re.findall(r"`(\w+)(?:=[^`]*)?`", line.split(" | ")[1]))
    assert set(options_of(name)) - same_as_exact <= named
