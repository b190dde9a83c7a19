"""A user's transform: where it is found, how it is called, what becomes of its rows."""

import itertools
import sys

import pytest

from made_tokenizers import byte_tokenizer, config, encoder
from upweight.config.view import view
from upweight.data.encode import RowError, build_encoder
from upweight.errors import UserError
from upweight.user_modules import load_function

NUMBERS = itertools.count()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module of a fresh name into a folder, and forgets it afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded = set(sys.modules)

    def write(text, name=None, folder=tmp_path):
        name = name or f"user_transform_{next(NUMBERS)}"
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    yield write
    for name in set(sys.modules) - loaded:
        if name.startswith(("user_transform_", "upweight_user.", "user_package_")):
            del sys.modules[name]


GSM8K = """
def transform(cfg, *args, **kwargs):
    def transform_fn(example, {argument}):
        assert {check}
        label = example["answer"].split("####")[-1].strip().replace(",", "")
        return {{"prompt": [{{"role": "user", "content": example["question"]}}], "answer": label}}
    return transform_fn, {{"remove_columns": ["question"]}}
"""


@pytest.mark.parametrize(
    ("argument", "check"),
    [
        ("tokenizer=None", "tokenizer.eos_token"),
        ("processing_class=None", "processing_class.eos_token"),
        ("**kwargs", "kwargs['tokenizer'].eos_token"),
        ("other=None", "other is None"),
    ],
)
def test_a_reward_module_with_its_transform(write, tmp_path, argument, check):
    name = write(GSM8K.format(argument=argument, check=check))
    made = encoder({"type": f"{name}.transform"}, folder=tmp_path, rl="grpo", chat_template="chatml")
    row = {"question": "1+1?", "answer": "So #### 2", "level": "easy"}
    (record,) = made(row)
    assert record.text == {
        "prompt": "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "answer": "2",
        "level": "easy",
    }
    assert record.columns["prompt"] == [{"role": "user", "content": "1+1?"}]
    assert row["answer"] == "So #### 2"
    assert "remove_columns" in made.source_text


def test_columns_can_all_be_removed_and_rows_dropped(write, tmp_path):
    name = write(
        "def t(cfg):\n return (lambda row: {'prompt': row['q']} if row['q'] else None), {'remove_columns': '__all__'}"
    )
    made = encoder({"type": f"{name}.t"}, folder=tmp_path, rl="grpo")
    assert set(made({"q": "a", "other": 1})[0].columns) == {"prompt", "prompt_ids"}
    assert made({"q": "", "other": 1}) == []


def test_a_batched_transform_makes_several_rows(write, tmp_path):
    text = (
        "def t(cfg):\n return (lambda batch: {'prompt': [q for q in batch['q'] for _ in range(3)]}), {'batched': True}"
    )
    made = encoder({"type": f"{write(text)}.t"}, folder=tmp_path, rl="grpo")
    assert [record.columns["prompt"] for record in made({"q": "a"})] == ["a", "a", "a"]


def test_what_a_transform_prints_does_not_go_to_stdout(write, tmp_path, capsys):
    name = write("print('a')\ndef t(cfg):\n print('b')\n return lambda row: print('c') or {'prompt': row['q']}")
    encoder({"type": f"{name}.t"}, folder=tmp_path, rl="grpo")({"q": "x"})
    assert capsys.readouterr() == ("", "a\nb\nc\n")


def test_pairs_from_a_transform(write, tmp_path):
    name = write("def t(cfg, **kw):\n return lambda r: {'prompt': r['q'], 'chosen': r['a'], 'rejected': r['b']}")
    (record,) = encoder({"type": f"{name}.t"}, folder=tmp_path, rl="dpo")({"q": "x", "a": "y", "b": "z"})
    assert record.text == {"prompt": "x", "chosen": "y", "rejected": "z"}


@pytest.mark.parametrize("where", ["datasets", "test_datasets"])
def test_the_transform_sees_its_own_entry(write, tmp_path, where):
    body = " path = cfg.datasets[dataset_idx].path\n return lambda row: {'prompt': path}"
    name = write(f"def t(cfg, dataset_idx=None, **kw):\n{body}")
    entries = [{"path": "other"}, {"path": f"one of {where}", "type": f"{name}.t"}]
    made = config({}, **({"datasets": entries} if where == "datasets" else {"test_datasets": entries}), rl="grpo")
    entry = getattr(made.data, where)[1]
    read = build_encoder(made.data, made.method, entry, 1, byte_tokenizer(), view(made), tmp_path)
    assert read({})[0].text["prompt"] == f"one of {where}"


def test_working_directory_config_folder_and_package(write, tmp_path, monkeypatch):
    here, beside = tmp_path / "here", tmp_path / "beside"
    here.mkdir()
    name = write("def f(): return 'beside'", folder=beside)
    monkeypatch.chdir(here)
    assert load_function(f"{name}.f", beside, "key")() == "beside"
    other = write("from .near import f", f"user_package_{next(NUMBERS)}.inner.mod", folder=here)
    write("def f(): return 'near'", other.replace(".mod", ".near"), folder=here)
    assert load_function(f"{other}.f", beside, "key")() == "near"
    assert load_function("json.dumps", beside, "key")([1]) == "[1]"


def test_a_file_named_like_a_known_module_is_still_read(write, tmp_path):
    write("def f(): return 'mine'", "json")
    assert load_function("json.f", tmp_path, "key")() == "mine"
    assert not hasattr(sys.modules["json"], "f")


def test_imports_of_neighbours_work_and_count_as_source(write, tmp_path):
    near = write("TEXT = 'near'")
    name = write(f"from {near} import TEXT\ndef t(cfg):\n return lambda row: {{'prompt': TEXT}}")
    made = encoder({"type": f"{name}.t"}, folder=tmp_path, rl="grpo")
    assert made({})[0].text["prompt"] == "near"
    assert "TEXT = 'near'" in made.source_text


def test_a_built_in_is_not_shadowed_silently(write, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("upweight.log._warned", set())
    write("def intel(cfg): raise RuntimeError", "chatml")
    made = encoder({"type": "chatml.intel"}, folder=tmp_path, rl="dpo")
    assert made({"question": "a", "chosen": "b", "rejected": "c"})[0].text["prompt"].startswith("<|im_start|>user")
    assert "chatml.py is not used" in caplog.text


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("import user_transform_that_is_missing", "{}.t", "user_transform_that_is_missing"),
        ("def t(:", "{}.t", r"SyntaxError: invalid syntax \(\w+\.py, line 1\)$"),
        ("import json\njson.loads('{')", "{}.t", r"JSONDecodeError: .* \(\w+\.py, line 2\)$"),
        ("1 / 0", "{}.t", "ZeroDivisionError: division by zero .*line 1"),
        ("def transform(cfg): pass", "{}.transfrom", "Did you mean 'transform'"),
        ("", "user_transform_nowhere.t", "no user_transform_nowhere.py.* Formats for grpo: chat_template, "),
        ("def t(cfg): return 5", "{}.t", "must return a function"),
        ("def t(cfg): raise KeyError('x')", "{}.t", "KeyError.*line 1"),
        ("import sys\nsys.exit()", "{}.t", r"cannot be imported: SystemExit \(\w+\.py, line 2\)$"),
        ("def t(cfg): raise SystemExit(3)", "{}.t", "failed: SystemExit: 3 .*line 1"),
    ],
)
def test_what_cannot_be_loaded_is_explained(write, tmp_path, text, path, said):
    with pytest.raises(UserError, match=said):
        encoder({"type": path.format(write(text))}, folder=tmp_path, rl="grpo")


@pytest.mark.parametrize(
    "body",
    [
        "row['missing']",
        "__import__('sys').exit()",
        "5",
        "{'prompt': 5}",
        "{'prompt': [1]}",
        "{'prompt': '\\ud800'}",
        "{'a': 1}",
    ],
)
def test_what_a_row_function_gets_wrong_is_a_row_error(write, tmp_path, body):
    name = write(f"def t(cfg):\n return lambda row: {body}")
    with pytest.raises(RowError):
        encoder({"type": f"{name}.t"}, folder=tmp_path, rl="grpo", chat_template="chatml")({"q": "x"})
