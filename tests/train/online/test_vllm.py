"""Whole runs that sample from a server, with a stand-in for vLLM."""

import json

import pytest
import yaml

from made_runs import metrics_of, on_ranks, write_model, write_online
from made_vllm import FakeVllm
from slow_cases import slow_except
from upweight.config import load_config
from upweight.errors import UserError
from upweight.rollout.vllm import client as vllm_client
from upweight.rollout.vllm import servers as vllm_servers
from upweight.train.online.try_rewards import try_on_samples
from upweight.train.run import train

LORA = {"adapter": "lora", "lora_r": 4, "lora_target_linear": True}


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(vllm_client, "BACKOFF_SECONDS", (0.05,))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fake(model):
    server = FakeVllm(model)
    yield server
    server.close()


def config(folder, model, fake, trl=None, **keys):
    file = write_online(folder, model, **{"max_steps": 4, "bf16": False, **keys})
    content = yaml.safe_load(file.read_text())
    content["trl"] |= {"use_vllm": True, "vllm_server_base_url": fake.url, "vllm_server_timeout": 20, **(trl or {})}
    file.write_text(yaml.safe_dump(content))
    return load_config(file)


def steps_of(folder) -> list[dict]:
    return [line for line in metrics_of(folder / "out") if "loss" in line and "reward" in line]


@pytest.mark.parametrize("keys", slow_except([LORA], [LORA, {}]))
def test_the_server_follows_the_policy_every_so_many_steps(tmp_path, model, fake, keys):
    train(config(tmp_path, model, fake, {"vllm_sync_interval": 2, "temperature": 0.8}, **keys))
    route = "/v1/load_lora_adapter" if keys else "/collective_rpc"
    assert len(fake.asked(route)) == 2
    steps = steps_of(tmp_path)
    assert [line["rollout/lag"] for line in steps] == [0, 1, 0, 1]
    apart = [line["sampling/sampling_logp_difference/mean"] for line in steps]
    assert max(apart[::2]) < 1e-4 < apart[3]  # the policy moved between the sync and the last step
    assert not (tmp_path / "out" / "vllm").exists()
    assert not fake.loaded


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_no_group_is_lost_or_doubled_through_errors_and_restarts(tmp_path, model, fake, ahead):
    written = fake.written

    def restarts(served, prompt, body, ends):
        asked = len(fake.asked("/v1/completions"))
        if asked % 17 == 0:
            fake.restart()
        return written(served, prompt, body, ends)

    fake.written = restarts
    fake.faults["/v1/completions"] = [200, 500, 200, 200, 503, 200, 500, 500]
    keys = {"async_prefetch": ahead, "use_data_producer": ahead}
    train(config(tmp_path, model, fake, keys, **LORA))
    files = sorted((tmp_path / "out" / "completions").glob("step_*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    prompts = [str(row["prompt"]) for row in rows]
    assert len(rows) == 32
    assert {prompts.count(prompt) for prompt in prompts} == {4}  # 4 steps of 2 groups: each of the 8 prompts once
    assert max(line["rollout/lag"] for line in steps_of(tmp_path)) <= int(ahead)


def test_a_pattern_and_further_options_reach_the_server(tmp_path, model, fake):
    options = {"vllm_structured_outputs_regex": "a+", "generation_kwargs": {"frequency_penalty": 0.1, "stop": ["x"]}}
    train(config(tmp_path, model, fake, options, max_steps=1))
    body = fake.asked("/v1/completions")[-1]
    assert body["structured_outputs"] == {"regex": "a+"}
    assert (body["frequency_penalty"], body["stop"]) == (0.1, ["x"])


def test_rewards_are_tried_on_what_the_server_writes(tmp_path, model, fake):
    tried = try_on_samples(config(tmp_path, model, fake, **LORA), prompts=2)
    assert len(tried.call) == 8
    assert not fake.loaded


def test_a_server_without_room_is_refused_before_training(tmp_path, model, fake):
    fake.longest = 10
    with pytest.raises(UserError, match="exceeds the 10 that the server"):
        train(config(tmp_path, model, fake))
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_vllm_beside_the_trainer_needs_vllm_here(tmp_path, model, fake):
    with pytest.raises(UserError, match="colocate needs vLLM in this Python environment"):
        train(config(tmp_path, model, fake, {"vllm_mode": "colocate"}))


def test_a_pattern_without_a_server_is_refused(tmp_path, model, fake):
    with pytest.raises(UserError, match="cannot be held to a pattern"):
        train(config(tmp_path, model, fake, {"use_vllm": False, "vllm_structured_outputs_regex": "a+"}))


@pytest.mark.slow
def test_prompts_go_on_with_the_other_server_when_one_dies_and_it_comes_back(tmp_path, model, fake, monkeypatch):
    monkeypatch.setattr(vllm_servers, "FAILOVER_SECONDS", 1.0)
    other = FakeVllm(model)
    written = other.written

    def groups(server):
        return sum(one.get("n") == 4 for one in server.asked("/v1/completions"))

    def dies_once(served, prompt, body, ends):
        if body.get("n") == 4 and groups(other) == 2:
            other.well = False
        return written(served, prompt, body, ends)

    def comes_back(served, prompt, body, ends):
        if body.get("n") == 4 and groups(fake) == 6 and not other.well:
            other.restart()
            other.well = True
        return alive(served, prompt, body, ends)

    alive, fake.written, other.written = fake.written, comes_back, dies_once
    urls = {"vllm_server_base_url": None, "vllm_server_base_urls": [fake.url, other.url]}
    train(config(tmp_path, model, fake, urls, max_steps=6, **LORA))
    other.close()
    files = sorted((tmp_path / "out" / "completions").glob("step_*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    prompts = [str(row["prompt"]) for row in rows]
    assert sorted(prompts.count(prompt) for prompt in set(prompts)) == [4] * 4 + [8] * 4  # 12 groups of 8 prompts
    loaded = [len(one.asked("/v1/load_lora_adapter")) for one in (fake, other)]
    assert loaded[0] == 6
    assert 3 <= loaded[1] < 6  # each time it is there
    assert groups(fake) > groups(other) >= 3
    assert max(line["sampling/sampling_logp_difference/mean"] for line in steps_of(tmp_path)) < 1e-4
    assert not (tmp_path / "out" / "vllm-0").exists()


def _train(path) -> None:
    train(load_config(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shards",
    [{}, {"fsdp": True}, {"fsdp": True, **dict.fromkeys(LORA)}],
)
def test_rank_zero_alone_talks_to_the_server(shards, tmp_path, model, fake):
    keys = {"micro_batch_size": 4, "val_set_size": 2, **LORA, **shards}
    file = config(tmp_path, model, fake, **keys).folder / "config.yaml"
    on_ranks(_train, 2, file)
    assert len(steps_of(tmp_path)) == 4
    assert max(line["sampling/sampling_logp_difference/mean"] for line in steps_of(tmp_path)) < 1e-4
    evaluated = [line for line in metrics_of(tmp_path / "out") if "eval_reward" in line]
    assert evaluated
    prompts = [json.dumps(body["prompt"]) for body in fake.asked("/v1/completions") if body.get("n") == 4]
    assert len(prompts) == 4 * 2 + 2 * len(evaluated)  # two groups a step, two held-out prompts
