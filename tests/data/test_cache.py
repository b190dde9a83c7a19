"""A cache that is whole or not there, and names that follow the content."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from made_tokenizers import byte_tokenizer
from upweight import row_rules
from upweight.data.cache import code_digest, digest, tokenizer_digest, write_folder
from upweight.errors import UserError
from upweight.runs.checkpoints import WHOLE, is_whole


def fill(text):
    return lambda place: (place / "rows").write_text(text)


def test_a_folder_appears_whole(tmp_path):
    folder = tmp_path / "deep" / "key"
    write_folder(folder, fill("rows"), replace=False)
    assert is_whole(folder)
    assert (folder / "rows").read_text() == "rows"
    assert [file.name for file in folder.parent.iterdir()] == ["key"]


def test_work_that_fails_leaves_nothing(tmp_path):
    def fail(place):
        (place / "rows").write_text("half")
        raise UserError("a bad row")

    with pytest.raises(UserError, match="a bad row"):
        write_folder(tmp_path / "key", fail, replace=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "no manifest", "bad manifest"])
def test_damage_is_noticed_and_mended(tmp_path, damage):
    folder = tmp_path / "key"
    write_folder(folder, fill("rows"), replace=False)
    if damage in ("cut", "changed"):
        (folder / "rows").write_text("ro" if damage == "cut" else "rowz")
    elif damage == "missing":
        (folder / "rows").unlink()
    elif damage == "no manifest":
        (folder / WHOLE).unlink()
    else:
        (folder / WHOLE).write_text("[1")
    assert not is_whole(folder)
    write_folder(folder, fill("again"), replace=False)
    assert is_whole(folder)
    assert (folder / "rows").read_text() == "again"


def test_who_comes_second_keeps_what_is_there_unless_told(tmp_path):
    write_folder(tmp_path / "key", fill("first"), replace=False)
    write_folder(tmp_path / "key", fill("second"), replace=False)
    assert (tmp_path / "key" / "rows").read_text() == "first"
    write_folder(tmp_path / "key", fill("third"), replace=True)
    assert (tmp_path / "key" / "rows").read_text() == "third"


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"dataset_prepared_path: .* cannot be written"):
        write_folder(tmp_path / "file" / "key", fill("rows"), replace=False)


def test_digests_follow_content_and_not_order():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


def test_a_tokenizer_is_named_by_its_content(tmp_path):
    tokenizer = byte_tokenizer()
    name = tokenizer_digest(tokenizer)
    tokenizer.save_pretrained(tmp_path / "here")
    assert tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path / "here")) == tokenizer_digest(
        AutoTokenizer.from_pretrained(tmp_path / "here")
    )
    tokenizer("some text", truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == name
    tokenizer.chat_template = "{{ messages }}"
    with_template = tokenizer_digest(tokenizer)
    assert with_template != name
    tokenizer.eos_token = "<|im_start|>"
    assert tokenizer_digest(tokenizer) != with_template
    assert tokenizer_digest(byte_tokenizer("llama3")) != name


def test_changed_rules_about_rows_make_new_rows(tmp_path, monkeypatch):
    before = code_digest()
    changed = tmp_path / "row_rules.py"
    changed.write_text(Path(row_rules.__file__).read_text() + "# another limit\n")
    monkeypatch.setattr(row_rules, "__file__", str(changed))
    code_digest.cache_clear()
    assert code_digest() != before
    monkeypatch.undo()
    code_digest.cache_clear()
    assert code_digest() == before
