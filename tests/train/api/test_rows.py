import pytest

from parity_script import ROWS, TEMPLATE, made_tokenizer
from upweight import DPOConfig, KTOConfig, PRMConfig, RewardConfig, SFTConfig
from upweight.errors import UserError
from upweight.train.api.rows import as_dataset, longest, prepare_rows

TOKENIZER = made_tokenizer(TEMPLATE, bos=False)


def prepared(config, rows, folder, **settings):
    args = config(output_dir=str(folder), **settings)
    return prepare_rows(as_dataset(rows, "rows"), args, args.method(), TOKENIZER, "rows")


def trained_text(row):
    return TOKENIZER.decode([token for token, scored in zip(row["ids"], row["scored"], strict=True) if scored])


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        ("text", {}, "hy? As it rains.<|im_end|>"),
        ("completions", {}, " As it rains.<|im_end|>"),
        ("completions", {"completion_only_loss": False}, "hy? As it rains.<|im_end|>"),
        ("messages", {"assistant_only_loss": True}, "As it rains.<|im_end|>No.<|im_end|>"),
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


def test_another_text_field(tmp_path):
    rows = [{"body": "Why not?"}]
    assert trained_text(prepared(SFTConfig, rows, tmp_path, dataset_text_field="body")[0]) == "hy not?<|im_end|>"


def test_long_rows_are_cut_and_for_reward_models_dropped(tmp_path, caplog):
    cut, whole = (
        prepared(DPOConfig, ROWS["pairs"], tmp_path, max_length=16),
        prepared(DPOConfig, ROWS["pairs"], tmp_path),
    )
    assert len(cut) == len(whole)
    assert longest(cut) == 16 < longest(whole)
    assert "max_length" in caplog.text
    assert 0 < len(prepared(RewardConfig, ROWS["pairs"], tmp_path, max_length=20)) < len(whole)
    assert longest(prepared(DPOConfig, ROWS["pairs"], tmp_path, max_length=None), None) == longest(whole)


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
