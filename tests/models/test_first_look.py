"""A model's folder judged by the names of its files."""

import json
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


def weights_of(size) -> bytes:
    """A file of safetensors with one tensor of so many bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def folder_with(folder, *names) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(weights_of(0) if name == "model.safetensors" else b"")
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
        (("config.json",), r"it holds 1 file \(\.json\)"),
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


def test_a_teacher_in_a_folder_that_is_not_there_is_named_by_its_key(tmp_path):
    whole, other = (folder_with(tmp_path / name, *WHOLE) for name in ("mine", "other"))
    keys = {"rl": "distill", "datasets": [{"path": "rows.jsonl"}]}
    for place in (other, "organisation/teacher", "http://localhost:8001"):
        assert problems(whole, **keys, distill={"teacher": str(place), "top_k": 4}) == []
    (problem,) = problems(whole, **keys, distill={"teachers": {"code": str(tmp_path / "mien")}})
    assert problem.startswith(f"distill.teachers.code: {tmp_path / 'mien'} is no folder here")


def test_later_stages_begin_with_folders_that_are_not_there_yet(tmp_path):
    stages = [{"name": "a"}, {"name": "b"}]
    assert problems(folder_with(tmp_path / "m", *WHOLE), stages=stages, output_dir=str(tmp_path / "out")) == []


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (weights_of(400)[:300], r"model\.safetensors in it is cut short: 300 of 4\d\d bytes are there\. Copy or"),
        (weights_of(400)[:20], r"model\.safetensors in it is damaged or cut short \(20 bytes\)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", r"pointer of Git LFS.*`git lfs pull`"),
    ],
)
def test_weights_that_are_not_whole_are_named(written, says, tmp_path):
    folder = folder_with(tmp_path / "m", *WHOLE)
    (folder / "model.safetensors").write_bytes(written)
    (problem,) = problems(folder)
    assert re.search(f"does not hold a whole model: .*{says}", problem)


def test_a_part_that_is_missing_is_named(tmp_path):
    folder = folder_with(tmp_path / "m", "config.json", "tokenizer.json", "model-1.safetensors")
    (folder / "model-1.safetensors").write_bytes(weights_of(8))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = problems(folder)
    assert "model-2.safetensors, which model.safetensors.index.json names, is not in it" in problem
    (folder / "model-2.safetensors").write_bytes(weights_of(8))
    assert problems(folder) == []


@pytest.mark.parametrize(("method", "is_refused"), [("awq", True), ("gptq", True), ("bitsandbytes", False)])
def test_weights_that_are_quantised_already_are_not_quantised_again(method, is_refused, tmp_path):
    folder = folder_with(tmp_path / "m", *WHOLE)
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    assert problems(folder, adapter="lora") == []
    packed = problems(folder, adapter="qlora", load_in_4bit=True)
    assert [f"by {method}. Name the model that they were made from" in problem for problem in packed] == [
        True
    ] * is_refused


@pytest.mark.parametrize(
    ("stored", "bits"), [({"quant_method": "gptq", "bits": 4}, 4), ({"quant_method": "fp8"}, None)]
)
def test_weights_that_are_stored_as_integers_do_not_train(stored, bits, tmp_path):
    folder = folder_with(tmp_path / "m", *WHOLE)
    (folder / "config.json").write_text(json.dumps({"quantization_config": stored}))
    assert problems(folder, adapter="lora") == []
    assert [f"stored in {bits} bits, by gptq" in one and "`adapter: lora`" in one for one in problems(folder)] == (
        [True] if bits else []
    )
