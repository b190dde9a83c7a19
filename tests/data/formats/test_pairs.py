"""Each documented row of a pair format yields exactly the documented prompt and answers."""

import json

import pytest

from made_tokenizers import byte_tokenizer, encoder, text_of
from upweight.data.encode import RowError
from upweight.data.formats.pairs import shared_start

CHATML_SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
CHATML_PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
LLAMA3_SYSTEM = "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
LLAMA3_PROMPT = (
    "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
FAMILIES = {
    "chatml": (CHATML_SYSTEM, CHATML_PROMPT, "<|im_end|>"),
    "llama3": (LLAMA3_SYSTEM, LLAMA3_PROMPT, "<|eot_id|>"),
}


def dialogue(answer, asked="Why?"):
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


PAIR = {"chosen": "Good.", "rejected": "Bad."}
LISTED = {"chosen": dialogue("Good."), "rejected": dialogue("Bad.")}
ROWS = {
    "": {"prompt": "Why?", **PAIR},
    ".default": {"input": "Why?", "chosen_response": "Good.", "rejected_response": "Bad."},
    ".argilla": {"instruction": "Why?", "chosen_response": "Good.", "rejected_response": "Bad."},
    ".argilla_chat": LISTED,
    ".icr": {"input": "Why?", **PAIR},
    ".intel": {"question": "Why?", **PAIR},
    ".prompt_pairs": {"prompt": "Why?", **PAIR},
    ".ultra": {"prompt": "Why?", **LISTED},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("method", ["dpo", "ipo", "simpo", "orpo"])
def test_marked_texts(family, name, method):
    _, prompt, end = FAMILIES[family]
    expected = {"prompt": prompt, "chosen": f"Good.{end}", "rejected": f"Bad.{end}"}
    assert text_of({"type": family + name}, ROWS[name], rl=method) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [name for name in ROWS if name != ".argilla_chat"])
def test_marked_texts_with_a_system_text(family, name):
    system, prompt, _ = FAMILIES[family]
    assert (
        text_of({"type": family + name}, {"system": "Be brief.", **ROWS[name]}, rl="dpo")["prompt"] == system + prompt
    )
    for nothing in ("", None):
        assert text_of({"type": family + name}, {"system": nothing, **ROWS[name]}, rl="dpo")["prompt"] == prompt


def test_several_turns_are_all_in_the_prompt():
    earlier = dialogue("Hello.", "Hi")
    row = {"chosen": [*earlier, *dialogue("Good.")], "rejected": [*earlier, *dialogue("Bad.")]}
    text = text_of({"type": "chatml.argilla_chat"}, row, rl="dpo")
    opening = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    assert text == {"prompt": opening + CHATML_PROMPT, "chosen": "Good.<|im_end|>", "rejected": "Bad.<|im_end|>"}


def test_nectar_takes_rank_1_over_rank_2():
    answers = [{"answer": "worst", "rank": 3}, {"answer": "second", "rank": 2}, {"answer": "best", "rank": 1}]
    assert text_of({"type": "zephyr.nectar"}, {"prompt": "Why?", "answers": answers}, rl="dpo") == {
        "prompt": "<|system|>\n</s>\n<|user|>\nWhy?</s>\n<|assistant|>\n",
        "chosen": "best",
        "rejected": "second",
    }


@pytest.mark.parametrize("answer", [str, lambda text: {"role": "assistant", "content": text}, dialogue])
def test_chat_template_default(answer):
    row = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
        "chosen": answer("Good."),
        "rejected": answer("Bad."),
    }
    expected = {"prompt": CHATML_SYSTEM + CHATML_PROMPT, "chosen": "Good.<|im_end|>", "rejected": "Bad.<|im_end|>"}
    assert text_of({"type": "chat_template.default"}, row, rl="dpo", chat_template="chatml") == expected


def test_chat_template_takes_plain_text_as_one_user_turn():
    text = text_of({"type": "chat_template"}, {"messages": "Why?", **PAIR}, rl="dpo", chat_template="chatml")
    assert text["prompt"] == CHATML_PROMPT


def test_columns_properties_and_roles_have_other_names():
    entry = {
        "type": "chat_template.default",
        "field_messages": "talk.turns",
        "field_chosen": "better",
        "field_rejected": "worse",
        "message_property_mappings": {"role": "speaker", "content": "said"},
        "roles": {"user": ["customer"], "assistant": "agent", "system": ["boss"]},
    }
    row = {
        "talk": {"turns": [{"speaker": "boss", "said": "Be brief."}, {"speaker": "customer", "said": "Why?"}]},
        "better": {"speaker": "agent", "said": "Good."},
        "worse": {"speaker": "agent", "said": "Bad."},
    }
    text = text_of(entry, row, rl="dpo", chat_template="chatml")
    assert text == {"prompt": CHATML_SYSTEM + CHATML_PROMPT, "chosen": "Good.<|im_end|>", "rejected": "Bad.<|im_end|>"}


def test_an_unknown_role_is_named():
    row = {"messages": [{"role": "oracle", "content": "Why?"}], **PAIR}
    with pytest.raises(RowError, match="oracle") as caught:
        encoder({"type": "chat_template"}, rl="dpo", chat_template="chatml")(row)
    assert caught.value.key == "messages[0].role"


def test_chat_template_argilla_chat():
    text = text_of({"type": "chat_template.argilla_chat"}, LISTED, rl="dpo", chat_template="chatml")
    assert text == {"prompt": CHATML_PROMPT, "chosen": "Good.<|im_end|>", "rejected": "Bad.<|im_end|>"}


@pytest.mark.parametrize("name", ["chat_template.argilla", "orpo.chat_template"])
def test_orpo_takes_prompt_and_system_from_columns(name):
    row = {"system": "Be brief.", "prompt": "Why?", "chosen": dialogue("Good.", "x"), "rejected": dialogue("Bad.", "x")}
    text = text_of({"type": name}, row, rl="orpo", chat_template="chatml")
    assert text == {"prompt": CHATML_SYSTEM + CHATML_PROMPT, "chosen": "Good.<|im_end|>", "rejected": "Bad.<|im_end|>"}
    without = {key: row[key] for key in ("chosen", "rejected")}
    assert "user\nx<" in text_of({"type": name}, without, rl="orpo", chat_template="chatml")["prompt"]


def test_orpo_leaves_the_user_turns_of_longer_talks_alone():
    earlier = dialogue("Hello.", "Hi")
    row = {"prompt": "other", "chosen": [*earlier, *dialogue("Good.")], "rejected": [*earlier, *dialogue("Bad.")]}
    prompt = text_of({"type": "chat_template.argilla"}, row, rl="orpo", chat_template="chatml")["prompt"]
    assert "other" not in prompt
    assert prompt.count("<|im_start|>user") == 2


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_bradley_terry_folds_the_system_text_where_there_is_no_such_role(system):
    row = {"input": "Why?", **PAIR} | ({"system": system} if system else {})
    text = text_of({"type": "bradley_terry.chat_template"}, row, byte_tokenizer("gemma"), reward_model=True,
                   chat_template="gemma")  # fmt: skip
    opening = "Be brief.\n\n" if system else ""
    assert text == {
        "prompt": f"<bos><start_of_turn>user\n{opening}Why?<end_of_turn>\n<start_of_turn>model\n",
        "chosen": "Good.<end_of_turn>",
        "rejected": "Bad.<end_of_turn>",
    }


def test_user_defined():
    entry = {"type": {
        "field_prompt": "q", "field_system": "s", "field_chosen": "good", "field_rejected": "bad",
        "prompt_format": "[{system}] {{x}} {prompt} {y}", "chosen_format": "<{chosen}>",
        "rejected_format": "({rejected})",
    }}  # fmt: skip
    row = {"q": "{system}?", "s": "S", "good": "{chosen}", "bad": "B"}
    assert text_of(entry, row, rl="dpo") == {
        "prompt": "[S] {x} {system}? {y}",
        "chosen": "<{chosen}>",
        "rejected": "(B)",
    }
    del row["s"]
    assert text_of(entry, row, rl="dpo")["prompt"] == "[] {x} {system}? {y}"


@pytest.mark.parametrize("rl", ["dpo", "kto", "grpo"])
@pytest.mark.parametrize(
    ("form", "row", "text"),
    [
        ({"field_system": "s"}, {"s": "Be brief. "}, "Be brief. Why?"),
        ({"system_prompt": "Be kind.", "system_format": "<{system}>"}, {}, "<Be kind.>Why?"),
        ({"prompt_format": "{prompt} {system}", "system_format": "<{system}>"}, {"system": "S"}, "Why? <S>"),
        ({}, {}, "Why?"),
    ],
)
def test_the_system_text_of_a_user_defined_format_goes_first_unless_the_format_places_it(rl, form, row, text):
    given = {"prompt": "Why?", "chosen": " So.", "rejected": " No.", **row}
    given |= {} if rl != "kto" else {"completion": " So.", "label": True}
    assert text_of({"type": {"field_prompt": "prompt", **form}}, given, rl=rl)["prompt"] == text


@pytest.mark.parametrize("rl", ["dpo", "kto"])
def test_a_named_system_column_serves_conversations_without_a_system_turn(rl):
    entry = {"type": "chat_template", "field_system": "s"}
    row = {"messages": [{"role": "user", "content": "Why?"}], "s": "Be brief.", "chosen": "So.", "rejected": "No."}
    row |= {} if rl == "dpo" else {"completion": "So.", "label": True}
    keys = {"rl": rl, "chat_template": "chatml"}
    system = "<|im_start|>system\nBe brief.<|im_end|>"
    assert text_of(entry, row, **keys)["prompt"].startswith(system)
    assert "Be brief." not in text_of({**entry, "drop_system_message": True}, row, **keys)["prompt"]
    row["messages"] = [{"role": "system", "content": "Be kind."}, *row["messages"]]
    assert "Be brief." not in text_of(entry, row, **keys)["prompt"]


def test_nectar_has_a_system_text_where_one_is_named():
    row = {"prompt": "Why?", "s": "S", "answers": [{"answer": "a", "rank": 1}, {"answer": "b", "rank": 2}]}
    entry = {"type": "zephyr.nectar", "field_system": "s"}
    assert text_of(entry, row, rl="dpo")["prompt"].startswith("<|system|>\nS</s>")


@pytest.mark.parametrize("name", [None, "passthrough"])
def test_rows_without_a_type(name):
    entry = {} if name is None else {"type": name}
    assert text_of(entry, {"prompt": "Why? ", **PAIR, "margin": 2}, rl="dpo") == {
        "prompt": "Why? ",
        **PAIR,
        "margin": 2.0,
    }
    expected = {"prompt": CHATML_PROMPT, "chosen": "Good.<|im_end|>", "rejected": "Bad.<|im_end|>"}
    split = {"prompt": dialogue("")[:1], "chosen": dialogue("Good.")[1:], "rejected": dialogue("Bad.")[1:]}
    for row in (LISTED, split, {"prompt": "Why?", **LISTED}):
        assert text_of(entry, row, rl="dpo", chat_template="chatml") == expected


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("The sky is blue.", "The sky is green.", ("The sky is", " blue.", " green.")),
        ("I love cats", "I love cars", ("I love", " cats", " cars")),
        (
            "\n\nHuman: Hi\n\nAssistant: I am well",
            "\n\nHuman: Hi\n\nAssistant: I am not",
            ("\n\nHuman: Hi\n\nAssistant:", " I am well", " I am not"),
        ),
    ],
)
def test_texts_without_a_prompt_share_their_beginning(chosen, rejected, expected):
    assert shared_start(chosen, rejected) == expected


@pytest.mark.parametrize("texts", [("a b", "a b"), ("x", "y"), ("cat", "cats")])
def test_texts_that_share_no_prompt_are_refused(texts):
    with pytest.raises(RowError):
        shared_start(*texts)


@pytest.mark.parametrize("name", ["chatml.intel", "bradley_terry.llama3.icr", None])
def test_any_pair_format_serves_a_reward_model(name):
    row = {"question": "Why?", "input": "Why?", "prompt": "Why?", **PAIR}
    (record,) = encoder({"type": name} if name else {}, reward_model=True)(row)
    assert set(record.columns) == {"prompt_ids", "chosen_ids", "rejected_ids"}


@pytest.mark.parametrize("entry", [{}, {"as_messages": True}, {"type": {"field_chosen": "good"}, "as_messages": True}])
def test_messages_in_the_cells_of_a_csv_are_messages(entry):
    said = {role: dialogue(text) for role, text in (("chosen", "Good."), ("rejected", "Bad."))}
    rows = [said, {"prompt": dialogue("")[:1], **{role: listed[1:] for role, listed in said.items()}}]
    read = encoder(entry, rl="dpo", chat_template="chatml")
    for row in rows[1:] if "as_messages" in entry else rows:
        named = {"good" if role == "chosen" and "type" in entry else role: value for role, value in row.items()}
        in_cells = {name: json.dumps(value) for name, value in named.items()}
        assert [one.columns for one in read(in_cells)] == [one.columns for one in read(named)]
    with pytest.raises(RowError, match=r"'rejected': expected messages as JSON text, got them as Python prints a list"):
        read({**rows[1], "good": "x", "rejected": str(said["rejected"])})
    odd = {"prompt": "Why?", "chosen": '[{"role": "x"}]', "good": "x", "rejected": '[{"a": 1}]'}  # texts
    assert read(odd)
