"""EBFT from configs as people have them, on a tiny model and local rows."""

import json

import pytest
import yaml

from made_runs import metrics_of
from made_vllm import FakeVllm
from upweight.config import load_config
from upweight.train.run import build, evaluate, train

STRUCTURED = """
base_model: Qwen/Qwen3-4B
rl: ebft
ebft:
  feature_layers: [0.25, 0.5, 0.75]
  embed_method: last_token
  use_whitening: false
  alignment_coef: 1.0
  diversity_coef: 1.0
  ce_coef: 0.0
trl:
  num_generations: 4
  max_completion_length: 256
  temperature: 0.7
  use_vllm: true
  vllm_server_host: 0.0.0.0
  vllm_server_port: 8000
  vllm_lora_sync: true
  vllm_sync_interval: 3
  use_data_producer: true
  async_prefetch: true
  scale_rewards: true
  loss_type: grpo
  epsilon: 0.2
vllm:
  gpu_memory_utilization: 0.5
  max_model_len: 2048
datasets:
  - path: nvidia/OpenCodeInstruct
    type: ebft_opencode.transform
    split: train[:500]
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
"""
STRIDED = """
base_model: meta-llama/Llama-3.2-1B
rl: ebft
ebft:
  mode: strided
  stride: 8
  context_length: 8
  generate_max_len: 8
  n_samples_per_prompt: 4
  temperature: 0.6
  feature_layers: [0.25, 0.5, 0.75]
  embed_method: last_token
  use_whitening: true
  alignment_coef: 1.0
  diversity_coef: 1.0
  rl_coef: 1.0
  ce_coef: 0.03
  advantage_estimator: rloo
datasets:
  - path: nvidia/OpenCodeInstruct
    type: ebft_strided_structured.transform
    split: train[:1%]
flash_attention: false
flex_attention: true
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: true
"""
CODE = [
    {"input": f"add {n} to x", "output": f"def add(x):\n    return x + {n}  # the answer is here"} for n in range(8)
]
TALK = [
    {
        "messages": [
            {"role": role, "content": f"{role} says {n} {turn}"} for turn in (1, 2) for role in ("user", "assistant")
        ]
    }
    for n in range(6)
]
TEXTS = [{"text": f"the quick brown fox number {n} jumps over the lazy dog and over the fence"} for n in range(6)]


def run_of(folder, model_folder, content, rows, *changes):
    """The config of a text, with a tiny model in place of the hub's and local rows in place of its data."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "config.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    here = [
        f"base_model={model_folder}", f"datasets.0.path={folder / 'rows.jsonl'}", f"output_dir={folder / 'out'}",
        f"dataset_prepared_path={folder / 'prepared'}", "max_steps=2", "logging_steps=1", "chat_template=chatml",
    ]  # fmt: skip
    return load_config(file, [*here, *changes])


@pytest.mark.slow
def test_the_structured_config_trains_beside_a_server(tmp_path, model_folder):
    fake = FakeVllm(model_folder)
    address = [f"trl.vllm_server_base_url={fake.url}", "trl.vllm_server_host=null", "trl.vllm_server_port=null"]
    try:
        train(
            run_of(
                tmp_path, model_folder, STRUCTURED, CODE, *address, "trl.max_completion_length=12",
                "datasets.0.split=train", "trl.vllm_sync_interval=1", "max_steps=3",
            )
        )  # fmt: skip
    finally:
        fake.close()
    rows = metrics_of(tmp_path / "out")
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 3
    assert all(row["ebft/alignment"] <= 1 and row["ebft/cfm_loss"] > 0 for row in steps)
    assert "sampling/importance_sampling_ratio/mean" in steps[-1]
    assert fake.asked("/v1/completions")
    written = [json.loads(line) for line in (tmp_path / "out" / "completions" / "step_00001.jsonl").open()]
    assert set(written[0]["rewards"]) == {"alignment", "diversity"}
    assert written[0]["ground_truth"].startswith("def add")


def test_the_strided_config_trains_and_is_evaluated(tmp_path, model_folder):
    config = run_of(tmp_path, model_folder, STRIDED, CODE, "datasets.0.split=train", "val_set_size=2")
    train(config)
    steps = [row for row in metrics_of(tmp_path / "out") if "loss" in row]
    assert len(steps) == 2
    assert all(row["ebft/num_blocks"] >= 1 and row["ebft/ce_loss"] > 0 for row in steps)
    assert evaluate(config)["eval_ebft/ce_loss"] > 0


def test_the_frozen_copy_is_kept_in_host_memory_where_asked(tmp_path, model_folder):
    keys = ("datasets.0.split=train", "reference_offloading=true")
    rollouts = build(run_of(tmp_path, model_folder, STRIDED, CODE, *keys)).rollouts
    assert rollouts is not None
    assert rollouts.feature_matching is not None
    assert rollouts.feature_matching.initial_policy._offload


DATA = {
    "raw text": ("strided", {}, TEXTS, {"type": "completion", "field": "text"}),
    "chat": ("strided", {}, TALK, {"type": "ebft_strided_chat.transform"}),
    "rows that say what they are": ("strided", {}, [{"prompt": "say a", "completion": "the lazy dog " * 3}] * 4, {}),
    "conversation": ("structured", {"adapter": "lora", "lora_target_linear": True}, TALK,
                     {"type": "ebft_chat_multiturn.transform"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", DATA)
def test_every_kind_of_data_trains(tmp_path, model_folder, kind):
    mode, keys, rows, entry = DATA[kind]
    content = {
        "base_model": "m", "rl": "ebft", "ebft": {"mode": mode, "ce_coef": 0.1}, "datasets": [{"path": "d", **entry}],
        "learning_rate": 1e-3, **keys,
    }  # fmt: skip
    if mode == "structured":
        content["trl"] = {"num_generations": 4, "max_completion_length": 8}
    else:
        content["ebft"] |= {"generate_max_len": 4, "context_length": 4}
    train(run_of(tmp_path, model_folder, content, rows))
    steps = [row for row in metrics_of(tmp_path / "out") if "loss" in row]
    assert len(steps) == 2
    assert all(row["ebft/ce_loss"] > 0 for row in steps)
