import dataclasses

import pytest
from datasets import Dataset

from parity_script import ROWS, TEMPLATE, made_tokenizer
from upweight import DPOConfig, KTOConfig, PRMConfig, RewardConfig, SFTConfig
from upweight.data.prepare import longest_of, prepare_given
from upweight.errors import UserError
from upweight.train.api.as_config import build_config
from upweight.train.api.inputs import reader

TOKENIZER = made_tokenizer(TEMPLATE)


def prepared(config, rows, folder, **settings):
    args = config(output_dir=str(folder), **settings)
    given, section = reader(args, None)(rows, "rows")
    made = dataclasses.replace(build_config(args), data=section)
    return prepare_given(made, TOKENIZER, given, "rows", trains=True, keep=False).train


def trained_text(row):
    return TOKENIZER.decode([token for token, scored in zip(row["input_ids"], row["loss_mask"], strict=True) if scored])


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        ("text", {}, "hy? As it rains.<|im_end|>"),
        ("completions", {}, " As it rains.<|im_end|>"),
        ("completions", {"completion_only_loss": False}, "hy? As it rains.<|im_end|>"),
        ("messages", {"assistant_only_loss": True}, "As it rains.<|im_end|>No.<|im_end|>"),
        ("talks", {}, "As it rains.<|im_end|><|im_start|>user\nSure?<|im_end|><|im_start|>assistant\nNo.<|im_end|>"),
        ("talks", {"assistant_only_loss": True}, "As it rains.<|im_end|>No.<|im_end|>"),
        (
            "talks",
            {"assistant_only_loss": True, "completion_only_loss": False},
            "Hello.<|im_end|>As it rains.<|im_end|>No.<|im_end|>",
        ),
        ("masked ids", {}, "As it rains.<|im_end|>No.<|im_end|>"),
        ("masked ids", {"completion_only_loss": True}, "No.<|im_end|>"),
        ("masked ids", {"assistant_only_loss": True}, "As it rains.<|im_end|>No.<|im_end|>"),
    ],
)
def test_what_sft_trains_on(rows, settings, expected, tmp_path):
    assert trained_text(prepared(SFTConfig, ROWS[rows], tmp_path, **settings)[0]) == expected


def test_conversations_are_trained_on_whole_by_default(tmp_path):
    assert trained_text(prepared(SFTConfig, ROWS["messages"], tmp_path)[0]).startswith("user\nWhy?<|im_end|>")


@pytest.mark.parametrize("setting", ["completion_only_loss", "assistant_only_loss"])
def test_masks_that_rows_cannot_have_are_refused(setting, tmp_path):
    with pytest.raises(UserError, match=setting):
        prepared(SFTConfig, ROWS["text"], tmp_path, **{setting: True})
    ids = [{"input_ids": row["input_ids"]} for row in ROWS["masked ids"]]
    with pytest.raises(UserError, match=setting):
        prepared(SFTConfig, ids, tmp_path, **{setting: True})


def test_conversations_have_another_argument_for_answers_alone(tmp_path):
    with pytest.raises(UserError, match="For messages, set assistant_only_loss=True"):
        prepared(SFTConfig, ROWS["messages"], tmp_path, completion_only_loss=True)


def test_texts_have_no_turns_of_an_assistant(tmp_path):
    with pytest.raises(UserError, match="'prompt': expected messages"):
        prepared(SFTConfig, ROWS["completions"], tmp_path, assistant_only_loss=True)


@pytest.mark.parametrize("mask", [[1, 0], [2] * 3, "110"])
def test_masks_fit_their_tokens(mask, tmp_path):
    with pytest.raises(UserError, match="'assistant_masks': expected"):
        prepared(SFTConfig, [{"input_ids": [5, 6, 7], "assistant_masks": mask}], tmp_path)


def test_rows_of_which_nothing_is_left_to_train_on_are_dropped(tmp_path):
    rows = [{"input_ids": [5, 6, 7, 8], "assistant_masks": mask} for mask in ([0, 0, 0, 1], [0, 1, 0, 1])]
    assert list(prepared(SFTConfig, rows, tmp_path, max_length=3)) == [
        {"input_ids": [5, 6, 7], "loss_mask": [False, True, False]}
    ]


def test_another_text_field(tmp_path):
    rows = [{"body": "Why not?"}]
    assert trained_text(prepared(SFTConfig, rows, tmp_path, dataset_text_field="body")[0]) == "hy not?<|im_end|>"


def test_a_text_field_that_rows_lack_is_named(tmp_path):
    with pytest.raises(UserError, match=r"row 0, 'body': expected messages, .* or body\. The row has text\."):
        prepared(SFTConfig, [{"text": "Why not?"}], tmp_path, dataset_text_field="body")


def test_a_text_field_that_messages_hide_is_refused_in_words_of_scripts(tmp_path):
    talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Rain."}]
    expected = r"dataset_text_field: 'body' is not read, since the rows have 'messages'.*columns\(\['messages'\]\)"
    with pytest.raises(UserError, match=expected):
        prepared(SFTConfig, [{"messages": talk, "body": "Why not?"}], tmp_path, dataset_text_field="body")


def test_a_text_beside_messages_or_completions_is_not_read_and_one_beside_instructions_is(tmp_path):
    talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Rain."}]
    for other in ({"messages": talk}, {"prompt": "Why?", "completion": "Rain."}):
        assert "unread" not in trained_text(prepared(SFTConfig, [{**other, "text": "unread"}], tmp_path)[0])
    rows = [{"instruction": "Why?", "input": "", "output": "Rain.", "text": "Why not?"}]
    assert trained_text(prepared(SFTConfig, rows, tmp_path)[0]) == "hy not?<|im_end|>"


def test_long_rows_are_cut_and_for_reward_models_dropped(tmp_path):
    cut, whole = (
        prepared(DPOConfig, ROWS["pairs"], tmp_path, max_length=16),
        prepared(DPOConfig, ROWS["pairs"], tmp_path),
    )
    assert len(cut) == len(whole)
    assert longest_of(cut) == 16 < longest_of(whole)
    assert 0 < len(prepared(RewardConfig, ROWS["pairs"], tmp_path, max_length=20)) < len(whole)
    assert longest_of(prepared(DPOConfig, ROWS["pairs"], tmp_path, max_length=None), None) == longest_of(whole)


def test_nothing_left_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no rows are left"):
        prepared(DPOConfig, ROWS["pairs"], tmp_path, max_length=2)


def test_margins_labels_and_steps_arrive(tmp_path):
    assert prepared(RewardConfig, ROWS["margins"], tmp_path)[3]["margin"] == pytest.approx(0.3)
    assert "margin" not in prepared(RewardConfig, ROWS["pairs"], tmp_path).column_names
    assert [row["label"] for row in prepared(KTOConfig, ROWS["labelled"], tmp_path)][:3] == [False, True, True]
    rows = [{"prompt": "Go.", "completions": ["a", "b"], "labels": [True, False]}]
    labels = prepared(PRMConfig, rows, tmp_path, train_on_last_step_only=True, step_separator="#")[0]["labels"]
    assert [label for label in labels if label != -100] == [0]


@pytest.mark.parametrize("ending", ["ids", "input_ids"])
def test_token_ids_of_reward_models_are_taken_as_they_are(ending, tmp_path):
    rows = [
        {f"chosen_{ending}": [5, 6, 7], f"rejected_{ending}": [5, 6], "margin": 0.5},
        {f"chosen_{ending}": [8], f"rejected_{ending}": [9, 5], "margin": None},
    ]
    one, other = prepared(RewardConfig, rows, tmp_path)
    assert one == {"prompt_ids": [5], "chosen_ids": [6, 7], "rejected_ids": [6], "margin": 0.5}
    assert other == {"prompt_ids": [], "chosen_ids": [8], "rejected_ids": [9, 5], "margin": None}
    with pytest.raises(UserError, match="'chosen'"):
        prepared(DPOConfig, rows, tmp_path)


def test_token_ids_of_steps_are_taken_as_they_are(tmp_path):
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 1, 0]}]
    assert prepared(PRMConfig, rows, tmp_path)[0] == {"input_ids": [5, 6, 7], "labels": [-100, 1, 0]}
    assert prepared(PRMConfig, rows, tmp_path, max_length=2)[0]["labels"] == [-100, 1]
    with pytest.raises(UserError, match="train_on_last_step_only"):
        prepared(PRMConfig, rows, tmp_path, train_on_last_step_only=True)
    with pytest.raises(UserError, match="'labels': expected true, false or a class"):
        prepared(PRMConfig, [{"input_ids": [5], "labels": [-1]}], tmp_path)


def test_columns_of_other_names_are_listed_with_the_remedy(tmp_path):
    with pytest.raises(UserError, match=r"The row has q, chosen, rejected. `rename_column`"):
        prepared(DPOConfig, [{"q": "Why?", "chosen": "x", "rejected": "y"}], tmp_path)


def test_rows_may_be_formatted_for_torch_or_come_through_a_transform(tmp_path):
    ids = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]).with_format("torch", ["input_ids"])
    assert prepared(SFTConfig, ids, tmp_path)[0] == {"input_ids": [5, 6, 7], "loss_mask": [False, True, True]}
    loud = Dataset.from_list([{"text": "why?"}]).with_transform(
        lambda rows: {"text": [t.upper() for t in rows["text"]]}
    )
    assert trained_text(prepared(SFTConfig, loud, tmp_path)[0]) == "HY?<|im_end|>"


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_not_left_out_in_silence(column, tmp_path):
    with pytest.raises(UserError, match=f"rows: the column '{column}' holds images.*remove it"):
        prepared(SFTConfig, [{**ROWS["messages"][0], column: "cat.png"}], tmp_path)


def test_an_error_in_a_row_has_one_traceback(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "label": "good"}] * 2
    with pytest.raises(UserError, match="in a script, map them to True and False") as error:
        prepared(KTOConfig, rows, tmp_path)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__
