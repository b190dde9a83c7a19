from pathlib import Path

import pytest

from upweight.config import parse_config
from upweight.errors import UserError

PAIRS = [{"path": "pairs.jsonl", "type": "chatml.intel"}]
COMMON = {"base_model": "some/model", "output_dir": "out", "learning_rate": 1e-5, "trl": {"beta": 0.2, "top_p": 0.9}}
SFT = {"name": "cold-start", "datasets": [{"path": "texts.jsonl", "type": "completion", "field": "text"}]}
DPO = {"rl": "dpo", "datasets": PAIRS, "learning_rate": 1e-6}
GRPO = {"rl": "grpo", "datasets": [{"path": "p.jsonl"}], "trl": {"reward_funcs": ["r.one"]}}
LORA = {"adapter": "lora", "lora_r": 4}


def parse(*stages, **common):
    return parse_config({**COMMON, **common, "stages": list(stages)}, folder=Path())


def errors_of(*stages, **common):
    with pytest.raises(UserError) as caught:
        parse(*stages, **common)
    return str(caught.value).splitlines()


def test_each_stage_is_the_common_keys_with_its_own_on_top():
    config = parse(SFT, DPO, GRPO)
    first, second, third = config.stages
    assert [stage.method.name for stage in config.stages] == ["sft", "dpo", "grpo"]
    assert [stage.optim.learning_rate for stage in config.stages] == [1e-5, 1e-6, 1e-5]
    assert (second.method.model_dump()["beta"], third.rollout.top_p) == (0.2, 0.9)
    assert third.rollout.reward_funcs == ["r.one"]
    assert (config.method.name, config.run.output_dir) == ("grpo", "out")
    assert first.run.output_dir == "out/stage-1-cold-start"


def test_common_keys_that_only_other_stages_read_are_left_out_where_they_mean_nothing():
    config = parse(SFT, GRPO, trl={"num_generations": 4, "top_p": 0.9})
    assert not config.stages[0].notices
    assert config.stages[1].method.group_size == 4
    assert errors_of(SFT, DPO, trl={"num_generations": 4}) != []


def test_full_weights_go_on_from_the_folder_before():
    _, second, third = parse(SFT, DPO, GRPO, gguf_file="x.gguf").stages
    assert (second.model.base_model, second.model.gguf_file) == ("out/stage-1-cold-start", None)
    assert third.model.base_model == "out/stage-2-dpo"
    assert third.adapter.folder is None


def test_adapters_go_on_from_the_adapter_before_on_the_same_base():
    first, second, third = parse(SFT, DPO, GRPO, **LORA, gguf_file="x.gguf").stages
    assert first.adapter.folder is None
    assert (second.model.base_model, second.model.gguf_file) == ("some/model", "x.gguf")
    assert (second.adapter.folder, third.adapter.folder) == ("out/stage-1-cold-start", "out/stage-2-dpo")


def test_an_adapter_is_merged_before_full_weights_and_started_anew_after_them():
    _, second = parse({**SFT, **LORA}, DPO).stages
    assert (second.model.base_model, second.adapter.folder) == ("out/stage-1-cold-start/merged", None)
    _, second, third = parse(SFT, {**DPO, **LORA}, {**DPO, **LORA}).stages
    assert (second.model.base_model, second.adapter.folder) == ("out/stage-1-cold-start", None)
    assert (third.model.base_model, third.adapter.folder) == ("out/stage-1-cold-start", "out/stage-2-dpo")


def test_a_stage_may_name_its_own_start():
    _, second = parse(SFT, {**DPO, "base_model": "other/model"}).stages
    assert second.model.base_model == "other/model"


def test_errors_name_their_stage():
    found = errors_of(SFT, {**DPO, "rl_beta": -1, "datasets": [{"path": "x", "typ": "y"}]}, sequence_len=-3)
    assert any(line.startswith("stages[1].rl_beta:") for line in found)
    assert any(line.startswith("stages[1].datasets[0].typ:") for line in found)
    assert [line for line in found if "sequence_len" in line] == [
        line for line in found if line.startswith("sequence_len:")
    ]
    assert len([line for line in found if "sequence_len" in line]) == 1


def test_errors_inside_blocks_name_their_stage_only_where_it_set_the_key():
    found = errors_of(SFT, {**GRPO, "trl": {"reward_funcs": ["r.one"], "min_p": 7}}, trl={"top_p": 7})
    assert any(line.startswith("stages[1].trl.min_p:") for line in found)
    assert any(line.startswith("trl.top_p:") for line in found)


def test_what_a_stage_lacks_is_said():
    assert any(line.startswith("stages[0].datasets: missing") for line in errors_of({"name": "a"}, DPO))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("dpo", "stages: expected a list"),
        ([], "stages: expected a list"),
        ([3], r"stages\[0\]: expected a mapping"),
        ([{**DPO, "stages": [SFT]}], r"stages\[0\].stages"),
        ([{**DPO, "output_dir": "x"}], r"stages\[0\].output_dir"),
        ([{**DPO, "name": "../x"}], r"stages\[0\].name"),
        ([{**DPO, **LORA}, {"reward_model": True, "datasets": PAIRS, **LORA}], r"stages\[1\]: a new score head"),
    ],
)
def test_what_cannot_be(stages, message):
    with pytest.raises(UserError, match=message):
        parse_config({**COMMON, "stages": stages}, folder=Path())
