"""A model's folder judged by the names of its files."""

import re
from pathlib import Path

import pytest

from upweight.config import parse_config
from upweight.models.first_look import model_problems

WHOLE = ("config.json", "model.safetensors", "tokenizer.json")


def problems(base_model, **keys) -> list[str]:
    rows = {"path": "rows.jsonl", "type": "completion"}
    return list(
        model_problems(parse_config({"base_model": str(base_model), "datasets": [rows], **keys}, folder=Path()))
    )


def folder_with(folder, *names) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("")
    return folder


def test_a_whole_model_and_one_that_may_be_on_the_hub_are_not_judged(tmp_path):
    assert problems(folder_with(tmp_path / "whole", *WHOLE)) == []
    assert problems("organisation/model") == []
    assert problems(folder_with(tmp_path / "packed", "m.gguf") / "m.gguf") == []
    assert problems(tmp_path / "packed", gguf_file="m.gguf") == []


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("m.gguf", "readme.txt"), r"m holds a GGUF file.*`base_model: .*/m/m\.gguf`"),
        ((), r"has no config\.json and no weights .* and no tokenizer; it holds no files\. Name the folder of a whole"),
        (WHOLE[1:], r"has no config\.json; it holds 2 files \(\.safetensors, \.json\)"),
        (("config.json", "tokenizer.json", "training_args.bin"), r"has no weights"),
        (WHOLE[:2], r"has no tokenizer; .*`tokenizer_config`"),
        (("adapter_config.json", "adapter_model.safetensors"), r"holds an adapter: .*`lora_model_dir: .*/m`"),
    ],
)
def test_a_folder_without_a_model_is_refused_with_a_remedy(names, says, tmp_path):
    (problem,) = problems(folder_with(tmp_path / "m", *names))
    assert problem.startswith("base_model: ")
    assert re.search(says, problem)


def test_what_other_keys_name_is_not_missed(tmp_path):
    folder = folder_with(tmp_path / "m", "model.safetensors")
    assert problems(folder, base_model_config="organisation/m", tokenizer_config="organisation/m") == []
    (problem,) = problems(folder_with(tmp_path / "packed", "a.gguf"), gguf_file="b.gguf")
    assert "holds no b.gguf (gguf_file). There are a.gguf." in problem


def test_a_path_to_nothing_and_one_to_a_file(tmp_path):
    folder_with(tmp_path / "mine", *WHOLE)
    (problem,) = problems(tmp_path / "mien")
    assert problem.endswith("Did you mean 'mine'?")
    (problem,) = problems(tmp_path / "mine" / "config.json")
    assert f"Name the folder that it is in: `base_model: {tmp_path / 'mine'}`" in problem


def test_later_stages_begin_with_folders_that_are_not_there_yet(tmp_path):
    stages = [{"name": "a"}, {"name": "b"}]
    assert problems(folder_with(tmp_path / "m", *WHOLE), stages=stages, output_dir=str(tmp_path / "out")) == []
