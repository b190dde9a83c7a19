"""The command as a person runs it: what it prints, where, and how it exits."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from made_runs import upweight
from upweight.cli.app import app
from upweight.config.peers import TABLES
from upweight.errors import UserError

SAMPLE = Path(__file__).parents[1] / "config" / "samples" / "grpo_async.yaml"


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "upweight", *arguments], capture_output=True, text=True, check=False, env=os.environ
    )


@pytest.mark.parametrize(
    ("word", "near"), [("--fragmnt", "--fragment"), ("--no_dta", "--no-data"), ("--max-token", None), ("--seed", None)]
)
def test_a_mistyped_option_is_answered_with_the_option(word, near):
    done = launched("validate", str(SAMPLE), "--sequence-len", "64", word, "3")
    assert (f"{word}: no such option. Did you mean '{near}'?" in done.stderr) == (near is not None)
    assert done.returncode == (0 if word == "--seed" else 2)  # which is a key


def test_a_good_config_is_ok():
    done = launched("validate", str(SAMPLE), "trl.beta=0.5")
    assert (done.stdout, done.returncode) == ("ok\n", 0)
    assert "trl.use_data_producer: nothing to do" in done.stderr
    assert "not checked, since machines differ: GPUs, installed packages" in done.stderr


def test_user_errors_print_one_line_each_and_exit_2():
    done = upweight("validate", str(SAMPLE), "trl.num_generation=4", "sed=1")
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr.splitlines()[-2:] == [
        "trl.num_generation: unknown key. Did you mean 'num_generations'?",
        "sed: unknown key. Did you mean 'seed'?",
    ]


def test_errors_warnings_and_missing_files_are_shown_in_one_go(tmp_path):
    file = tmp_path / "config.yaml"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.gguf").write_text("")
    file.write_text("rl: dpo\nlearning_rate: 5\nsed: 1\ndatasets: [{path: rows.jsonl}]\n")
    done = upweight("validate", file, f"base_model={tmp_path / 'model'}")
    assert (done.stdout, done.returncode) == ("", 2)
    wanted = ("warning: learning_rate: 5 is far above", "sed: unknown key", "datasets[0] (rows.jsonl)", "base_model: ")
    lines = done.stderr.splitlines()
    assert len(lines) == 5
    assert all(line.startswith(start) for line, start in zip(lines, (*wanted, "(where another"), strict=True))
    unsure = upweight("validate", file, "base_model=m", "rl=dop").stderr  # nothing is said by a guessed method
    assert [line.split(":")[0] for line in unsure.splitlines()] == ["sed", "rl"]


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("length(maximun=3)", "has no option 'maximun'. Did you mean 'maximum'?"),
        ("length(3)", "options are given by name"),
        ("lenght(maximum=3)", "there is no built-in reward 'lenght'. Did you mean 'length'?"),
    ],
)
def test_options_of_built_in_rewards_are_checked(reward, says, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f'rl: grpo\ntrl:\n  reward_funcs: ["{reward}"]\n')
    done = upweight("validate", file, "--fragment")
    assert done.returncode == 2
    assert says in done.stderr


def test_a_fragment_is_checked_as_one(tmp_path):
    part = tmp_path / "part.yaml"
    part.write_text("trl: {beta: 0.1}\n")
    assert upweight("validate", "--fragment", str(part)).stdout == "ok\n"
    assert upweight("validate", str(part)).returncode == 2


def test_a_missing_file_of_deepspeed_options_is_named(tmp_path):
    file = tmp_path / "config.yaml"
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    file.write_text("base_model: m\ndeepspeed: mine.json\ndatasets: [{path: rows.jsonl, type: completion}]\n")
    done = upweight("validate", file)
    assert (done.returncode, "deepspeed: there is no file mine.json" in done.stderr) == (2, True)
    assert upweight("validate", file, "--no-data").stdout == "ok\n"


@pytest.mark.slow
def test_a_stream_from_a_folder_needs_steps_unless_its_files_say_their_length(tmp_path):
    file, rows = tmp_path / "config.yaml", tmp_path / "rows"
    rows.mkdir()
    with gzip.open(rows / "a.jsonl.gz", "wt") as packed:
        packed.write('{"text": "a"}\n')
    file.write_text("base_model: m\nstreaming: true\ndatasets: [{path: rows}]\n")
    done = upweight("validate", file)
    assert (done.returncode, done.stderr.splitlines()[-1].split(".")[0]) == (
        2, "max_steps: needed to train on a stream, whose length is not known"
    )  # fmt: skip
    (rows / "a.jsonl.gz").unlink()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), rows / "a.parquet")
    assert upweight("validate", file).stdout == "ok\n"
    file.write_text("base_model: m\nstreaming: true\ndatasets: [{path: org/rows}]\n")
    assert "a stream of the hub has no known length" in upweight("validate", file).stderr


def test_a_missing_file_and_a_missing_command_exit_2():
    assert launched("validate", "nowhere.yaml").returncode == 2
    assert launched("trian").returncode == 2


def test_a_folder_that_was_removed_is_said_to_be(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    start = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); from upweight.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", start, "init", "dpo"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "was removed" in done.stderr


def test_the_unexpected_exits_1_with_a_traceback(tmp_path):
    broken = tmp_path / "pydantic"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('broken installation')")
    done = subprocess.run(
        [sys.executable, "-m", "upweight", "validate", str(SAMPLE)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_schema_is_json_and_knows_nested_keys():
    schema = json.loads(upweight("schema").stdout)
    assert "num_generations" in schema["properties"]["trl"]["properties"]
    assert schema["additionalProperties"] is False


def test_help_needs_no_heavy_import():
    code = "import sys, upweight.cli.app; print([m for m in ('torch', 'transformers', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(file.name for file in SAMPLE.parent.glob("*.yaml")))
def test_validate_imports_nothing_that_computes(name):
    rewards = [] if "reward_funcs" in (SAMPLE.parent / name).read_text() else ["upweight.rewards.builtin"]
    code = (
        "import sys; from pathlib import Path; from upweight.cli.app import validate;"
        f"validate(Path({str(SAMPLE.parent / name)!r}));"
        "heavy = ['torch', 'numpy', 'transformers', 'datasets', 'peft', 'httpx'];"
        f"print([m for m in [*heavy, *{rewards}] if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_list_of_commands_has_whole_sentences():
    shown = launched("--help").stdout
    commands = shown[shown.index("Commands:") :]
    assert "..." not in commands
    assert max(map(len, shown.splitlines())) <= 80


def test_a_shell_completes_commands_and_options():
    asked = {"_TYPER_COMPLETE_ARGS": "upweight mer", "COMP_WORDS": "upweight mer", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['upweight']; from upweight.cli.app import main; main()"],
        env={**os.environ, **asked, "_UPWEIGHT_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["merge-lora"]


def test_commands_of_axolotl_are_answered_with_what_to_use(tmp_path):
    for name, advice in TABLES["commands"].items():
        with pytest.raises(UserError) as caught:
            CliRunner().invoke(app, [name.replace("-", "_"), "my.yaml"], catch_exceptions=False)
        assert str(caught.value).endswith(advice)
    done = upweight("lm-eval", "my.yaml", folder=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
