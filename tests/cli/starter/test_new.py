"""A config for somebody's own file: columns mapped, method proposed, memory checked; and it trains."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig, Qwen3MoeConfig

from made_runs import upweight, write_model
from upweight.cli.starter.filters import repeated_notes
from upweight.cli.starter.new import _fit_model, _typed_table, new, propose
from upweight.cli.starter.plan import Plan, content
from upweight.cli.starter.table import Table
from upweight.errors import UserError
from upweight.models.hub import models_here
from upweight.rewards.builtin.spec import builtin_reward, check_specs

TEMPLATE = """{% for one in messages %}<|im_start|>{{ one.role }}
{{ one.content }}<|im_end|>
{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""
WHOLE = ("val_set_size=0", "eval_samples=0")  # hold nothing out
PAIRS = [{"question": f"What is {n}?", "good": f"It is {n}.", "bad": "No idea."} for n in range(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("new") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_csv(file, rows):
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_repeated_rows_are_counted_in_the_columns_that_are_read():
    rows = [{"id": n, "question": f"What is {n % 8}?", "answer": "It is."} for n in range(10)]
    plan = Plan(Table(Path("mine.csv"), rows), "sft", "m", {"type": {"field_prompt": "question", "field_o": "answer"}})
    (note,) = repeated_notes(plan)
    assert note.startswith("duplicates: 2 of the first 10 rows repeat an earlier one (row 8: row 0); `dataset_exact_")
    assert repeated_notes(Plan(plan.table, "grpo", "m")) == []  # their rewards may read the id
    assert repeated_notes(Plan(Table(Path("mine.csv"), rows[:8]), "sft", "m", plan.entry)) == []


@pytest.mark.parametrize(
    ("columns", "method"),
    [
        (["question", "good", "bad"], "dpo"),
        (["prompt", "completion", "label"], "kto"),
        (["question", "answer"], "sft"),
        (["messages"], "sft"),
        (["text"], "sft"),
        (["prompt", "id"], "grpo"),
    ],
)
def test_the_method_is_proposed_by_the_columns(columns, method):
    assert propose(Table(Path("mine.csv"), [dict.fromkeys(columns, "true")]))[0] == method


def test_two_answers_raise_the_question_whether_they_are_a_pair():
    row = {"question": "Why?", "answer_a": "Well, so.", "answer_b": "Well, no."}
    assert "Is one of 'answer_a' and 'answer_b' the better answer?" in propose(Table(Path("mine.csv"), [row]))[1]
    row = {"question": "Why?", "answer": "Well, so.", "answer_id": "7"}
    assert "better answer" not in propose(Table(Path("mine.csv"), [row]))[1]


def test_columns_that_nobody_knows():
    with pytest.raises(UserError, match=r"no column is recognised among a, b\..*--columns prompt=a,completion=b`"):
        propose(Table(Path("mine.csv"), [{"a": "Why so?", "b": "It is so."}]))


def test_a_csv_without_names_of_columns():
    rows = [{"How do I pay?": "Where is it?", "By card.": "At the door."}]
    with pytest.raises(UserError, match="Line 1 seems to be a row: put a line of names before it"):
        propose(Table(Path("mine.csv"), rows))


def test_conversations_that_are_one_text_are_answered_with_a_transform():
    row = {"id": 7, "transcript": "Customer: It is late.\nAgent: Sorry!\nCustomer: Well: when?"}
    with pytest.raises(UserError, match=r"'transcript' holds .* of 'Customer' and 'Agent': `type: mine.transform`"):
        propose(Table(Path("mine.csv"), [row]))
    page = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()
    code: dict[str, Any] = {}
    exec(re.search(r"```python\n(import re.*?)```", page, re.DOTALL)[1], code)
    said = [("user", "It is late."), ("assistant", "Sorry!"), ("user", "Well: when?")]
    assert code["transform"](None)(row)["messages"] == [{"role": role, "content": text} for role, text in said]


def test_a_config_is_no_file_of_rows(tmp_path):
    (tmp_path / "mine.yaml").write_text("base_model: some/model\n")
    with pytest.raises(UserError, match=r"is a config, not a file of rows: `upweight train \S+mine\.yaml`"):
        new(tmp_path / "mine.yaml", yes=True, output=tmp_path / "config.yaml")


def test_rows_without_the_answer_that_a_reward_reads_are_left_out(tmp_path, model):
    rows = [{"question": f"What is {n}?", "answer": str(n) if n % 4 else ""} for n in range(8)]
    write_csv(tmp_path / "quiz.csv", rows)
    output = tmp_path / "config.yaml"
    new(tmp_path / "quiz.csv", model=str(model), method="grpo", output=output, yes=True)
    assert yaml.safe_load(output.read_text())["datasets"][0]["filter"] == "filters.keep"
    assert "['question', 'answer']" in (tmp_path / "filters.py").read_text()


def test_conversations_in_the_cells_of_a_csv(tmp_path, model):
    talk = json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}])
    with pytest.raises(UserError, match=r"'talk' holds conversations.*`messages`.*field_messages: talk"):
        propose(Table(Path("mine.csv"), [{"id": 1, "talk": talk}]))
    write_csv(tmp_path / "mine.csv", [{"id": n, "messages": talk} for n in range(30)])
    new(tmp_path / "mine.csv", model=str(model), output=tmp_path / "mine.yaml", yes=True)
    assert "as_messages" not in (tmp_path / "mine.yaml").read_text()


def test_no_more_tokens_are_proposed_than_the_model_has_positions(tmp_path, model):
    rows = [{"prompt": "hi", "completion": "a" * 5000}, {"prompt": "hi", "completion": "no"}]
    write_csv(tmp_path / "mine.csv", rows)
    plan = Plan(Table(tmp_path / "mine.csv", rows), "sft", str(model))
    _fit_model(plan, tmp_path / "mine.yaml")
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert plan.sequence_len == positions
    assert f"longer rows are left out; the model has {positions} positions" in plan.notes[0]


def test_a_csv_becomes_a_config_that_trains(tmp_path, model):
    write_csv(tmp_path / "mine.csv", PAIRS)
    done = upweight("new", "mine.csv", "--model", model, "--yes", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "columns: prompt is 'question', chosen is 'good', rejected is 'bad'" in done.stderr
    assert "memory: about" in done.stderr
    content = yaml.safe_load((tmp_path / "config.yaml").read_text())
    fields = {"field_prompt": "question", "field_chosen": "good", "field_rejected": "bad"}
    assert content["datasets"] == [{"path": "mine.csv", "type": fields, "as_messages": True}]
    assert (content["rl"], content["adapter"]) == ("dpo", "lora")
    shown = upweight("preprocess", "config.yaml", "--show", 1, folder=tmp_path)
    assert "<|im_start|>user" in json.loads(shown.stdout)["prompt"]
    trained = upweight("train", "config.yaml", "max_steps=1", "output_dir=my out", folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "upweight watch 'my out'" in trained.stderr  # commands that can be copied
    assert "try it: upweight inference 'my out' --prompt" in trained.stderr
    assert (tmp_path / "my out" / "adapter_config.json").is_file()
    assert "would be written over" in upweight("new", "mine.csv", "--yes", folder=tmp_path).stderr


def test_columns_that_are_not_read_and_ratings_are_mentioned(tmp_path, model):
    write_csv(tmp_path / "rated.csv", [{"prompt": "Why?", "response": "So.", "rating": n % 5 + 1} for n in range(6)])
    done = upweight("new", "rated.csv", "--model", model, "--yes", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not read by sft: rating\n" in done.stderr
    assert "'rating' holds ratings, and sft trains on all rows, also on badly rated ones" in done.stderr
    assert "`filter: mine.good` in the entry" in done.stderr
    (tmp_path / "mine.py").write_text("def good(row): return float(row['rating']) >= 4")  # as it proposes
    entry = "datasets.0.filter=mine.good"
    shown = upweight("preprocess", "config.yaml", "--show", 9, entry, *WHOLE, folder=tmp_path)
    assert len(shown.stdout.splitlines()) == 2, shown.stderr


def test_rows_with_an_empty_cell_are_left_out_by_a_filter(tmp_path, model):
    rows = [{"Question": f"Why {n}?", "good_answer": "So.", "bad_answer": "No."} for n in range(8)]
    rows[2]["Question"], rows[5]["bad_answer"] = "", " "
    write_csv(tmp_path / "mine.csv", rows)
    done = upweight("new", "mine.csv", "--model", model, "--yes", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 of the first 8 rows have one (1 in 'Question', 1 in 'bad_answer')" in done.stderr
    assert "cannot be read" not in done.stderr
    shown = upweight("preprocess", "config.yaml", *WHOLE, folder=tmp_path)
    assert "2 dropped: left out by the filter" in shown.stderr, shown.stderr
    done = upweight("new", "mine.csv", "--model", model, "--yes", "--output", "b.yaml", folder=tmp_path)
    assert "`filter: filters_b.keep` leaves such rows out" in done.stderr  # filters.py is there
    shown = upweight("preprocess", "b.yaml", *WHOLE, folder=tmp_path)
    assert "2 dropped: left out by the filter" in shown.stderr, shown.stderr


def test_lengths_count_what_the_chat_template_adds(tmp_path, model):
    polite = tmp_path / "polite"
    shutil.copytree(model, polite)
    said = "be polite " * 40
    (polite / "chat_template.jinja").write_text(f"<|im_start|>system\n{said}<|im_end|>\n{TEMPLATE}")
    write_csv(tmp_path / "mine.csv", PAIRS)
    for name, folder in (("plain", model), ("polite", polite)):
        done = upweight("new", "mine.csv", "--model", folder, "--output", f"{name}.yaml", "--yes", folder=tmp_path)
        assert "turns and system text included" in done.stderr
        shown = upweight("preprocess", f"{name}.yaml", *WHOLE, folder=tmp_path)
        longest = int(re.search(r"lengths: up to (\d+) tokens", done.stderr)[1])
        assert re.search(rf"^sequence\b.*\b{longest}$", shown.stderr, re.MULTILINE), shown.stderr


@pytest.mark.parametrize("wrong", [("choose", "mine.csv"), ("init", "mine.csv"), ("train", "mine.csv")])
def test_a_file_of_rows_in_another_place_is_answered_with_new(tmp_path, wrong):
    write_csv(tmp_path / "mine.csv", PAIRS)
    done = upweight(*wrong, folder=tmp_path)
    assert (done.returncode, "`upweight new mine.csv`" in done.stderr) == (2, True)


def test_a_size_is_no_model(tmp_path):
    write_csv(tmp_path / "mine.csv", PAIRS)
    done = upweight("new", "mine.csv", "--model", "1.5B", "--output", "my.yaml", "--memory", "8", folder=tmp_path)
    assert (done.returncode, "`upweight fits 1.5B --memory 8`" in done.stderr) == (2, True)
    assert not (tmp_path / "my.yaml").exists()


def test_prompts_get_a_reward_to_change(tmp_path, model):
    rows = [{"prompt": f"Say {n}."} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = upweight("new", "prompts.jsonl", "--model", model, "--output", "say/it.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "def good(completions" in (tmp_path / "say" / "rewards.py").read_text()
    assert upweight("validate", "say/it.yaml", folder=tmp_path).returncode == 0
    tried = upweight("rewards", "say/it.yaml", "--prompts", 1, "trl.max_completion_length=4", folder=tmp_path)
    assert tried.returncode == 1, tried.stderr  # four tokens are never more than 40 words
    assert "reward 'good' gives 1 to every completion" in tried.stdout


def test_a_misspelt_file_is_answered_with_one_that_is_there(tmp_path):
    write_csv(tmp_path / "mine.csv", PAIRS)
    assert "mien.csv: there is no such file. Did you mean 'mine.csv'?" in upweight(
        "new", "mien.csv", "--yes", folder=tmp_path
    ).stderr  # fmt: skip


def test_a_model_that_is_not_there_is_said_and_the_config_is_written(tmp_path):
    write_csv(tmp_path / "mine.csv", PAIRS)
    done = upweight("new", "mine.csv", "--model", "nobody/nothing", "--method", "simpo", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lengths are not checked" in done.stderr
    assert "memory is not checked, for the same cause" in done.stderr
    assert "could not load" not in done.stderr
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["rl"] == "simpo"
    file, missing, onward = done.stdout.splitlines()
    assert file == "config.yaml"
    assert missing.startswith("base_model: could not load the tokenizer of 'nobody/nothing': it is not on this machine")
    if models_here():
        pytest.skip("a model of this machine (that of `make demo`) is named in place of a tiny one")
    commands = onward.partition(": ")[2].split(", then ")
    assert commands[0] == "upweight init sft tiny-model --tiny"
    for command in commands[:2]:
        tried = upweight(*command.split()[1:], folder=tmp_path)
        assert tried.returncode == 0, tried.stderr
    (tmp_path / "config.yaml").unlink()
    again = upweight("new", "mine.csv", "--model", "nobody/nothing", "--method", "simpo", folder=tmp_path)
    assert again.stdout.endswith("then upweight train config.yaml base_model=tiny-model/tiny\n")
    assert "is here: upweight preprocess config.yaml --show 2 base_model=tiny-model/tiny, then" in again.stdout


def test_a_terminal_is_asked_three_questions(tmp_path, model, monkeypatch, capsys):
    write_csv(tmp_path / "mine.csv", PAIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    said, questions = iter(["mine.csv", "", str(model)]), []
    monkeypatch.setattr("builtins.input", lambda question: (questions.append(question), next(said))[1])
    new()
    assert [question.split("?")[0] for question in questions] == [
        "Which file holds your rows",
        "Which method",
        "Which model",
    ]
    assert "look like a better and a worse answer: dpo" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["rl"] == "dpo"


def test_a_terminal_is_asked_again(tmp_path, model, monkeypatch, capsys):
    (tmp_path / "my rows").mkdir()
    write_csv(tmp_path / "my rows" / "my pairs.csv", PAIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("upweight.cli.starter.new._is_terminal", lambda: True)
    said = iter(["no.csv", "my rows", "it's", "'my rows/my pairs.csv'", "banana", "kto", "dpo", "7B", str(model)])
    monkeypatch.setattr("builtins.input", lambda _: next(said))
    new()
    shown = capsys.readouterr().out
    assert "no.csv: there is no such file" in shown
    assert "my rows: is a folder. Name the file with the rows, such as my rows/my pairs.csv." in shown
    assert "--method banana: none of dpo" in shown
    assert "kto needs prompt, completion, label" in shown
    assert "--model 7B: is a size" in shown
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["output_dir"] == "my-pairs-out"


def test_a_dropped_file_may_be_escaped(tmp_path, monkeypatch):
    write_csv(tmp_path / "my pairs.csv", PAIRS)
    monkeypatch.chdir(tmp_path)
    assert _typed_table(r"my\ pairs.csv").file == _typed_table("my pairs.csv").file == Path("my pairs.csv")


def test_what_cannot_be_done(tmp_path):
    write_csv(tmp_path / "mine.csv", PAIRS)
    assert "there is no such file" in upweight("new", "no.csv", "--yes", folder=tmp_path).stderr
    assert "Name it: FILE" in upweight("new", folder=tmp_path).stderr
    wrong = upweight("new", "mine.csv", "--method", "dpoo", folder=tmp_path)
    assert (wrong.returncode, "Did you mean 'dpo'" in wrong.stderr) == (2, True)
    unfit = upweight("new", "mine.csv", "--method", "kto", folder=tmp_path)
    assert "kto needs prompt, completion, label" in unfit.stderr


@pytest.mark.parametrize(
    ("name", "chat"),
    [
        ("org/Tiny-1B-Instruct", True),
        ("org/gemma-9-2b-it", True),
        ("org/Llama-Chat-v1.gguf", True),
        ("org/Bitty-1B", False),
    ],
)
def test_without_a_tokenizer_the_name_of_a_model_says_whether_it_is_one_for_chats(name, chat, tmp_path):
    write_csv(tmp_path / "mine.csv", PAIRS)
    done = upweight("new", "mine.csv", "--model", name, "--yes", folder=tmp_path, HF_HUB_OFFLINE=1)
    assert done.returncode == 0, done.stderr
    (entry,) = yaml.safe_load((tmp_path / "config.yaml").read_text())["datasets"]
    assert entry.get("as_messages") is (True if chat else None)
    said = "the model's name is that of a chat model" if chat else "Then add `as_messages: true` to the entry"
    assert said in done.stderr


def test_a_file_of_which_no_row_can_be_read_is_refused_with_causes(tmp_path, model):
    write_csv(tmp_path / "mine.csv", [{"chosen": "So.", "rejected": "No.", "words": n} for n in range(5)])
    done = upweight("new", "mine.csv", "--model", model, "--yes", folder=tmp_path)
    assert done.returncode == 2
    assert "5 of 5 rows cannot be read:" in done.stderr
    assert "(5, first row 0)" in done.stderr
    assert "--columns" in done.stderr
    assert not (tmp_path / "config.yaml").exists()


def test_some_rows_that_cannot_be_read_are_counted_by_cause(tmp_path, model):
    rows = [*PAIRS, {"question": "Why?", "good": {"text": "So."}, "bad": "No."}]
    (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = upweight("new", "mine.jsonl", "--model", model, "--yes", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rows: 1 of 21 rows cannot be read:" in done.stderr


def test_the_memory_of_a_gpu_elsewhere_is_planned_for(tmp_path, model):
    folder = shutil.copytree(model, tmp_path / "seven")
    sizes = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28}
    LlamaConfig(num_key_value_heads=4, vocab_size=152_064, **sizes).save_pretrained(folder)  # without such weights
    write_csv(tmp_path / "mine.csv", PAIRS)
    for gib, keys in ((24, {}), (8, {"adapter": "qlora", "load_in_4bit": True})):
        named = ["--model", folder, "--memory", gib, "--output", f"{gib}.yaml", "--yes"]
        done = upweight("new", "mine.csv", *named, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "the GPU has" in done.stderr
        content = yaml.safe_load((tmp_path / f"{gib}.yaml").read_text())
        assert {"adapter": "lora", **keys}.items() <= content.items()


def test_the_experts_of_a_mixture_are_quantised_where_nothing_else_fits(tmp_path, model):
    folder = shutil.copytree(model, tmp_path / "mixture")
    experts = {"num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128}
    Qwen3MoeConfig(num_key_value_heads=4, vocab_size=151_936, **experts, **sizes).save_pretrained(folder)
    write_csv(tmp_path / "mine.csv", PAIRS)
    named = ["--model", folder, "--memory", "24", "--output", "my.yaml", "--yes"]
    done = upweight("new", "mine.csv", *named, folder=tmp_path)
    assert "too little" not in done.stderr
    keys = {"adapter": "qlora", "load_in_4bit": True, "quantize_moe_experts": True}
    assert keys.items() <= yaml.safe_load((tmp_path / "my.yaml").read_text()).items()


def test_memory_is_planned_by_the_shape_where_the_tokenizer_cannot_be_read(tmp_path):
    folder = tmp_path / "seven"
    sizes = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28}
    LlamaConfig(num_key_value_heads=4, vocab_size=152_064, **sizes).save_pretrained(folder)
    write_csv(tmp_path / "mine.csv", PAIRS)
    for number, (model, said) in enumerate(((folder, "the GPU has"), ("nobody/nothing-7B", "the shape of Qwen2.5-7B"))):
        named = ["--model", model, "--memory", "8", "--output", f"{number}.yaml", "--yes"]
        done = upweight("new", "mine.csv", *named, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "lengths are not checked" in done.stderr
        assert said in done.stderr
        assert "it fits with 'memory: fast', 'adapter: qlora', 'load_in_4bit: true'" in done.stderr
        written = (tmp_path / f"{number}.yaml").read_text()
        assert "these four lines" not in written  # without which the line below them would be refused
        keys = {"base_model": str(model), "adapter": "qlora", "load_in_4bit": True, "memory": "fast"}
        assert keys.items() <= yaml.safe_load(written).items()


@pytest.mark.parametrize("column", ["answer", "right: 'answer' #1"])
def test_the_reward_of_right_answers_can_be_read(column):
    plan = Plan(Table(Path("rows.jsonl"), [{"prompt": "1 + 1?", column: "2"}]), "grpo", "m", answer=column)
    (spec,) = content(plan)["trl"]["reward_funcs"]
    check_specs([spec], "trl.reward_funcs")
    assert builtin_reward(spec).column == column


def test_answers_that_are_numbers_are_compared_as_numbers(tmp_path, model):
    rows = [{"prompt": f"What is {n} + 1?", "answer": n + 1} for n in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    refused = upweight("new", "sums.jsonl", "--model", model, "--yes", folder=tmp_path)
    assert refused.returncode == 2
    assert "To learn by a reward for right numbers: `upweight new sums.jsonl --method grpo`" in refused.stderr
    done = upweight("new", "sums.jsonl", "--method", "grpo", "--model", model, "--yes", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trl"]["reward_funcs"] == ["numeric(column='answer')"]
