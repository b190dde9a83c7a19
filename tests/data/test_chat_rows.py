"""Plain texts for a chat model: made turns where the entry asks for it, else a warning."""

import pytest

from made_tokenizers import byte_tokenizer, text_of
from upweight.config import parse_config
from upweight.errors import UserError
from upweight.log import _warned

PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
TEMPLATE = """{% for one in messages %}<|im_start|>{{ one.role }}
{{ one.content }}<|im_end|>
{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""
CHAT = {"as_messages": True}
PAIR = {"chosen": "So.", "rejected": "No."}
SFT_FIELDS = {"field_instruction": "q", "field_output": "a"}
FIELDS = {"field_prompt": "question", "field_chosen": "good", "field_rejected": "bad"}


def texts(entry, row, **keys):
    return text_of(entry, row, chat_template="chatml", **keys)


@pytest.mark.parametrize(
    ("keys", "entry", "row", "expected"),
    [
        ({"rl": "dpo"}, {}, {"prompt": "Why?", **PAIR}, PAIR),
        ({"rl": "dpo"}, {"type": FIELDS}, {"question": "Why?", "good": "So.", "bad": "No."}, PAIR),
        ({"rl": "kto"}, {}, {"prompt": "Why?", "completion": "So.", "label": True}, {"completion": "So."}),
        ({}, {}, {"prompt": "Why?", "completion": "So."}, {"completion": "So."}),
        ({}, {"type": SFT_FIELDS}, {"q": "Why?", "a": "So."}, {"completion": "So."}),
    ],
)
def test_prompts_and_answers_become_turns(keys, entry, row, expected):
    found = texts({**CHAT, **entry}, row, **keys)
    assert found["prompt"] == PROMPT
    for name, text in expected.items():
        assert found[name].startswith(text)
        assert "<|im_end|>" in found[name]


def test_a_system_column_and_an_input_are_kept():
    row = {"q": "Add.", "more": "1 and 2", "a": "3", "system": "Be brief."}
    fields = {"field_instruction": "q", "field_input": "more", "field_output": "a"}
    found = texts({**CHAT, "type": fields}, row)
    assert "system\nBe brief.<|im_end|>" in found["prompt"]
    assert "user\nAdd.\n\n1 and 2<|im_end|>" in found["prompt"]


def test_a_pair_without_a_prompt_is_refused():
    with pytest.raises(Exception, match="a prompt, which `as_messages` makes the user's turn"):
        texts(CHAT, {"chosen": "a b", "rejected": "a c"}, rl="dpo")


def test_it_is_for_rows_without_a_type(tmp_path):
    entry = {"path": "rows.jsonl", "type": "chatml.intel", **CHAT}
    with pytest.raises(UserError, match=r"datasets\[0\].as_messages: is for rows without a 'type'"):
        parse_config({"base_model": "tiny", "rl": "dpo", "datasets": [entry]}, folder=tmp_path)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (("Why?", TEMPLATE, {}), "warning: datasets[0] (rows.jsonl): these prompts are plain text"),
        (("Why?", TEMPLATE, {"as_messages": False}), "datasets[0] (rows.jsonl): prompts stay plain text"),
        (("Why?", None, {}), None),
        (("Why?", None, {"as_messages": False}), None),
        ((PROMPT, TEMPLATE, {}), None),
        (([{"role": "user", "content": "Why?"}], TEMPLATE, {}), None),
    ],
)
def test_who_trains_a_chat_model_on_plain_text_is_told_once(case, says, run, caplog):
    caplog.set_level("INFO")
    prompt, template, entry = case
    _warned.clear()
    rows = [{"prompt": prompt, "chosen": f"So {n}.", "rejected": "No."} for n in range(4)]
    run(rows, datasets=[{"path": "rows.jsonl", **entry}], tokenizer=byte_tokenizer(template=template))
    lines = [one for one in caplog.messages if "`as_messages: true` there trains on them as turns" in one]
    assert [line.startswith(says or "") for line in lines] == ([] if says is None else [True])


def test_several_entries_of_plain_text_are_named_in_one_line(run, caplog):
    _warned.clear()
    rows = [{"prompt": "Why?", "chosen": f"So {n}.", "rejected": "No."} for n in range(4)]
    entry = {"path": "rows.jsonl"}
    run(rows, datasets=[entry, entry], test_datasets=[entry], tokenizer=byte_tokenizer(template=TEMPLATE))
    (line,) = [one.getMessage() for one in caplog.records if "chat template is not applied" in one.getMessage()]
    assert line.startswith(
        "warning: datasets[0] (rows.jsonl), datasets[1] (rows.jsonl), test_datasets[0] (rows.jsonl):"
    )
