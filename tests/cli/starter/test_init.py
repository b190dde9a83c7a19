"""Starters: every one validates and trains as it was written; nothing is written over."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from made_runs import metrics_of, write_model
from slow_cases import slow_except
from upweight.cli.app import app
from upweight.cli.starter.init import STARTERS, starter_files, write_starter
from upweight.config import load_config
from upweight.config.config import NOT_BY_RL
from upweight.errors import UserError
from upweight.methods import METHODS
from upweight.train.run import train

VISION = [name for name in STARTERS if name.startswith("vlm-")]
TRAINED = [name for name in STARTERS if name not in ("gym", *VISION)]  # servers, or a model for images


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("teacher"), max_position_embeddings=1024, intermediate_size=16)


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("method", slow_except(("dpo", "ebft", "grpo", "sft"), TRAINED))
def test_every_starter_validates_and_trains(method, model_folder, teacher_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("init", method)
    assert done.exit_code == 0, done.output
    assert f"cd {method} && upweight train config.yaml" in done.stdout
    monkeypatch.chdir(tmp_path / method)
    assert command("validate", "config.yaml").stdout == "ok\n"
    small = ["max_steps=2", "micro_batch_size=8", "chat_template=chatml", "sequence_len=256", "val_set_size=2"]
    small += (
        ["trl.num_generations=4", "trl.max_completion_length=8"] if method in ("grpo", "gdpo", "rloo", "ebft") else []
    )
    small += ["trl.max_completion_length=8", f"distill.teacher={teacher_folder}"] if method == "distill" else []
    train(load_config(Path("config.yaml"), [f"base_model={model_folder}", *small]))
    rows = metrics_of(tmp_path / method / "out")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]


def test_every_method_that_rl_names_has_a_starter():
    assert {name for name in METHODS if name not in NOT_BY_RL} <= STARTERS.keys()
    assert {"sft", "reward", "prm"} <= STARTERS.keys()


def starter_with_images(method, model, monkeypatch, *keys):
    """Train the starter of a method from the model of a folder, all of it, in the working folder; return metrics."""
    folder = Path(method).absolute()
    assert command("init", method, folder).exit_code == 0
    monkeypatch.chdir(folder)
    assert command("validate", "config.yaml").stdout == "ok\n"
    small = [f"base_model={model}", "processor_kwargs={}", "sequence_len=128", "adapter=", "lora_r=null"]
    small += ["lora_alpha=null", "lora_target_linear=null"]
    train(load_config(Path("config.yaml"), [*small, *keys]))
    monkeypatch.chdir(folder.parent)
    return metrics_of(folder / "out")


@pytest.fixture
def vision_folder(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    from tiny_vision import processor, vision_model

    vision_model("llava").save_pretrained(tmp_path / "model")
    processor("llava").save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("method", VISION)
def test_starters_with_images_train_on_their_pictures(method, vision_folder, monkeypatch):
    from upweight.cli.starter.pictures import count_of, picture

    few = ["max_steps=2", "trl.num_generations=4"] if method == "vlm-grpo" else ["max_steps=30"]
    logged = starter_with_images(method, vision_folder / "model", monkeypatch, "learning_rate=3e-3", *few)
    losses = [row["loss"] for row in logged if "loss" in row]
    assert len(losses) == 2 if method == "vlm-grpo" else losses[-1] < 0.5 * losses[0]
    assert (vision_folder / method / "pictures" / "005.png").read_bytes() == picture(5)
    words = ["one", "two", "three", "four"]
    file = next((vision_folder / method).glob("*.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    answers = [row.get("answer") or row["messages"][-1]["content"] for row in rows]
    assert answers == [words[count_of(number) - 1] for number in range(len(rows))]
    assert [row["images"] for row in rows[:2]] == [["pictures/000.png"], ["pictures/001.png"]]


def share_right(folder, numbers):
    """The share of pictures whose squares the model of a folder counts right."""
    from upweight.cli.starter.pictures import QUESTION, WORDS, count_of, picture
    from upweight.config.sections.model import ModelSection
    from upweight.inference.generate import load_text_generator
    from upweight.types import Sampling

    generator, right = load_text_generator(ModelSection(base_model=str(folder)), new_tokens=6), 0
    for number in numbers:
        file = folder.parent / "other.png"
        file.write_bytes(picture(number))
        ids, refs = generator.encode_with_images({"prompt": QUESTION, "images": [str(file)]})
        ((answer,),) = generator([ids], Sampling(1, temperature=0, images=(refs,)))
        right += answer.text == WORDS[count_of(number) - 1]
    return right / len(numbers)


@pytest.mark.slow
def test_a_tiny_model_learns_to_count_from_the_starters(vision_folder, monkeypatch):
    others = range(1000, 1040)  # pictures that no starter has
    starter_with_images("vlm-sft", vision_folder / "model", monkeypatch, "learning_rate=3e-3")
    assert share_right(vision_folder / "vlm-sft" / "out", others) > 0.9
    (vision_folder / "short").mkdir()
    monkeypatch.chdir(vision_folder / "short")  # a warm start: the form of answers, and half of the counts
    starter_with_images("vlm-sft", vision_folder / "model", monkeypatch, "learning_rate=3e-3", "max_steps=140")
    start = vision_folder / "short" / "vlm-sft" / "out"
    logged = starter_with_images("vlm-grpo", start, monkeypatch, "learning_rate=1.5e-3")
    held_out = [row["eval_rewards/correct/mean"] for row in logged if "eval_rewards/correct/mean" in row]
    rewards = [row["rewards/correct/mean"] for row in logged if "rewards/correct/mean" in row]
    assert len(rewards) == 100
    assert held_out[-1] > held_out[0] + 0.2
    assert sum(rewards[-20:]) > sum(rewards[:20]) + 0.2 * 20


@pytest.mark.parametrize("method", STARTERS)
def test_a_starter_says_what_its_files_are_and_how_rows_look(method, tmp_path):
    files = starter_files(method)
    readme = files["README.md"]
    assert all(f"`{name}`" in readme for name in files if name != "README.md")
    (rows,) = (text for name, text in files.items() if name.endswith(".jsonl"))
    assert rows.splitlines()[0] in readme
    assert len({json.dumps(json.loads(line)) for line in rows.splitlines()}) >= 8
    load_config(write_starter(method, tmp_path) / "config.yaml")


@pytest.mark.parametrize("method", slow_except(("sft", "distill"), [one for one in TRAINED if one != "ebft"]))
def test_a_starter_with_a_tiny_model_trains_without_a_download(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("init", method, "--tiny")
    assert done.exit_code == 0, done.output
    monkeypatch.chdir(tmp_path / method)
    train(load_config(Path("config.yaml"), ["max_steps=2", "val_set_size=0", "eval_samples=0"]))
    assert [row["step"] for row in metrics_of(tmp_path / method / "out") if "loss" in row] == [1, 2]
    again = command("init", method, tmp_path / method, "--tiny")
    assert "tiny would be written over" in str(again.exception) or "tiny-teacher would be" in str(again.exception)


def test_a_starter_with_images_has_no_tiny_model(tmp_path):
    done = command("init", "vlm-sft", tmp_path / "images", "--tiny")
    assert "the tiny model reads no images" in str(done.exception)
    assert not (tmp_path / "images").exists()


def test_nothing_is_written_over_and_nothing_half_written(tmp_path):
    (tmp_path / "rewards.py").write_text("mine")
    done = command("init", "grpo", tmp_path)
    assert isinstance(done.exception, UserError)
    assert "rewards.py would be written over" in str(done.exception)
    assert f"`upweight init grpo {tmp_path}-2`" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]
    assert (tmp_path / "rewards.py").read_text() == "mine"


def test_an_unknown_method_is_named_with_the_nearest():
    with pytest.raises(UserError, match=r"no starter 'grop'.*grpo"):
        starter_files("grop")


def test_without_a_method_they_are_listed():
    shown = command("init").stdout.splitlines()
    assert [line.split()[2] for line in shown] == list(STARTERS)


@pytest.mark.parametrize(("option", "folder"), [("--output=my.yaml", "my"), ("-o mine", "mine")])
def test_an_option_for_the_place_is_answered_with_the_argument(option, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "dpo", *option.split()])
    assert f"the folder to write after the method: `upweight init dpo {folder}`" in str(done.exception)
    assert not list(tmp_path.iterdir())
