"""A checkpoint counts when all of it is there."""

import json

import pytest

from upweight.errors import UserError
from upweight.runs.checkpoints import (
    checkpoints_of,
    damage,
    is_whole,
    last_whole_checkpoint,
    mark_whole,
    named_checkpoint,
    nothing_to_resume,
    set_aside,
    step_of,
    write_text,
)


def made(run, step, whole=True):
    folder = run / f"checkpoint-{step}"
    (folder / "inner").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 50)
    (folder / "inner" / "state.pt").write_bytes(b"y" * 20)
    if whole:
        mark_whole(folder)
    return folder


def test_whole_means_every_file_at_its_size(tmp_path):
    folder = made(tmp_path, 5)
    assert is_whole(folder)
    sizes = {name: size for name, (size, _) in json.loads((folder / "whole.json").read_text()).items()}
    assert sizes == {"inner/state.pt": 20, "model.safetensors": 50}
    (folder / "inner" / "state.pt").write_bytes(b"y" * 19)
    assert not is_whole(folder)
    (folder / "inner" / "state.pt").unlink()
    assert not is_whole(folder)


@pytest.mark.parametrize("place", [0, 25, 49])
def test_one_changed_byte_is_damage_and_the_checkpoint_before_it_is_taken(place, tmp_path, caplog):
    before, folder = made(tmp_path, 5), made(tmp_path, 10)
    content = bytearray(b"x" * 50)
    content[place] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert damage(folder) == "model.safetensors holds other bytes than were written"
    assert last_whole_checkpoint(tmp_path) == before
    assert "checkpoint-10 is passed over: model.safetensors holds other bytes" in caplog.text


def test_a_list_of_an_earlier_version_has_sizes_alone(tmp_path):
    folder = made(tmp_path, 5)
    (folder / "whole.json").write_text('{"inner/state.pt": 20, "model.safetensors": 50}')
    assert is_whole(folder)
    (folder / "model.safetensors").write_bytes(b"x" * 49)
    assert not is_whole(folder)


ODD_LISTS = (
    '{"model.safetensors": [50]}', '{"model.safetensors": ["LlamaForCausalLM"]}', '{"model.safetensors": null}',
    '{"model.safetensors": [50, null]}', json.dumps({"x" * 300: 3}), json.dumps({"a\0b": 3}), "[" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '["model.safetensors"]', '{"../nowhere": 3}', *ODD_LISTS])
def test_a_broken_list_is_not_whole(text, tmp_path):
    folder = made(tmp_path, 5)
    (folder / "whole.json").write_text(text)
    assert not is_whole(folder)


def test_marking_again_lists_the_same_files(tmp_path):
    folder = made(tmp_path, 5)
    mark_whole(folder)
    assert is_whole(folder)


def test_the_newest_whole_one_is_taken_by_number(tmp_path, caplog):
    for step in (4, 8, 12):
        made(tmp_path, step)
    made(tmp_path, 100, whole=False)
    (tmp_path / "checkpoint-best").mkdir()
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-12"
    assert "checkpoint-100 is passed over: it has no readable whole.json" in caplog.text
    assert [step for step, _ in checkpoints_of(tmp_path)] == [100, 12, 8, 4]
    assert last_whole_checkpoint(tmp_path / "nowhere") is None
    assert step_of(tmp_path / "checkpoint-best") is None


def test_a_named_checkpoint_must_be_whole(tmp_path):
    assert named_checkpoint(str(made(tmp_path, 3))) == tmp_path / "checkpoint-3"
    with pytest.raises(UserError, match=r"is damaged: it has no readable whole\.json"):
        named_checkpoint(str(made(tmp_path, 4, whole=False)))
    with pytest.raises(UserError, match="is no checkpoint"):
        named_checkpoint(str(tmp_path))


def test_later_checkpoints_are_set_aside_each_time_in_a_new_place(tmp_path, caplog):
    for step in (4, 8, 12):
        made(tmp_path, step)
    set_aside(tmp_path, 8)
    assert "1 checkpoint after step 8 is now in" in caplog.text
    assert "superseded-1 (0.00 GB), and not resumed from; delete this folder when you need the space" in caplog.text
    made(tmp_path, 12)
    set_aside(tmp_path, 4)
    set_aside(tmp_path, 4)
    assert [step for step, _ in checkpoints_of(tmp_path)] == [4]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("superseded-*/*")) == [
        "superseded-1/checkpoint-12", "superseded-2/checkpoint-12", "superseded-2/checkpoint-8",
    ]  # fmt: skip


def test_text_replaces_what_was_there_at_once(tmp_path):
    write_text(tmp_path / "a.json", "one")
    write_text(tmp_path / "a.json", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "two"


def test_a_run_without_checkpoints_is_named_with_those_beside_it(tmp_path):
    made(tmp_path / "dpo-out", 4)
    made(tmp_path / "staged" / "stage-1-sft", 4)
    assert nothing_to_resume(tmp_path / "dpo-out") is None
    message = nothing_to_resume(tmp_path / "dpo-uot")
    missing = tmp_path / "dpo-uot"
    assert message.startswith(f"nothing to resume: {missing} does not exist, so this run starts from the beginning.")
    assert f"Runs with checkpoints beside it: {tmp_path / 'dpo-out'}, {tmp_path / 'staged'}." in message
    assert message.endswith(f"Did you mean output_dir={tmp_path / 'dpo-out'}?")
    assert "\n" not in message
    # The user names the folder of all stages, and the later stages of one run are no other run.
    assert "dpo-out." in nothing_to_resume(tmp_path / "staged" / "stage-2-dpo")
    (tmp_path / "empty" / "mine").mkdir(parents=True)
    alone = nothing_to_resume(tmp_path / "empty" / "mine")
    assert alone.endswith("mine has no checkpoint, so this run starts from the beginning.")
