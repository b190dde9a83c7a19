"""The server backend against a small server that speaks vLLM's routes."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from made_tokenizers import byte_tokenizer
from made_vllm import FakeVllm
from tiny_models import plain_statistics, sample, tiny
from upweight.errors import UserError
from upweight.rollout.vllm import client as vllm_client
from upweight.rollout.vllm import versions as vllm_weights
from upweight.rollout.vllm.server import VllmServer
from upweight.rollout.vllm.servers import VllmServers
from upweight.types import Sampling, Unit

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(vllm_client, "BACKOFF_SECONDS", (0.01,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    tiny("llama").save_pretrained(place)
    return place


@pytest.fixture
def fake(folder):
    server = FakeVllm(folder)
    yield server
    server.close()


def policy(folder, adapter: bool = True, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if not adapter:
        return model
    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    )


def backend(fake, model, tmp_path, **options):
    options = {"dtype": torch.float32, "folder": tmp_path / "vllm", "timeout": 5.0, **options}
    return VllmServer(fake.url, model, byte_tokenizer("chatml"), **options)


def move(model, size: float = 0.3) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(size * torch.randn_like(weight))


def largest_difference(model, found) -> float:
    units, said = [], []
    for prompt, completions in zip(PROMPTS, found, strict=True):
        for one in completions:
            ids = np.array([*prompt, *one.ids])
            units.append(Unit((sample(ids, prompt=len(prompt)),)))
            said += one.logps
    return float((plain_statistics(model, units)["logps_T"] - torch.tensor(said)).abs().max().detach())


@pytest.mark.parametrize(("adapter", "lora_sync"), [(True, None), (True, False), (False, None)])
def test_completions_follow_the_policy_through_syncs(fake, folder, tmp_path, adapter, lora_sync):
    model = policy(folder, adapter)
    server = backend(fake, model, tmp_path, lora_sync=lora_sync)
    for version in (0, 3, 4):
        server.sync(version)
        found = server.generate(PROMPTS, 2, Sampling(5))
        assert [len(group) for group in found] == [2, 2, 2]
        assert {number for group in found for one in group for number in one.versions} == {version}
        assert largest_difference(model, found) < 1e-4
        assert server.version() == version
        move(model)
    server.close()
    assert not list(tmp_path.glob("vllm/*"))
    assert not fake.loaded


def test_merged_weights_leave_the_training_copy_alone(fake, folder, tmp_path):
    model = policy(folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backend(fake, model, tmp_path, lora_sync=False).sync(0)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_every_version_has_its_own_name_and_old_ones_go_after_their_last_request(fake, folder, tmp_path):
    model = policy(folder)
    server = backend(fake, model, tmp_path)
    server.sync(0)
    fake.held = set(fake.loaded)
    found = []
    working = threading.Thread(target=lambda: found.extend(server.generate(PROMPTS, 1, Sampling(4))))
    asked = len(fake.asked("/v1/completions"))
    working.start()
    while len(fake.asked("/v1/completions")) < asked + 3:
        time.sleep(0.01)
    move(model)
    server.sync(1)
    assert len(fake.loaded) == 2  # the old one is in use
    fake.held = set()
    working.join()
    assert {number for group in found for one in group for number in one.versions} == {0}
    server.sync(2)
    (last,) = fake.loaded
    assert last.endswith("-v2")
    assert [path.name for path in (tmp_path / "vllm").iterdir()] == [last]


def test_each_prompt_is_reported_as_it_ends(fake, folder, tmp_path):
    server = backend(fake, policy(folder), tmp_path)
    server.sync(0)
    told = {}
    thread = threading.current_thread()

    def done(place, completions):
        assert threading.current_thread() is thread
        told[place] = completions

    found = server.generate(PROMPTS, 2, Sampling(3), done)
    assert [told[place] for place in range(3)] == found


def test_requests_leave_nothing_to_the_servers_defaults(fake, folder, tmp_path):
    server = backend(fake, policy(folder), tmp_path, options={"structured_outputs": {"regex": "a+"}})
    server.sync(0)
    kept = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    sampling = Sampling(3, **kept, stop_ids=(4,), stop_strings=("x",))
    server.generate([[5, 6]], 2, sampling)
    body = fake.asked("/v1/completions")[-1]
    wanted = {"n": 2, "prompt": [5, 6], "max_tokens": 3, "temperature": 1.0, **kept, "stop": ["x"], "logprobs": 0}
    wanted |= {"structured_outputs": {"regex": "a+"}}
    assert {name: body[name] for name in wanted} == wanted
    assert {2, 4} <= {*body["stop_token_ids"]}


def test_errors_of_the_server_are_tried_again(fake, folder, tmp_path):
    server = backend(fake, policy(folder), tmp_path)
    server.sync(0)
    fake.faults["/v1/completions"] = [500, 503, 500, 429]
    found = server.generate(PROMPTS, 1, Sampling(3))
    assert [len(group) for group in found] == [1, 1, 1]


def test_errors_before_training_are_lived_through(fake, folder, tmp_path):
    fake.faults = {"/v1/completions": [500, 500], "/v1/models": [503]}
    backend(fake, policy(folder), tmp_path).sync(0)


def test_a_refused_request_is_not_tried_again(fake, folder, tmp_path):
    server = backend(fake, policy(folder), tmp_path)
    server.sync(0)
    fake.faults["/v1/completions"] = [400]
    with pytest.raises(UserError, match="refuses a request: 400: as was asked"):
        server.generate([[3]], 1, Sampling(3))


@pytest.mark.parametrize("adapter", [True, False])
def test_a_server_that_was_started_anew_gets_the_present_version_again(fake, folder, tmp_path, adapter):
    model = policy(folder, adapter)
    move(model)
    server = backend(fake, model, tmp_path)
    server.sync(7)
    fake.restart()
    found = server.generate(PROMPTS, 2, Sampling(4))
    assert largest_difference(model, found) < 1e-4
    assert found[0][0].versions[0] == 7


def test_a_server_that_is_gone_ends_the_run_with_one_line(fake, folder, tmp_path):
    server = backend(fake, policy(folder), tmp_path, timeout=0.5)
    server.sync(0)
    fake.well = False
    assert "500" in (server.health() or "")
    with pytest.raises(UserError, match=r"has not answered for 0\.5 seconds") as caught:
        server.generate(PROMPTS, 1, Sampling(3))
    assert "\n" not in str(caught.value)
    assert "trl.use_vllm: false" in str(caught.value)


def test_a_server_that_starts_late_is_waited_for(fake, folder, tmp_path):
    fake.well = False
    threading.Timer(0.3, lambda: setattr(fake, "well", True)).start()
    backend(fake, policy(folder), tmp_path).sync(0)


def test_a_server_that_writes_nothing_is_noticed(fake, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("upweight.rollout.vllm.server.STALLED_SECONDS", 0.2)
    monkeypatch.setattr("upweight.rollout.vllm.server.CHECK_SECONDS", 0.05)
    server = backend(fake, policy(folder), tmp_path, timeout=0.2)
    server.sync(0)
    fake.delay = 5.0
    with pytest.raises(UserError, match="writes no tokens"):
        server.generate(PROMPTS, 1, Sampling(3))


def test_a_server_that_hangs_while_new_weights_wait_for_its_requests_is_noticed(fake, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("upweight.rollout.vllm.server.STALLED_SECONDS", 0.5)
    monkeypatch.setattr("upweight.rollout.vllm.server.CHECK_SECONDS", 0.05)
    model = policy(folder, adapter=False)
    server = backend(fake, model, tmp_path, timeout=0.5)
    server.sync(0)
    fake.held.add(server.served_name())
    before = len(fake.asked("/v1/completions"))  # by the sync
    with ThreadPoolExecutor(2) as pool:
        sampled = pool.submit(server.generate, PROMPTS, 1, Sampling(3))
        try:
            while len(fake.asked("/v1/completions")) == before:
                time.sleep(0.01)
            move(model)
            synced = pool.submit(server.sync, 1)
            with pytest.raises(UserError, match="writes no tokens"):
                sampled.result(20)
        finally:
            fake.held.clear()
        synced.result(20)


def test_requests_that_wait_for_weights_hear_of_any_error_that_kept_them_from_coming(fake, folder, tmp_path):
    server = backend(fake, policy(folder, adapter=False), tmp_path)
    server.sync(0)
    does, asked = server.weights.on_model, []

    def out_of_memory_while_comparing(work):
        asked.append(work)
        if len(asked) == 2:
            raise torch.OutOfMemoryError("no room to compare")
        return does(work)

    server.weights.on_model = out_of_memory_while_comparing
    with pytest.raises(torch.OutOfMemoryError):
        server.sync(1)
    with pytest.raises(UserError, match="no room to compare"):
        server.generate(PROMPTS, 1, Sampling(3))


def test_a_server_may_be_lost_while_another_is_sent_weights(fake, folder, tmp_path):
    others = [FakeVllm(folder) for _ in range(2)]
    fakes, model = {one.url: one for one in (fake, *others)}, policy(folder)

    def opened(url, number, _on_model):
        return backend(fakes[url], model, tmp_path / str(number))

    servers = VllmServers(list(fakes), opened)
    servers.sync(0)
    first, lost, _ = servers._live.values()
    send = first.weights.send
    first.weights.send = lambda *given: (servers._mark_lost(lost.client.url, UserError("gone")), send(*given))[1]
    move(model)
    servers.sync(1)
    assert [one.version() for one in servers._live.values()] == [1, 1]
    assert len(servers.generate(PROMPTS, 2, Sampling(3))) == 3
    for one in others:
        one.close()


def test_no_server_is_left_waiting_where_sending_to_several_broke_off(fake, folder, tmp_path):
    other, model = FakeVllm(folder), policy(folder, adapter=False)
    servers = VllmServers(
        [fake.url, other.url],
        lambda url, number, _: backend(fake if number == 0 else other, model, tmp_path / str(number)),
    )
    servers.sync(0)
    first, second = servers._live.values()

    def fails(*_given):
        raise RuntimeError("broken")

    first.weights.publish = fails
    with pytest.raises(RuntimeError, match="broken"):
        servers.sync(1)
    for server in (first, second):
        with pytest.raises(UserError, match="broken"):
            server.generate(PROMPTS, 1, Sampling(3))
    other.close()


def test_another_model_on_the_port_is_refused(fake, folder, tmp_path):
    model = policy(folder, adapter=False)
    model.config.name_or_path = "somebody/else"
    with pytest.raises(UserError, match=r"serves .* but base_model is 'somebody/else'"):
        backend(fake, model, tmp_path)


def test_another_vocabulary_is_refused(fake, folder, tmp_path):
    for size, words in ((97, "fewer tokens than the 97"), (80, "more tokens than the 80")):
        model = policy(folder, adapter=False)
        model.resize_token_embeddings(size)
        with pytest.raises(UserError, match=words):
            backend(fake, model, tmp_path)


def test_other_weights_of_the_same_name_are_refused_where_only_the_adapter_is_sent(fake, folder, tmp_path):
    model = policy(folder)
    for weight in model.parameters():
        weight.data.mul_(1.05)
    with pytest.raises(UserError, match="computes with other weights"):
        backend(fake, model, tmp_path)


def test_a_prompt_that_does_not_fit_is_refused(fake, folder, tmp_path):
    server = backend(fake, policy(folder), tmp_path)
    with pytest.raises(UserError, match="a prompt of 200 tokens with 57 new ones exceeds the 256"):
        server.require_room(200, 57)
    server.require_room(200, 56)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/completions"])
def test_a_failed_sync_is_tried_again(fake, folder, tmp_path, path):
    model = policy(folder)
    server = backend(fake, model, tmp_path)
    fake.faults[path] = [500, 500]
    server.sync(0)
    assert largest_difference(model, server.generate(PROMPTS, 1, Sampling(3))) < 1e-4
    assert len(fake.loaded) == 1


def test_a_sync_that_never_works_stops_the_run(fake, folder, tmp_path):
    server = backend(fake, policy(folder), tmp_path)
    fake.faults["/v1/load_lora_adapter"] = [500] * vllm_weights.SEND_ATTEMPTS
    with pytest.raises(UserError, match=r"weights of step 5 could not be sent .* 500 as was asked"):
        server.sync(5)
    assert not list((tmp_path / "vllm").iterdir())


def test_a_full_disk_is_tried_again_and_then_said(fake, folder, tmp_path, monkeypatch):
    server = backend(fake, policy(folder), tmp_path)
    full = OSError(28, "No space left on device")
    kept = vllm_weights.write_aside
    tries = []

    def fails_once(transport, place):
        tries.append(place)
        if len(tries) == 1:
            raise full
        kept(transport, place)

    monkeypatch.setattr(vllm_weights, "write_aside", fails_once)
    server.sync(0)
    assert len(tries) == 2

    def fails(transport, place):
        raise full

    monkeypatch.setattr(vllm_weights, "write_aside", fails)
    with pytest.raises(UserError, match="No space left on device"):
        server.sync(1)


def test_a_sync_that_did_not_arrive_is_noticed(fake, folder, tmp_path, monkeypatch):
    model = policy(folder)
    server = backend(fake, model, tmp_path)
    server.sync(0)
    kept = vllm_weights.write_aside

    def stale(transport, place):
        kept(transport, place)
        move(model)  # the trainer goes on before the server has read what was written

    monkeypatch.setattr(vllm_weights, "write_aside", stale)
    with pytest.raises(UserError, match="log-probs after the sync differ"):
        server.sync(1)


@pytest.mark.parametrize(
    ("options", "key"),
    [({"use_dora": True}, "peft_use_dora"), ({"modules_to_save": ["lm_head"]}, "lora_modules_to_save")],
)
def test_what_vllm_cannot_load_is_refused_at_the_start(fake, folder, tmp_path, options, key):
    model = policy(folder, **options)
    with pytest.raises(UserError, match=f"{key}: vLLM cannot load such an adapter"):
        backend(fake, model, tmp_path, lora_sync=True)


def test_modules_trained_in_full_are_sent_merged(fake, folder, tmp_path):
    model = policy(folder, modules_to_save=["lm_head"])
    move(model)
    server = backend(fake, model, tmp_path)
    server.sync(0)
    assert fake.asked("/collective_rpc")
    assert largest_difference(model, server.generate(PROMPTS, 1, Sampling(3))) < 1e-4


def test_a_server_without_adapters_is_named(folder, tmp_path):
    fake = FakeVllm(folder, adapters=False)
    server = backend(fake, policy(folder), tmp_path)
    with pytest.raises(UserError, match="cannot load adapters while it runs"):
        server.sync(0)
    fake.close()


def test_what_an_earlier_run_left_is_forgotten(fake, folder, tmp_path):
    backend(fake, policy(folder), tmp_path).sync(0)
    (left,) = fake.loaded
    backend(fake, policy(folder), tmp_path)
    assert left not in fake.loaded
    assert not (tmp_path / "vllm" / left).exists()


# In half precision too, where log-probs are compared loosely, and at temperatures that move them little.
@pytest.mark.parametrize("precision", [(0.3, torch.float32), (0.9, torch.bfloat16)])
def test_log_probs_without_the_temperature_are_not_known(fake, folder, tmp_path, caplog, precision):
    fake.raw_logps, model, (temperature, dtype) = True, policy(folder), precision
    server = backend(fake, model, tmp_path, temperature=temperature, dtype=dtype)
    for version in (0, 1):
        server.sync(version)
        completions = server.generate(PROMPTS, 2, Sampling(5, temperature))
        assert all(len(one.ids) and one.logps == [] for group in completions for one in group)
        move(model)
    assert "--logprobs-mode processed_logprobs" in caplog.text


def test_other_weights_are_noticed_by_log_probs_without_the_temperature_too(fake, folder, tmp_path):
    fake.raw_logps = True
    with torch.no_grad():
        fake.model.lm_head.weight.add_(1.0 * torch.randn_like(fake.model.lm_head.weight))
    with pytest.raises(UserError, match="computes with other weights"):
        backend(fake, policy(folder), tmp_path, temperature=0.8)


def test_a_server_restarted_with_the_temperature_in_its_log_probs_is_believed(fake, folder, tmp_path):
    fake.raw_logps = True
    server = backend(fake, policy(folder), tmp_path, temperature=0.5)
    server.sync(0)
    fake.raw_logps = False
    fake.restart()
    completions = server.generate(PROMPTS, 1, Sampling(5, 0.5))
    assert all(len(one.logps) == len(one.ids) for group in completions for one in group)


@pytest.mark.slow
def test_hundreds_of_requests_are_under_way_and_the_server_is_looked_at_once(fake, folder, tmp_path):
    server = backend(fake, policy(folder), tmp_path)
    server.sync(0)
    fake.held = set(fake.loaded)
    looked, asked = len(fake.asked("/health")), len(fake.asked("/v1/completions"))
    began = time.monotonic()
    turns = [server.start(PROMPTS[0], 1, Sampling(1)) for _ in range(300)]
    while len(fake.asked("/v1/completions")) < asked + 300:  # all of them, while none is answered
        time.sleep(0.01)
    # A slow machine needs seconds to send them, and the check is repeated when it is older than CHECK_VALID_SECONDS.
    periods = (time.monotonic() - began) / vllm_weights.CHECK_VALID_SECONDS
    assert len(fake.asked("/health")) - looked < 50 + periods
    fake.held = set()
    assert [len(turn.result(60)) for turn in turns] == [1] * 300
