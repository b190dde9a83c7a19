"""Prompts to complete: what rewards will see is kept, and the ids are the model's."""

import pytest

from made_tokenizers import byte_tokenizer, encoder
from upweight.data.encode import RowError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("method", ["grpo", "gdpo"])
def test_messages_are_rendered_and_other_columns_kept(method):
    tokenizer = byte_tokenizer()
    (record,) = encoder({}, tokenizer, rl=method, chat_template="chatml")({"prompt": CHAT, "answer": "42", "level": 3})
    assert record.columns["prompt"] == CHAT
    assert tokenizer.decode(record.columns["prompt_ids"]) == CHATML
    assert {key: record.columns[key] for key in ("answer", "level")} == {"answer": "42", "level": 3}
    assert record.text == {"prompt": CHATML, "answer": "42", "level": 3}


def test_plain_text_gets_a_bos_and_no_template():
    tokenizer = byte_tokenizer("llama3")
    (record,) = encoder({}, tokenizer, rl="grpo")({"prompt": "Once upon"})
    assert tokenizer.decode(record.columns["prompt_ids"]) == "<|begin_of_text|>Once upon"


def test_nested_messages_of_a_gym_row():
    tools = [{"name": "weather", "parameters": {"type": "object"}, "strict": True, "type": "function"}]
    row = {
        "responses_create_params": {
            "input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
            "tools": tools,
        },
        "expected_answer": "42",
    }
    entry = {
        "type": "chat_template",
        "field_messages": "responses_create_params.input",
        "message_field_role": "role",
        "message_field_content": "content",
    }
    (record,) = encoder(entry, rl="grpo", chat_template="qwen3")(row)
    assert record.columns["prompt"] == CHAT
    assert '{"type": "function", "function": {"name": "weather", ' in record.text["prompt"]
    assert record.columns["responses_create_params"] == row["responses_create_params"]
    assert record.columns["expected_answer"] == "42"


def test_a_prompt_that_ends_with_the_assistant_is_continued():
    opened = [*CHAT, {"role": "assistant", "content": "Because"}]
    (record,) = encoder({}, rl="grpo", chat_template="chatml")({"prompt": opened})
    assert record.text["prompt"] == CHATML + "Because"


def test_variables_reach_the_template():
    for thinking, opened in ((True, ""), (False, "<think>\n\n</think>\n\n")):
        made = encoder({}, rl="grpo", chat_template="qwen3", chat_template_kwargs={"enable_thinking": thinking})
        (record,) = made({"prompt": CHAT})
        assert record.text["prompt"] == CHATML + opened
    row = {"prompt": CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    (record,) = encoder({}, rl="grpo", chat_template="qwen3")(row)
    assert record.text["prompt"].endswith("</think>\n\n")


def test_a_default_system_message_serves_rows_without_one():
    made = encoder({}, rl="grpo", chat_template="chatml", default_system_message="Be brief.")
    (record,) = made({"prompt": CHAT[1:]})
    assert record.text["prompt"] == CHATML
    assert record.columns["prompt"] == CHAT[1:]


@pytest.mark.parametrize("prompt", [None, "", [], 5, {"role": "user"}, [{"role": "user", "content": None}], ["x"]])
def test_bad_prompts(prompt):
    with pytest.raises(RowError) as caught:
        encoder({}, rl="grpo", chat_template="chatml")({"prompt": prompt})
    assert caught.value.key.startswith("prompt")
