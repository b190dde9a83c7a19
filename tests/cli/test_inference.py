"""What the command prints for a prompt, a file, standard input and a conversation."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from made_gguf import write_gguf
from made_runs import write_config, write_model
from made_tokenizers import byte_tokenizer
from tiny_models import tiny
from upweight.cli.app import app
from upweight.cli.export.run import run_merge
from upweight.config import load_config
from upweight.config.sections.model import ModelSection
from upweight.data.formats import prompt_styles
from upweight.errors import UserError
from upweight.models.load import load_model
from upweight.train.run import train

LORA = {"adapter": "lora", "lora_target_linear": True, "lora_r": 4, "max_steps": 2, "learning_rate": 0.05}
FEW = ("--max-new-tokens", "8", "--seed", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def inference(place, *options, given: str | bytes | None = None) -> str:
    """Standard output; what goes wrong is raised."""
    done = CliRunner().invoke(
        app, ["inference", str(place), *map(str, options)], input=given, catch_exceptions=False, standalone_mode=False
    )
    if done.exception is not None:
        raise done.exception
    return done.stdout


def rows_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.split("\n") if line]


def test_one_prompt_is_answered_as_text_or_json(model):
    said = inference(model, "chat_template=chatml", "--prompt", "hello", *FEW)
    (row,) = rows_of(inference(model, "chat_template=chatml", "--prompt", "hello", "--json", *FEW))
    assert said == row["completion"] + "\n"
    assert row.keys() == {"prompt", "completion", "finished"}
    assert inference(model, "--prompt", "hello", *FEW) != said, "without a template the text itself goes on"
    several = inference(model, "--prompt", "hello", "--count", 3, *FEW)
    assert [f"--- {n} of 3" in several for n in (1, 2, 3, 4)] == [True, True, True, False]


def test_without_a_seed_answers_differ(model):
    assert len({inference(model, "--prompt", "hello", "--max-new-tokens", 20) for _ in range(3)}) > 1


def test_a_file_and_stdin_give_json_lines(model, tmp_path):
    asked = [
        {"prompt": "hello", "answer": 3},
        {"prompt": [{"role": "user", "content": "good\u2028day"}], "answer": 4},
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in asked)
    (tmp_path / "asked.jsonl").write_text(text, encoding="utf-8")
    template = "chat_template=chatml"
    printed = inference(model, template, "--file", tmp_path / "asked.jsonl", "--count", 2, *FEW)
    assert [(row["prompt"], row["answer"]) for row in rows_of(printed)] == [
        (row["prompt"], row["answer"]) for row in asked for _ in range(2)
    ]
    assert inference(model, template, "--count", 2, *FEW, given=text) == printed
    plain = rows_of(inference(model, template, *FEW, given="hello\r\n\nand {you}?\n"))
    assert [row["prompt"] for row in plain] == ["hello", "and {you}?"]


def test_a_conversation_is_kept_until_reset(model):
    turns = "hello\n\nand you?\n/reset\nhello\n" + "x" * 300 + "\nhello\n"
    template = "chat_template=chatml"
    greedy = ("--temperature", 0, "--max-new-tokens", 8)
    first, second, again, after = inference(model, template, "--chat", *greedy, given=turns).split("\n")[:4]
    alone = inference(model, template, "--prompt", "hello", *greedy).rstrip("\n")
    assert (first, again) == (alone, alone)
    talk = [("user", "hello"), ("assistant", first), ("user", "and you?")]
    for messages, answer in ((talk, second), ([*talk[:1], ("assistant", first), ("user", "hello")], after)):
        row = {"prompt": [{"role": role, "content": said} for role, said in messages]}
        (found,) = rows_of(inference(model, template, *greedy, given=json.dumps(row)))
        assert found["completion"] == answer


def test_a_conversation_ends_by_its_command(model):
    said = inference(model, "chat_template=chatml", "--chat", *FEW, given="/help\n/quit\nhello\n")
    assert said == ""  # what follows is not asked


def test_a_config_means_what_it_trained_or_its_base(model, tmp_path):
    config = write_config(tmp_path, model, **LORA)
    few = ("--prompt", "the quick brown", "--temperature", 0, "--max-new-tokens", 12)
    base = inference(config, *few)
    assert base == inference(model, "chat_template=chatml", *few)
    train(load_config(config))
    trained = inference(config, *few)
    assert trained != base
    assert inference(tmp_path / "out", *few) == trained
    assert inference(config, f"output_dir={tmp_path / 'none'}", *few) == base


def test_a_base_model_of_the_command_line_gets_no_adapter_twice(model, tmp_path):
    config = write_config(tmp_path, model, **LORA)
    train(load_config(config))
    run_merge(str(config), [], output=None, check=False)
    few = ("--prompt", "the quick brown", "--temperature", 0, "--max-new-tokens", 12)
    assert inference(config, f"--base-model={tmp_path / 'out/merged'}", *few) == inference(config, *few)
    assert inference(config, f"--base-model={model}", *few) == inference(config, *few)  # the adapter's, elsewhere
    whole = write_config(tmp_path, model, max_steps=2, learning_rate=0.05, output_dir=str(tmp_path / "whole"))
    train(load_config(whole))
    assert inference(whole, *few) != inference(whole, f"--base-model={model}", *few)


def test_gguf_files_are_read(tmp_path):
    pytest.importorskip("gguf")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    made = tiny("llama", vocab_size=len(tokenizer), tie_word_embeddings=False)
    (tmp_path / "model").mkdir()
    write_gguf(made, tmp_path / "model" / "tiny.gguf")
    words = f"tokenizer_config={tmp_path / 'tokenizer'}"
    by_file = inference(tmp_path / "model" / "tiny.gguf", words, "--prompt", "hello", *FEW)
    assert by_file == inference(tmp_path / "model", words, "gguf_file=tiny.gguf", "--prompt", "hello", *FEW)
    assert by_file.strip()


def test_an_adapter_on_a_gguf_file_is_found_by_its_folder_alone(tmp_path):
    pytest.importorskip("gguf")
    tokenizer = byte_tokenizer()
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "tiny.gguf"
    write_gguf(tiny("llama", vocab_size=len(tokenizer), tie_word_embeddings=False), file)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(load_model(ModelSection(base_model=str(file)), torch.float32), lora)
    for saved in (adapted, tokenizer):
        saved.save_pretrained(tmp_path / "adapter")
    few = ("--prompt", "hello", "--temperature", 0, "--max-new-tokens", 8)
    words = f"tokenizer_config={tmp_path / 'adapter'}"
    said = inference(tmp_path / "adapter", words, *few)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        file
    )
    assert said.strip()
    assert said != inference(file, words, *few)


def test_what_is_wrong_is_said(model, tmp_path):
    for options, given, said in (
        (("--prompt", " "), None, "--prompt: 'prompt': expected text, got an empty one"),
        (("--prompt", "x" * 300), None, "at most 255 tokens"),
        (("--prompt", "a", "--chat"), None, "exclude each other"),
        (("--chat", "--raw"), None, "goes with none of"),
        (("--chat",), "hello\n", "--chat needs a chat template"),
        (("--prompt", "a", "--count", 2, "--temperature", 0), None, "always generates the same"),
        (("--prompt", "a", "--system", "b"), None, "needs a chat template"),
        (("--file", tmp_path / "none"), None, "there is no such file"),
        ((), "\n", "stdin: has no prompt; give one with --prompt"),
        (("What is 3 plus 4?",), None, "A prompt is given as --prompt 'What is 3 plus 4"),
        ((), b"\xff\n", "stdin: is not UTF-8 text"),
        (("chat_template=chatml", "--chat"), b"\xff\n", "stdin: is not UTF-8 text"),
        (("--prompts", "hello"), "\n", "--prompts: no such option. Did you mean '--prompt'"),
        ((), '{"prompt": "a"}\n\nb\n', "stdin:3: not JSON"),
        ((), '{"prompt": "a"}\n[1]\n', "stdin:2: expected a JSON object"),
        ((), '{"prompt": "a"}\n{"text": "b"}\n', "stdin:2: 'prompt'"),
    ):
        with pytest.raises(UserError, match=said.replace("(", r"\(")):
            inference(model, *options, given=given)
    above = tmp_path / "above"
    (above / "out").mkdir(parents=True)
    (above / "out" / "run.json").write_text("{}")
    with pytest.raises(UserError, match=f"nor the folder of a run.*Here are: {above / 'out'}"):
        inference(above, "--prompt", "a")
    with pytest.raises(UserError, match="there is no such config, run or model folder"):
        inference("./nowhere", "--prompt", "a")


def test_a_run_on_alpaca_rows_is_asked_as_it_was_trained(model, tmp_path, caplog):
    rows = [{"instruction": f"say {word}", "output": word} for word in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [{"path": str(tmp_path / "rows.jsonl"), "type": "alpaca"}]
    config = write_config(tmp_path, model, **LORA, rl=None, datasets=data, chat_template="chatml")
    train(load_config(config))
    few = ("--temperature", 0, "--max-new-tokens", 12)
    caplog.set_level("INFO")
    prompt = prompt_styles.WITHOUT_INPUT + "\n\n### Instruction:\nsay a\n\n### Response:\n"
    asked = inference(tmp_path / "out", "--prompt", "say a", *few)
    assert "written as in training, by `type: alpaca`" in caplog.text
    assert asked == inference(tmp_path / "out", "--prompt", prompt, "--raw", *few)
    (row,) = rows_of(inference(tmp_path / "out", *few, given=json.dumps({"instruction": "say a"})))
    assert row["completion"] == asked.rstrip("\n")
    assert "put into the chat template" not in caplog.text
    assert asked != inference(tmp_path / "out", "--prompt", "say a", "--no-style", *few)
    assert "put into the chat template" in caplog.text
