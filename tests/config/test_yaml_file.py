"""YAML is read as people mean it, and refused where it cannot be meant."""

from pathlib import Path

import pytest

from upweight.config.yaml_file import apply_overrides, read_yaml
from upweight.errors import UserError


def read(tmp_path: Path, text: str | bytes):
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(file)


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("5E-6", 5e-6), ("-1e3", -1e3), ("1.5e-4", 1.5e-4)])
def test_exponents_are_numbers(tmp_path, text, value):
    assert read(tmp_path, f"x: {text}") == {"x": value}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", "line 2, column 1: key 'a' is repeated, after line 1; keep one."),
        ("a: [1\n", "line"),
        ("a: &x [*x]\n", "nested"),
        ("[" * 2000 + "]" * 2000, "is nested too deeply."),
        ("a: " + "[" * 60 + "]" * 60, "nested more than 40 levels deep"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
            "far too large",
        ),
        (
            "a: &a {x: 1}\n"
            + "".join(
                f"{b}: &{b} {{<<: [{','.join(['*' + a] * 9)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "far too many merged keys",
        ),
        ('a: !!float ""\n', "does not fit its kind"),
        ("a: !!bool maybe\n", "does not fit its kind"),
        ("a: !!timestamp x\n", "does not fit its kind"),
        ("a:\n\tb: 1\n", "indent with spaces"),
        ("a:\n  - b: 1\n   c: 2\n", "begin in the same column"),
        ("a: {{ model }}\n", "in quotes"),
        ("a: 1\n---\nb: 2\n", "one document"),
        ("a: ,\n", "put the value in quotes"),
        ("- 1\n", "must be a mapping of keys to values, not a list."),
        ("word\n", "not the single value 'word'."),
        ("", "is empty. A config names at least"),
        (b"\xff\xfe\x00", "UTF-8"),
        ("a: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("a: 2024-13-45\n", "does not fit its kind"),
    ],
)
def test_bad_files_are_user_errors(tmp_path, text, expected):
    with pytest.raises(UserError, match=r"c\.yaml") as caught:
        read(tmp_path, text)
    assert expected in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.yaml: cannot be read"):
        read_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(UserError, match="--learning-rate=1e-4: the config comes first"):
        read_yaml(Path("--learning-rate=1e-4"))


def test_overrides_do_not_touch_what_was_read():
    content = {"trl": {"beta": 1}, "datasets": [{"path": "a"}]}
    changed = apply_overrides(content, ["trl.beta=2", "datasets.0.path=b", "new.key=[1, 2]", "seed="])
    assert content == {"trl": {"beta": 1}, "datasets": [{"path": "a"}]}
    assert changed == {"trl": {"beta": 2}, "datasets": [{"path": "b"}], "new": {"key": [1, 2]}, "seed": None}


def test_the_number_after_the_last_adds_an_entry():
    overrides = ["datasets.0.path=a", "datasets[1].path=b", "trl.reward_funcs.1=r.g", "empty.0.0=1"]
    assert apply_overrides({"trl": {"reward_funcs": ["r.f"]}, "empty": None}, overrides) == {
        "trl": {"reward_funcs": ["r.f", "r.g"]},
        "datasets": [{"path": "a"}, {"path": "b"}],
        "empty": [[1]],
    }


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("datasets.1.path=x", "'datasets' has no entry 0 before this one: datasets.0 is the next to set"),
        ("datasets.-1.path=x", "'-1' no number in it; it has no entries yet, datasets.0 adds one"),
        ("rewards.2=x", "'rewards' has no entry 1 before this one: rewards.1 is the next to set"),
        ("rewards.-1=x", "'-1' no number in it; its entries are 0 to 0, rewards.1 adds one"),
        ("rewards.first=x", "'rewards' is a list, 'first' no number in it"),
        ("seed.x=1", "'seed' is the single value 3: it has no 'x' in it"),
    ],
)
def test_an_override_beside_a_list_says_what_there_is(override, says):
    with pytest.raises(UserError) as caught:
        apply_overrides({"rewards": ["r.f"], "seed": 3}, [override])
    assert str(caught.value).startswith(f"{override}: ")
    assert says in str(caught.value)


def test_set_is_an_override_too_and_wrong_forms_get_an_example():
    assert apply_overrides({}, ["--set", "trl.beta=0.1", "--set=seed=3", "rl = dpo"]) == {
        "trl": {"beta": 0.1},
        "seed": 3,
        "rl": "dpo",
    }
    for wrong, says in (
        (["--set", "seed", "3"], "--set seed: write --set key=value, such as --set learning_rate=1e-5"),
        (["--set"], "--set: write --set key=value"),
        (["seed", "3"], "seed: a key is set by key=value, without spaces around the '=', such as seed=VALUE."),
        (["trl.beta:0.1"], "such as trl.beta=0.01."),
    ):
        with pytest.raises(UserError) as caught:
            apply_overrides({}, wrong)
        assert says in str(caught.value)


def test_a_misspelt_config_is_answered_with_one_that_is_there(tmp_path):
    (tmp_path / "config.yaml").write_text("rl: dpo\n")
    with pytest.raises(UserError, match=r"cannot be read .*Did you mean 'config\.yaml'\?"):
        read_yaml(tmp_path / "confg.yaml")


def test_switches_need_no_value():
    options = ["--gradient-checkpointing", "--no-load-in-4bit", "--adapter", "lora", "--debug"]
    expected = {"gradient_checkpointing": True, "load_in_4bit": False, "adapter": "lora", "debug": True}
    assert apply_overrides({}, options) == expected
