"""A config as the command line of a server."""

import dataclasses
import json
from typing import Any

import pytest

from upweight.config.load import parse_config
from upweight.config.sections.model import ModelSection
from upweight.config.sections.rollout import VllmSection
from upweight.errors import UserError
from upweight.serve.command import serve_command, trained_command, warnings_of
from upweight.settings import setting

GRPO = {"base_model": "some/model", "rl": "grpo", "trl": {"use_vllm": True, "reward_funcs": ["r.f"]}}
LORA = {"adapter": "lora", "lora_r": 24}


def command(tmp_path, **keys):
    return serve_command(parse_config({**GRPO, **keys}, folder=tmp_path, fragment=True), python="python")


def flags(tmp_path, **keys) -> dict[str, str | None]:
    """Flags of the command with their values; None for those without one."""
    argv = command(tmp_path, **keys).argv
    assert argv[:3] == ("python", "-m", "vllm.entrypoints.openai.api_server")
    found: dict[str, str | None] = {}
    for word in argv[3:]:
        if word.startswith("--"):
            found[word] = None
        else:
            found[list(found)[-1]] = word
    return found


def test_defaults(tmp_path):
    found = flags(tmp_path)
    assert found["--model"] == found["--served-model-name"] == "some/model"
    assert (found["--host"], found["--port"], found["--dtype"]) == ("127.0.0.1", "8000", "auto")
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert found["--generation-config"] == "vllm"
    assert not {
        "--enable-lora",
        "--weight-transfer-config",
        "--enforce-eager",
        "--max-model-len",
        "--enable-prefix-caching",
    } & set(found)
    assert command(tmp_path).env == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }


@pytest.mark.parametrize(
    ("key", "value", "flag", "word"),
    [
        ("host", "0.0.0.0", "--host", "0.0.0.0"),
        ("port", 8123, "--port", "8123"),
        ("tensor_parallel_size", 2, "--tensor-parallel-size", "2"),
        ("data_parallel_size", 3, "--data-parallel-size", "3"),
        ("gpu_memory_utilization", 0.35, "--gpu-memory-utilization", "0.35"),
        ("dtype", "bfloat16", "--dtype", "bfloat16"),
        ("max_model_len", 2048, "--max-model-len", "2048"),
        ("enable_prefix_caching", True, "--enable-prefix-caching", None),
        ("enable_prefix_caching", False, "--no-enable-prefix-caching", None),
        ("enforce_eager", True, "--enforce-eager", None),
        ("enable_scale_out", True, "--enable-scale-out", None),
        ("tool_call_parser", "hermes", "--tool-call-parser", "hermes"),
        ("reasoning_parser", "qwen3", "--reasoning-parser", "qwen3"),
    ],
)
def test_every_key_of_the_block_reaches_the_server(tmp_path, key, value, flag, word):
    found = flags(tmp_path, vllm={key: value})
    assert flag in found
    assert found[flag] == word


def test_a_new_key_of_the_block_needs_its_declaration_only(tmp_path):
    class WithKeys(VllmSection):
        sequences: int = setting("vllm.max_num_seqs", 64, "Named as the flag.")
        chunked: bool = setting("vllm.enable_chunked_prefill", True, "A switch that is on unless turned off.")
        overrides: dict[str, Any] = setting("vllm.hf_overrides", {}, "A mapping, which vLLM reads as JSON.")
        sizes: list[int] | None = setting("vllm.cudagraph_capture_sizes", None, "A list.")

    config = parse_config(GRPO, folder=tmp_path, fragment=True)
    overrides = {"rope_scaling": None, "tie_word_embeddings": True, "model_type": "it's"}
    keys = WithKeys(sequences=7, chunked=False, overrides=overrides, sizes=[1, 2])
    argv = serve_command(dataclasses.replace(config, vllm=keys)).argv
    assert argv[argv.index("--max-num-seqs") + 1] == "7"
    assert json.loads(argv[argv.index("--hf-overrides") + 1]) == overrides
    assert argv[argv.index("--cudagraph-capture-sizes") + 1] == "[1, 2]"
    assert "--no-enable-chunked-prefill" in argv


def test_tool_calls_are_switched_on_with_their_parser(tmp_path):
    assert "--enable-auto-tool-choice" in flags(tmp_path, vllm={"tool_call_parser": "hermes"})
    assert "--enable-auto-tool-choice" not in flags(tmp_path)


def test_a_gyms_agents_can_call_tools_without_a_word_on_it(tmp_path):
    gym = {"nemo_gym_enabled": True, "nemo_gym_multi_turn": True, "nemo_gym_auto_start": False}
    gym |= {"nemo_gym_datasets": [{"path": "rows.jsonl"}], "rl": "grpo", "trl": {"use_vllm": True}}
    assert flags(tmp_path, **gym)["--tool-call-parser"] == "hermes"
    assert flags(tmp_path, **gym, vllm={"tool_call_parser": "llama3_json"})["--tool-call-parser"] == "llama3_json"


@pytest.mark.parametrize("vllm", [{}, {"enable_scale_out": True}])
def test_replay_has_the_server_return_experts(tmp_path, vllm):
    trl = {**GRPO["trl"], "use_vllm": True, "routing_replay": "measure"}
    argv = command(tmp_path, trl=trl, vllm=vllm).argv
    assert argv.count("--enable-return-routed-experts") == 1
    assert argv.count("--enable-scale-out") == 1
    assert "--enable-return-routed-experts" not in command(tmp_path).argv


def test_keys_of_the_model_reach_the_server(tmp_path):
    found = flags(tmp_path, model_revision="abc", trust_remote_code=True, tokenizer_config="other/words")
    assert (found["--revision"], found["--tokenizer"]) == ("abc", "other/words")
    assert "--trust-remote-code" in found


def test_an_adapter_switches_runtime_loading_on(tmp_path):
    found = flags(tmp_path, **LORA)
    assert found["--max-lora-rank"] == "32"  # the next size that vLLM allows
    assert int(found["--max-loras"] or 0) >= 2
    assert int(found["--max-cpu-loras"] or 0) >= 2
    assert "--weight-transfer-config" not in found
    assert command(tmp_path, **LORA).env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.mark.parametrize(
    ("keys", "rank"),
    [
        ({"lora_r": 8}, "8"),
        ({"lora_r": 9}, "16"),
        ({"lora_r": 300}, "320"),
        ({"lora_r": 8, "lora_rank_pattern": {"q_proj": 40}}, "64"),
        ({"lora_r": 8, "vllm": {"max_lora_rank": 100}}, "128"),
    ],
)
def test_ranks_are_rounded_up(tmp_path, keys, rank):
    assert flags(tmp_path, adapter="lora", **keys)["--max-lora-rank"] == rank


def test_the_rank_of_a_continued_adapter_is_its_own(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 60, "rank_pattern": {"v_proj": 70}}))
    assert flags(tmp_path, adapter="lora", lora_r=8, lora_model_dir=str(tmp_path))["--max-lora-rank"] == "128"


@pytest.mark.parametrize("keys", [{"lora_target_parameters": ["w"]}, {"lora_modules_to_save": ["lm_head"]}])
def test_adapters_that_vllm_cannot_load_are_sent_merged_or_refused(tmp_path, keys):
    assert "--enable-lora" not in flags(tmp_path, **LORA, **keys)
    with pytest.raises(UserError, match="vLLM cannot load such an adapter"):
        flags(tmp_path, **LORA, **keys, trl={**GRPO["trl"], "vllm_lora_sync": True})


def test_without_adapter_sync_weights_are_sent_whole(tmp_path):
    found = flags(tmp_path, **LORA, trl={**GRPO["trl"], "vllm_lora_sync": False})
    assert "--enable-lora" not in found


@pytest.mark.parametrize("adapter", [{}, LORA])
@pytest.mark.parametrize("way", ["nccl", "ipc"])
def test_weights_handed_over_without_a_folder(tmp_path, way, adapter):
    trl = {**GRPO["trl"], "vllm_weight_transfer": way, "vllm_lora_sync": False}
    found = flags(tmp_path, trl=trl, **adapter)
    assert json.loads(found["--weight-transfer-config"] or "") == {"backend": way}
    insecure = command(tmp_path, trl=trl, **adapter).env.get("VLLM_ALLOW_INSECURE_SERIALIZATION")
    assert insecure == ("1" if way == "ipc" else None)


def test_an_adapter_sent_alone_opens_nothing_else(tmp_path):
    trl = {**GRPO["trl"], "vllm_weight_transfer": "ipc"}
    assert "--weight-transfer-config" not in flags(tmp_path, trl=trl, **LORA)
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in command(tmp_path, trl=trl, **LORA).env


@pytest.mark.parametrize(
    ("vllm", "words"),
    [
        ({"host": "0.0.0.0"}, r"ipc has the server run what it is sent, and vllm\.host: 0\.0\.0\.0"),
        ({"tensor_parallel_size": 2}, "on the trainer's GPU alone"),
    ],
)
def test_ipc_stays_on_one_gpu_of_one_machine(tmp_path, vllm, words):
    trl = {**GRPO["trl"], "vllm_weight_transfer": "ipc"}
    with pytest.raises(UserError, match=words):
        flags(tmp_path, trl=trl, vllm=vllm)
    assert flags(tmp_path, trl={**trl, "vllm_weight_transfer": "nccl"}, vllm=vllm)


def test_devices(tmp_path):
    assert command(tmp_path, vllm={"device": "cuda:1"}).env["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in command(tmp_path, vllm={"device": "cuda"}).env
    with pytest.raises(UserError, match=r"vllm\.device: 'gpu7' is not known"):
        command(tmp_path, vllm={"device": "gpu7"})


@pytest.mark.parametrize(
    "keys", [{"lora_r": 513, "adapter": "lora"}, {"gguf_file": "model.gguf"}, {"base_model": None}]
)
def test_what_cannot_be_served_is_refused(tmp_path, keys):
    with pytest.raises(UserError):
        flags(tmp_path, **keys)


def test_warnings(tmp_path):
    plain = parse_config(GRPO, folder=tmp_path, fragment=True)
    assert list(warnings_of(plain, "0.32.0")) == list(warnings_of(plain, "0.26.1+cpu")) == []
    assert "0.31.0 is not tested" in next(warnings_of(plain, "0.31.0"))
    assert "0.3 is not tested" in next(warnings_of(plain, "0.3"))
    shared = {**GRPO, "trl": {**GRPO["trl"], "vllm_weight_transfer": "ipc"}}
    (words,) = warnings_of(parse_config(shared, folder=tmp_path, fragment=True), "0.26.0")
    assert "ray" in words
    everywhere = parse_config({**GRPO, "vllm": {"host": "0.0.0.0"}}, folder=tmp_path, fragment=True)
    (words,) = warnings_of(everywhere, "0.32.0")
    assert "not protected" in words


def test_a_trained_adapter_is_served_beside_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 24}))
    section = ModelSection(base_model="some/model", revision="r1")
    line = " ".join(trained_command(section, tmp_path, "mine", VllmSection(), port=8123, python="python").argv)
    assert line.startswith("python -m vllm.entrypoints.openai.api_server ")
    for part in ("--model some/model", "--served-model-name base", "--revision r1", "--host 127.0.0.1 --port 8123"):
        assert part in line
    assert f"--enable-lora --lora-modules mine={tmp_path} --max-lora-rank 32" in line
    assert "--tokenizer" not in line
    whole = trained_command(ModelSection(base_model="/m"), None, "mine", VllmSection(dtype="float32"), port=1).argv
    assert "--enable-lora" not in whole
    assert whole[whole.index("--served-model-name") + 1] == "mine"
    assert whole[whole.index("--dtype") + 1] == "float32"
    with pytest.raises(UserError, match="export RUN --to vllm"):
        trained_command(ModelSection(base_model="/m", gguf_file="x.gguf"), tmp_path, "mine", VllmSection(), port=1)
