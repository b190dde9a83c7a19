"""Rollouts by a real agent of NeMo Gym, which asks a real vLLM server for its turns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from made_gym import synonym_rows, write_caller, write_rows
from upweight.config import load_config
from upweight.environments.nemo_gym.agent_config import agent_config
from upweight.train.run import train

ROOT = Path(__file__).parents[2]
GYM = os.environ.get("UPWEIGHT_GYM_ENV", str(ROOT / ".cache" / "gym-env"))
VLLM = ROOT / ".cache" / "vllm-env" / "bin" / "python"
pytestmark = [
    pytest.mark.gym,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not VLLM.exists(), reason="needs the environment that `make test-vllm` builds"),
]


def test_an_agent_plays_rollouts_with_the_adapter_that_trains(tmp_path):
    sys.path.insert(0, str(ROOT / "tests" / "with_vllm"))
    from real_server import RealServer

    # vLLM's attention on CPUs wants heads of 32 at least
    model = write_caller(tmp_path / "model", hidden_size=128, intermediate_size=128, num_hidden_layers=2)
    rows = write_rows(tmp_path / "synonyms.jsonl", synonym_rows())
    (tmp_path / "agent.yaml").write_text(agent_config("example_multi_step", instance="synonyms", max_turns=4))
    content = {
        "base_model": str(model), "rl": "grpo", "chat_template": "tokenizer_default", "adapter": "lora", "lora_r": 8,
        "lora_alpha": 16, "lora_target_modules": ["q_proj", "v_proj"], "nemo_gym_enabled": True, "nemo_gym_dir": GYM,
        "nemo_gym_config_paths": ["agent.yaml"], "nemo_gym_multi_turn": True, "nemo_gym_max_turns": 4,
        "nemo_gym_datasets": [{"path": str(rows), "server_name": "example_multi_step"}],
        "learning_rate": 1e-3, "micro_batch_size": 8, "max_steps": 3, "logging_steps": 1,
        "vllm": {"max_model_len": 2048},
        "trl": {
            "use_vllm": True, "vllm_server_host": "127.0.0.1", "num_generations": 4, "max_completion_length": 160,
            "vllm_lora_sync": True, "vllm_sync_interval": 5, "use_data_producer": True, "async_prefetch": True,
            "temperature": 0.8, "reward_funcs": ["axolotl.integrations.nemo_gym.rewards.reward_env"],
        },
        "output_dir": str(tmp_path / "out"), "dataset_prepared_path": str(tmp_path / "prepared"),
    }  # fmt: skip
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    server = RealServer(config)
    server.start()
    try:
        server.wait()
        train(load_config(config, [f"trl.vllm_server_port={server.port}"]))
    finally:
        server.process.terminate()
        server.process.wait(60)
    left = subprocess.run(["pgrep", "-af", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert not [line for line in left.splitlines() if "pgrep" not in line]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    assert [line["environment/masked"] for line in steps] == [0, 0, 0]
    assert [line["rollout/lag"] for line in steps] == [0, 1, 2]  # rollouts run ahead, and the next sync is at step 5
    key = "sampling/sampling_logp_difference/mean"
    assert steps[0].get(key, 0.0) < 1e-4
