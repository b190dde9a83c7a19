"""The server backend, its syncs and whole runs against a real vLLM server on the CPU."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from made_runs import write_model, write_online
from upweight.config.load import load_config
from upweight.errors import UserError
from upweight.rollout.vllm.server import VllmServer
from upweight.train.distill.log import write_log
from upweight.train.run import evaluate
from upweight.types import Sampling
from with_vllm.real_server import ON_CPU, PYTHON, ROOT, group_is_empty, proxy, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# vLLM's attention on CPUs wants heads of 32 at least
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
LORA = {"adapter": "lora", "lora_r": 4, "lora_target_linear": True}
WAITING = SimpleNamespace(nccl_common=SimpleNamespace(trainer_init=lambda _: time.sleep(60)))  # nobody joins its group
PROMPTS = [[65 + n, 66, 67 + n % 5, 68] for n in range(24)]


@pytest.fixture(scope="module")
def served_model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="module")
def lora_server(served_model, tmp_path_factory):
    config = write_online(tmp_path_factory.mktemp("lora"), served_model, **LORA)
    with running(config) as server:
        yield server


def policy(folder, adapter: bool = True):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if not adapter:
        return model
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def backend(url, model, folder, tmp_path, **options):
    options = {"dtype": torch.float32, "folder": tmp_path / "vllm", "timeout": 300.0, **options}
    return VllmServer(url, model, AutoTokenizer.from_pretrained(folder), **options)


def move(model, size: float = 0.05) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(size * torch.randn_like(weight))


@torch.no_grad()
def largest_difference(model, prompts, found, temperature: float = 1.0) -> float:
    worst = 0.0
    for prompt, completions in zip(prompts, found, strict=True):
        for one in completions:
            ids = torch.tensor([[*prompt, *one.ids]])
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
            own = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            worst = max(worst, float((own - torch.tensor(one.logps)).abs().max()))
    return worst


def versions(found) -> set[int]:
    return {number for group in found for one in group for number in one.versions}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_agree(lora_server, served_model, tmp_path, temperature):
    model = policy(served_model)
    server = backend(lora_server.url, model, served_model, tmp_path, temperature=temperature)
    server.sync(0)
    found = server.generate(PROMPTS, 4, Sampling(16, temperature=temperature))
    assert [len(group) for group in found] == [4] * len(PROMPTS)
    assert len({tuple(one.ids) for one in found[0]}) > 1
    assert largest_difference(model, PROMPTS, found, temperature) < 1e-4
    server.close()


def test_ten_versions_of_an_adapter(lora_server, served_model, tmp_path):
    model = policy(served_model)
    server = backend(lora_server.url, model, served_model, tmp_path)
    for version in range(10):
        server.sync(version)
        found = server.generate(PROMPTS[:6], 2, Sampling(8))
        assert versions(found) == {version}
        assert largest_difference(model, PROMPTS[:6], found) < 1e-4
        assert len(list((tmp_path / "vllm").iterdir())) == 1
        move(model)
    server.close()
    assert not (tmp_path / "vllm").exists()


def test_a_request_goes_on_with_the_version_it_began_with(lora_server, served_model, tmp_path):
    model = policy(served_model)
    server = backend(lora_server.url, model, served_model, tmp_path)
    server.sync(0)
    before = policy(served_model)
    found = []
    working = threading.Thread(target=lambda: found.extend(server.generate(PROMPTS, 2, Sampling(64))))
    working.start()
    time.sleep(0.5)
    move(model)
    server.sync(1)
    working.join()
    old = [place for place, group in enumerate(found) if versions([group]) == {0}]
    assert old, "nothing was under way when the weights changed"
    assert largest_difference(before, [PROMPTS[n] for n in old], [found[n] for n in old]) < 1e-4
    new = [place for place in range(len(found)) if place not in old]
    assert largest_difference(model, [PROMPTS[n] for n in new], [found[n] for n in new]) < 1e-4
    server.close()


@pytest.mark.parametrize(
    ("wanted", "possible"),
    [({"regex": "(yes|no)"}, {"yes", "no"}), ({"json": {"enum": ["yes", "no"]}}, {'"yes"', '"no"'})],
)
def test_completions_match_a_pattern_or_a_schema(lora_server, served_model, tmp_path, wanted, possible):
    options = {"structured_outputs": wanted}
    server = backend(lora_server.url, policy(served_model), served_model, tmp_path, options=options)
    server.sync(0)
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    found = server.generate(PROMPTS[:3], 2, Sampling(16))
    texts = {tokenizer.decode(one.ids, skip_special_tokens=True) for group in found for one in group}
    assert texts <= possible
    server.close()


def test_other_weights_under_the_same_name_are_refused(lora_server, served_model, tmp_path):
    model = policy(served_model)
    for weight in model.parameters():
        weight.data.mul_(1.2)
    with pytest.raises(UserError, match="computes with other weights"):
        backend(lora_server.url, model, served_model, tmp_path)


@pytest.mark.parametrize(("more", "words"), [(1, "knows fewer tokens"), (-1, "knows more tokens")])
def test_another_vocabulary_is_refused_and_the_server_lives_on(lora_server, served_model, tmp_path, more, words):
    model = policy(served_model)
    base = model.get_base_model()
    base.resize_token_embeddings(base.config.vocab_size + more)
    with pytest.raises(UserError, match=words):
        backend(lora_server.url, model, served_model, tmp_path)
    backend(lora_server.url, policy(served_model), served_model, tmp_path).close()


def test_errors_and_slowness_are_lived_through(lora_server, served_model, tmp_path):
    model = policy(served_model)
    with proxy(lora_server.url, every=3, delay=0.3) as url:
        server = backend(url, model, served_model, tmp_path)
        server.sync(0)
        found = server.generate(PROMPTS, 2, Sampling(8))
        assert [len(group) for group in found] == [2] * len(PROMPTS)
        assert largest_difference(model, PROMPTS, found) < 1e-4
        server.close()


def test_an_adapter_that_does_not_fit_on_the_disk_ends_the_run(lora_server, served_model, tmp_path):
    server = backend(lora_server.url, policy(served_model), served_model, tmp_path)
    server.sync(0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(UserError, match="weights of step 1 could not be sent"):
            server.sync(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(list((tmp_path / "vllm").iterdir())) == 1  # version 0, still served
    assert server.version() == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_ten_steps_of_grpo_with_adapter_sync(lora_server, served_model, tmp_path, ahead):
    file = write_online(tmp_path, served_model, **LORA, max_steps=10, bf16=False)
    content = yaml.safe_load(file.read_text())
    content["trl"] |= {"use_vllm": True, "vllm_server_port": lora_server.port, "vllm_lora_sync": True}
    content["trl"] |= {"vllm_sync_interval": 2, "use_data_producer": ahead, "async_prefetch": ahead}
    file.write_text(yaml.safe_dump(content))
    done = subprocess.run(
        [sys.executable, "-m", "upweight", "train", str(file)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line and "loss" in line]
    assert [line["step"] for line in steps] == [*range(1, 11)]
    bound = 1 + (1 if ahead else 0)  # sync_interval - 1 + depth
    assert max(line["rollout/lag"] for line in steps) <= bound
    fresh = [line for line in steps if line["rollout/lag"] == 0]
    assert fresh
    assert max(line["sampling/sampling_logp_difference/mean"] for line in fresh) < 1e-4
    assert not (tmp_path / "out" / "vllm").exists()


def taught_by(place, student, tmp_path, **block):
    rows = tmp_path / "texts.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"say {word}", "completion": f" {word}{word}"}) + "\n" for word in "abcd")
    )
    block = {"teacher": str(place), "on_policy": 0, "top_k": 6, **block}
    keys = {"rl": "distill", "distill": block, "datasets": [{"path": str(rows)}], "trl": None, "bf16": False}
    return load_config(write_online(tmp_path, student, **keys, val_set_size=2))


def test_a_teacher_behind_a_server_gives_what_the_model_in_this_process_gives(lora_server, served_model, tmp_path):
    student = write_model(tmp_path / "student", **SIZES, initializer_range=0.3)
    places = {"here": served_model, "there": lora_server.url}
    logs, losses = {}, {}
    for name, place in places.items():
        assert write_log(taught_by(place, student, tmp_path), tmp_path / f"{name}.parquet") == 2 * 4
        logs[name] = pq.read_table(tmp_path / f"{name}.parquet").to_pydict()
        softened = {"temperature": 2.0, "tail": "renormalise", "divergence": "forward_kl"}
        losses[name] = [evaluate(taught_by(place, student, tmp_path, **block))["eval_loss"] for block in ({}, softened)]
    assert logs["here"]["teacher_ids"] == logs["there"]["teacher_ids"]
    for ours, theirs in zip(logs["here"]["teacher_logps"], logs["there"]["teacher_logps"], strict=True):
        for right, found in zip(ours, theirs, strict=True):
            assert found == pytest.approx(right, abs=4e-3)  # written in float16
    assert losses["there"] == pytest.approx(losses["here"], abs=1e-4)
    assert min(losses["here"]) > 1e-3


def test_all_weights_are_read_anew_and_the_server_ends_with_its_children(served_model, tmp_path, monkeypatch):
    with running(write_online(tmp_path, served_model), "trl.vllm_weight_transfer=nccl") as real:
        model = policy(served_model, adapter=False)
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.distributed", ModuleType("vllm.distributed"))
        monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", WAITING)
        with pytest.raises(UserError, match=r"takes no weights by nccl .*500.*'folder'"):  # it has no GPU
            backend(real.url, model, served_model, tmp_path, transfer="nccl").sync(0)
        server = backend(real.url, model, served_model, tmp_path)
        for version in range(3):
            server.sync(version)
            found = server.generate(PROMPTS[:6], 2, Sampling(8))
            assert versions(found) == {version}
            assert largest_difference(model, PROMPTS[:6], found) < 1e-4
            move(model, 0.01)
        merged = backend(real.url, policy(served_model), served_model, tmp_path / "merged", lora_sync=False)
        merged.sync(5)
        found = merged.generate(PROMPTS[:6], 2, Sampling(8))
        assert largest_difference(policy(served_model), PROMPTS[:6], found) < 1e-4
        group = real.vllm()
        assert real.stop() == 0
        assert group_is_empty(group)


def test_a_server_killed_in_the_middle_and_started_again_is_waited_for(lora_server, served_model, tmp_path):
    model = policy(served_model)
    server = backend(lora_server.url, model, served_model, tmp_path)
    move(model)
    server.sync(3)
    found = []
    working = threading.Thread(target=lambda: found.extend(server.generate(PROMPTS, 4, Sampling(128))))
    working.start()
    time.sleep(1.0)
    assert not found
    group = lora_server.vllm()
    lora_server.kill()
    assert group_is_empty(group)
    assert server.health() is not None
    lora_server.start()
    lora_server.wait()
    working.join(300)
    assert [len(group) for group in found] == [4] * len(PROMPTS)
    assert versions(found) == {3}
    assert largest_difference(model, PROMPTS, found) < 3e-4  # the largest of thousands; another version's is above 0.01
    server.close()
    os.kill(lora_server.vllm(), signal.SIGTERM)  # ended by somebody else
    assert lora_server.process.wait(60) is not None


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_an_engine_beside_the_trainer_follows_the_policy(kind, served_model, tmp_path):
    # vLLM's environment lacks what the project has: that is put after its own.
    site = next(path for path in sys.path if path.endswith("site-packages"))
    env = {**os.environ, **ON_CPU, "UPWEIGHT_SITE": site, "PYTHONPATH": str(ROOT / "src")}
    command = [PYTHON, str(ROOT / "tests" / "with_vllm" / "colocated.py"), str(served_model), str(tmp_path), kind]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rounds = json.loads(ended.stdout.splitlines()[-1])
    assert [one["version"] for one in rounds] == [0, 3, 4]
    assert all(one["versions"] == [one["version"]] for one in rounds)
    assert all(one["difference"] < 1e-4 for one in rounds)
    assert all(one["completions"] == [3] * 6 and one["heard"] == list(range(6)) for one in rounds)
    assert all(one["folders"] == 1 for one in rounds)
    assert not (tmp_path / "vllm").exists()
