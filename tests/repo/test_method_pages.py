"""The page of each method: it has its parts, and what it shows runs."""

import json
import re
from pathlib import Path

import pytest
import yaml

from made_runs import metrics_of, write_model
from upweight.config import load_config
from upweight.data.sources.first_look import data_problems
from upweight.rewards.builtin.spec import check_specs

DOCS = Path(__file__).parents[2] / "docs"
METHODS = ("sft", "dpo", "kto", "orpo", "simpo", "grpo", "ebft", "distillation", "reward-models")
PARTS = ("When to use it", "Run it", "The loss", "Keys", "Curves to expect", "What goes wrong")
STUDENT, TEACHER = "HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def whole_configs(page: str) -> list[str]:
    """The configs that a page shows from top to bottom; others are parts of one."""
    return [block for block in blocks(page, "yaml") if block.startswith("base_model:")]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_tiny_models(text: str, folder: Path) -> str:
    """An example with tiny models in place of those that it names."""
    for name, layers in ((STUDENT, 2), (TEACHER, 3)):
        model = write_model(folder / f"layers_{layers}", num_hidden_layers=layers)
        (model / "chat_template.jinja").write_text(CHATML)
        text = text.replace(name, str(model))
    return text


EXAMPLES = [(page, number) for page in METHODS for number in range(len(whole_configs(page)))]
SCRIPTS = [
    (page, number)
    for page in METHODS
    for number, block in enumerate(blocks(page, "python"))
    if "trainer.train()" in block and block.startswith("from upweight")
]


def write_example(page: str, number: int, folder: Path) -> Path:
    """Write a config of a page with the rows and rewards that stand above it."""
    text = whole_configs(page)[number]
    rows = [json.loads(line) for line in blocks(page, "json")[number].splitlines()]
    file = folder / yaml.safe_load(text)["datasets"][0]["path"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    for block in blocks(page, "python"):
        if block.startswith("def correct"):
            (folder / "rewards.py").write_text(block)
    (folder / "my.yaml").write_text(text)
    return folder / "my.yaml"


@pytest.mark.parametrize("page", METHODS)
def test_a_page_has_its_parts(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert not [part for part in PARTS if not re.search(rf"^##+ {part}$", text, flags=re.MULTILINE)]


@pytest.mark.parametrize(("page", "number"), EXAMPLES)
def test_an_example_is_a_config_that_reads_its_rows(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(write_example(page, number, tmp_path))
    check_specs(config.rollout.reward_funcs, "trl.reward_funcs")
    assert not list(data_problems(config))


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), EXAMPLES)
def test_an_example_trains(page, number, tmp_path, monkeypatch):
    from upweight.train.run import train

    monkeypatch.chdir(tmp_path)
    file = write_example(page, number, tmp_path)
    file.write_text(with_tiny_models(file.read_text(), tmp_path))
    train(load_config(file, ["max_steps=1", "logging_steps=1"]))
    assert "loss" in metrics_of(tmp_path / "out")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), SCRIPTS)
def test_a_script_trains(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = with_tiny_models(blocks(page, "python")[number], tmp_path)
    (tmp_path / "script.py").write_text(script)
    names: dict[str, object] = {"__name__": "script"}
    exec(compile(script, str(tmp_path / "script.py"), "exec"), names)
    assert names["trainer"].state.global_step == 1  # type: ignore[attr-defined]
