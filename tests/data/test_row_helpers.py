import pytest
from datasets import Dataset, DatasetDict

import upweight
from made_tokenizers import byte_tokenizer
from upweight.errors import UserError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
ASKED = [{"role": "user", "content": "Which colour?"}]
BLUE, GREEN = [{"role": "assistant", "content": "It is blue."}], [{"role": "assistant", "content": "It is green."}]
USER, ANSWER = "<|im_start|>user\nWhich colour?<|im_end|>\n", "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer("chatml", TEMPLATE)


def test_rows_of_messages_become_text(tokenizer):
    made = upweight.apply_chat_template
    assert made({"messages": ASKED + BLUE}, tokenizer) == {"text": f"{USER}{ANSWER}It is blue.<|im_end|>\n"}
    assert made({"prompt": ASKED}, tokenizer) == {"prompt": f"{USER}{ANSWER}<think>"}
    pair = made({"prompt": ASKED, "chosen": BLUE, "rejected": GREEN}, tokenizer)
    assert pair["prompt"] == USER + ANSWER
    assert (pair["chosen"], pair["rejected"]) == ("It is blue.<|im_end|>\n", "It is green.<|im_end|>\n")
    assert made({"prompt": ASKED, "completion": BLUE, "label": True}, tokenizer)["label"] is True
    assert made({"prompt": ASKED + BLUE}, tokenizer)["prompt"].endswith("It is blue.")
    with pytest.raises(KeyError, match="no chat template"):
        made({"completion": BLUE}, tokenizer)
    with pytest.raises(UserError, match="last message"):
        made({"prompt": [{"role": "system", "content": "x"}]}, tokenizer)


def test_plain_rows_stay(tokenizer):
    row = {"prompt": "The sky is", "completion": " blue."}
    assert upweight.maybe_apply_chat_template(row, tokenizer) == row
    assert not upweight.is_conversational(row)
    assert upweight.is_conversational({"prompt": ASKED})
    assert upweight.maybe_extract_prompt(row) == row


def test_prompts_are_taken_out_of_pairs():
    wanted = {"prompt": ASKED, "chosen": BLUE, "rejected": GREEN}
    assert upweight.extract_prompt({"chosen": ASKED + BLUE, "rejected": ASKED + GREEN}) == wanted
    assert (
        upweight.maybe_extract_prompt({"prompt": "as text", "chosen": ASKED + BLUE, "rejected": ASKED + GREEN})
        == wanted
    )
    assert upweight.maybe_extract_prompt(wanted) == wanted
    text = upweight.extract_prompt({"chosen": "The sky is blue", "rejected": "The sky is green"})
    assert text == {"prompt": "The sky is", "chosen": " blue", "rejected": " green"}


def test_from_and_value_are_renamed():
    row = {"conversations": [{"from": "user", "value": "x"}]}
    assert upweight.is_conversational_from_value(row)
    assert upweight.maybe_convert_to_chatml(row) == {"messages": [{"role": "user", "content": "x"}]}
    assert "conversations" in row


def test_pairs_become_single_completions():
    pairs = Dataset.from_dict({"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"], "more": [1, 2]})
    single = upweight.maybe_unpair_preference_dataset(DatasetDict(train=pairs))["train"]
    assert single["completion"][:] == ["c", "d", "e", "f"]
    assert single["label"][:] == [True, True, False, False]
    assert single["more"][:] == [1, 2, 1, 2]
    assert upweight.maybe_unpair_preference_dataset(single) is single


def test_rows_are_packed_where_they_fit_best():
    rows = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11], []]
    given = Dataset.from_dict({"input_ids": rows, "mask": rows})
    packed = upweight.pack_dataset(given, 4)
    assert packed["input_ids"][:] == packed["mask"][:] == [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]]
    assert packed["seq_lengths"][:] == [[4], [3, 1], [2]]
    split = upweight.pack_dataset(given, 4, "bfd_split")
    assert split["input_ids"][:] == [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]]
    assert upweight.pack_dataset(given, 4, "wrapped")["input_ids"][:] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
    assert upweight.pack_dataset(given.with_format("torch"), 4).format["type"] == "torch"
    assert upweight.truncate_dataset(given, 2)["input_ids"][:] == [[1, 2], [6, 7], [8, 9], [11], []]
    with pytest.raises(UserError, match="strategy"):
        upweight.pack_dataset(given, 4, "tight")
    with pytest.raises(TypeError, match="lists of tokens"):
        upweight.pack_dataset(Dataset.from_dict({"input_ids": [[1]], "n": [1]}), 4)
