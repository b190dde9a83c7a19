"""Token ids of records: one BOS, one end, and boundaries found by tokens."""

import pytest

from made_tokenizers import EOS, byte_tokenizer, encoder
from upweight.data.encode import RowError
from upweight.errors import UserError

PAIR = {"prompt": "The sky is", "chosen": " blue", "rejected": " green"}


def whole(tokenizer, record, side="chosen"):
    return tokenizer.decode(record.columns["prompt_ids"] + record.columns[f"{side}_ids"])


@pytest.mark.parametrize("family", ["llama3", "gemma", "plain", "chatml"])
@pytest.mark.parametrize("entry", [{}, {"type": "chatml.prompt_pairs"}, {"type": "llama3.prompt_pairs"}])
def test_one_bos_where_the_tokenizer_has_one(family, entry):
    tokenizer = byte_tokenizer(family)
    (record,) = encoder(entry, tokenizer, rl="dpo")(PAIR)
    ids = record.columns["prompt_ids"]
    assert ids.count(tokenizer.bos_token_id) == (family != "chatml")
    assert record.pinned == (family != "chatml")
    assert tokenizer.bos_token is None or ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("name", ["llama3", "chatml"])
def test_a_bos_of_the_template_is_not_doubled(name):
    tokenizer = byte_tokenizer("llama3")
    row = {"messages": [{"role": "user", "content": "hi"}], "chosen": "a", "rejected": "b"}
    (record,) = encoder({"type": "chat_template"}, tokenizer, rl="dpo", chat_template=name)(row)
    assert record.columns["prompt_ids"].count(tokenizer.bos_token_id) == 1
    doubled = {**PAIR, "prompt": "<|begin_of_text|><|begin_of_text|>The sky is"}
    (record,) = encoder({}, tokenizer, rl="dpo")(doubled)
    assert record.columns["prompt_ids"].count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("family", EOS)
def test_an_end_is_added_to_the_tokens_and_not_to_the_text(family):
    tokenizer = byte_tokenizer(family)
    (record,) = encoder({}, tokenizer, rl="dpo")(PAIR)
    assert record.text == PAIR
    for side in ("chosen", "rejected"):
        assert record.columns[f"{side}_ids"][-1] == tokenizer.eos_token_id
        assert record.columns[f"{side}_ids"].count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(
    ("family", "end"), [("llama3", "<|eot_id|>"), ("chatml", "<|im_end|>"), ("gemma", "<end_of_turn>")]
)
def test_an_answer_that_ends_by_itself_gets_no_second_end(family, end):
    tokenizer = byte_tokenizer(family)
    (record,) = encoder({}, tokenizer, rl="dpo")({**PAIR, "chosen": f" blue{end}"})
    assert tokenizer.decode(record.columns["chosen_ids"]) == f" blue{end}"


def test_ends_that_the_config_names():
    tokenizer = byte_tokenizer("plain")
    (record,) = encoder({}, tokenizer, rl="dpo", eot_tokens=["."])({**PAIR, "chosen": " blue."})
    assert tokenizer.decode(record.columns["chosen_ids"]) == " blue."
    with pytest.raises(UserError, match="does not know"):
        encoder({}, byte_tokenizer("plain"), rl="dpo", eot_tokens=["<|none|>"])


@pytest.mark.parametrize("cut", range(1, 22))
def test_prompt_and_answer_join_to_the_tokens_of_the_whole_text(cut):
    text = "The lazy dog jumps over"
    tokenizer = byte_tokenizer("plain")
    row = {"prompt": text[:cut], "chosen": text[cut:], "rejected": "?"}
    (record,) = encoder({}, tokenizer, rl="dpo")(row)
    joined = record.columns["prompt_ids"] + record.columns["chosen_ids"]
    assert joined == [
        tokenizer.bos_token_id,
        *tokenizer(text, add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]
    assert text[:cut].startswith(tokenizer.decode(record.columns["prompt_ids"][1:]))
    assert whole(tokenizer, record, "rejected") == f"<s>{text[:cut]}?</s>"


def test_an_answer_with_the_prompts_words_is_not_confused():
    tokenizer = byte_tokenizer("chatml")
    row = {"messages": "yes", "chosen": "yes", "rejected": "assistant"}
    (record,) = encoder({"type": "chat_template"}, tokenizer, rl="dpo", chat_template="chatml")(row)
    assert tokenizer.decode(record.columns["chosen_ids"]) == "yes<|im_end|>"
    assert tokenizer.decode(record.columns["rejected_ids"]) == "assistant<|im_end|>"
    assert record.text["prompt"] == "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n"


def test_many_rows_at_once_are_the_rows_one_by_one():
    made = encoder({}, byte_tokenizer("llama3"), rl="kto")
    rows = [PAIR, {"prompt": "a", "completion": "b", "label": True}, {**PAIR, "prompt": "Grass is"}]
    assert made.encode_many(rows) == [made(row) for row in rows]


@pytest.mark.parametrize("margin", ["much", float("nan"), True])
def test_a_margin_is_a_number(margin):
    with pytest.raises(RowError) as caught:
        encoder({}, rl="dpo")({**PAIR, "margin": margin})
    assert caught.value.key == "margin"
