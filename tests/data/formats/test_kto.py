"""Rows with one answer and a verdict, and pairs that become two of them."""

import pytest

from made_tokenizers import encoder, text_of
from upweight.data.encode import RowError

FAMILIES = {
    "chatml": ("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", "Good.<|im_end|>"),
    "llama3": (
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "Good.<|eot_id|>",
    ),
}
USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Good."}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "row"),
    [
        (".argilla", {"instruction": "Why?", "completion": "Good."}),
        (".argilla_chat", {"completion": [USER, ANSWER]}),
        (".argilla_chat", {"chosen": [USER], "completion": [ANSWER]}),
        (".intel", {"question": "Why?", "completion": "Good."}),
        (".prompt_pairs", {"prompt": "Why?", "completion": "Good."}),
        (".ultra", {"prompt": "Why?", "completion": "Good."}),
    ],
)
@pytest.mark.parametrize(("label", "read"), [(True, True), (0, False), ("true", True)])
def test_marked_texts(family, name, row, label, read):
    prompt, completion = FAMILIES[family]
    expected = {"prompt": prompt, "completion": completion, "label": read}
    assert text_of({"type": family + name}, {**row, "label": label}, rl="kto") == expected


def test_a_system_text_comes_first():
    row = {"system": "S", "question": "Why?", "completion": "Good.", "label": True}
    prompt = text_of({"type": "chatml.intel"}, row, rl="kto")["prompt"]
    assert prompt == "<|im_start|>system\nS<|im_end|>\n" + FAMILIES["chatml"][0]


@pytest.mark.parametrize("system", [{}, {"system": None}, {"system": "S"}])
def test_user_defined(system):
    entry = {
        "type": {"field_label": "verdict", "prompt_format": "{system}|{prompt}", "completion_format": "{completion}!"}
    }
    row = {"prompt": "p", "completion": "c", "verdict": False, **system}
    expected = {"prompt": f"{system.get('system') or ''}|p", "completion": "c!", "label": False}
    assert text_of(entry, row, rl="kto") == expected


@pytest.mark.parametrize(
    ("entry", "row"),
    [
        ({"type": "chatml.intel"}, {"question": "Why?", "chosen": "Good.", "rejected": "Bad."}),
        ({"type": "chatml.icr"}, {"input": "Why?", "chosen": "Good.", "rejected": "Bad."}),
        ({"type": "chatml"}, {"prompt": "Why?", "chosen": "Good.", "rejected": "Bad."}),
        (
            {"type": "chat_template", "field_rejected": "worse"},
            {"messages": [USER], "chosen": "Good.", "worse": "Bad."},
        ),
    ],
)
def test_pairs_become_two_examples(entry, row):
    wanted, unwanted = encoder(entry, rl="kto", chat_template="chatml")(row)
    prompt = FAMILIES["chatml"][0]
    assert wanted.text == {"prompt": prompt, "completion": "Good.<|im_end|>", "label": True}
    assert unwanted.text == {"prompt": prompt, "completion": "Bad.<|im_end|>", "label": False}
    assert set(wanted.columns) == {"prompt_ids", "completion_ids", "label"}


@pytest.mark.parametrize(
    "row", [{"messages": [USER], "completion": "Good."}, {"messages": [USER], "completion": [ANSWER]}]
)
def test_chat_template(row):
    text = text_of({"type": "chat_template"}, {**row, "label": True}, rl="kto", chat_template="chatml")
    assert text == {"prompt": FAMILIES["chatml"][0], "completion": "Good.<|im_end|>", "label": True}


def test_rows_without_a_type():
    assert text_of({}, {"prompt": "p", "completion": "c", "label": True}, rl="kto") == {
        "prompt": "p",
        "completion": "c",
        "label": True,
    }
    row = {"prompt": [USER], "completion": [ANSWER], "label": False}
    assert text_of({}, row, rl="kto", chat_template="chatml")["completion"] == "Good.<|im_end|>"


def test_a_missing_verdict_is_named():
    with pytest.raises(RowError) as caught:
        encoder({"type": "chatml.intel"}, rl="kto")({"question": "Why?", "completion": "Good."})
    assert caught.value.key == "label"
    assert "'chosen', 'rejected'" in str(caught.value)


def test_words_of_labels_stand_for_true_and_false():
    values = {"good": True, "5": True, "bad": False, "": None, "neutral": None}
    read = encoder({"type": {"field_label": "verdict", "label_values": values}}, rl="kto")
    row = {"prompt": "p", "completion": "c"}
    marks = ("good", " good ", 5, "bad", "", None, "neutral")
    labels = [[one.text["label"] for one in read({**row, "verdict": mark})] for mark in marks]
    assert labels == [[True], [True], [True], [False], [], [], []]
    with pytest.raises(RowError, match="'verdict': expected 'good', '5', 'bad', '', 'neutral', got 'Good'; `label_val"):
        read({**row, "verdict": "Good"})


def test_ratings_from_a_number_on_are_good_and_rows_without_one_are_left_out():
    read = encoder({"type": {"field_label": "stars", "label_from": 3.5}}, rl="kto")
    row = {"prompt": "p", "completion": "c"}
    labels = [
        [one.text["label"] for one in read({**row, "stars": mark})] for mark in (4, "3,5", " 3", 0, "", None, "nan")
    ]
    assert labels == [[True], [True], [False], [False], [], [], []]


WINNER = {"field_winner": "better", "winner_values": {"A": "completion", "B": "other", "tie": None}}
ROW = {"prompt": "p", "completion": "first", "other": "second"}


@pytest.mark.parametrize("entry", [{"type": WINNER}, {"type": WINNER, "as_messages": True}])
def test_the_better_of_two_answers_is_chosen(entry):
    for word, chosen in (("A", "first"), ("B", "second")):
        row = {**ROW, "better": word}
        pair = text_of(entry, row, rl="dpo", chat_template="chatml")
        assert pair["chosen"].startswith(chosen)
        assert pair["rejected"].startswith("second" if word == "A" else "first")
        good, bad = encoder(entry, rl="kto", chat_template="chatml")(row)
        assert good.text["completion"] == pair["chosen"]
        assert (bad.text["completion"], bad.text["label"]) == (pair["rejected"], False)
    assert encoder(entry, rl="dpo", chat_template="chatml")({**ROW, "better": "tie"}) == []
    with pytest.raises(RowError, match="'other': expected an answer, got nothing"):
        encoder(entry, rl="dpo", chat_template="chatml")({**ROW, "other": None, "better": "A"})
