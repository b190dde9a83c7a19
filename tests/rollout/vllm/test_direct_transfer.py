"""All weights handed to a server without a folder, against a small server that speaks vLLM's routes.

Memory of the CPU stands in for that of a GPU, and a queue for NCCL.
"""

import asyncio
import contextlib
import itertools
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from made_tokenizers import byte_tokenizer
from made_vllm import FakeVllm
from slow_cases import slow_except
from tiny_models import tiny
from upweight.errors import UserError
from upweight.rollout.vllm import client as vllm_client
from upweight.rollout.vllm import direct_transfer as vllm_direct
from upweight.rollout.vllm.server import VllmServer
from upweight.types import Sampling

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
ROUTES = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
ROUTES = (*ROUTES, "/reset_prefix_cache", "/collective_rpc")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(request, monkeypatch):
    monkeypatch.setattr(vllm_client, "BACKOFF_SECONDS", (0.01,))
    if "gpu" in request.keywords:
        return
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    for name in ("synchronize", "ipc_collect"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


@pytest.fixture
def _small_pieces(monkeypatch):
    monkeypatch.setattr(vllm_direct, "CHUNK_BYTES", 40_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    tiny("llama", tie_word_embeddings=True).save_pretrained(place)
    return place


@pytest.fixture(params=["0.26.0", "0.32.0"])
def fake(request, folder, monkeypatch):
    server = FakeVllm(folder, version=request.param)
    common = ModuleType("vllm.distributed.weight_transfer.nccl_common")

    def trainer_init(place):
        assert set(place) == {"master_address", "master_port", "world_size"}
        return SimpleNamespace(broadcast=lambda tensor, src: server.broadcast.put(tensor.clone()), destroy=lambda: None)

    common.trainer_init = trainer_init  # pyright: ignore[reportAttributeAccessIssue]
    package = ModuleType("vllm.distributed.weight_transfer")
    package.nccl_common = common  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, common.__name__, common)
    yield server
    server.close()


def policy(folder, adapter: bool):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    return (
        get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        if adapter
        else model
    )


def backend(fake, model, tmp_path, transfer, **options):
    options = {"dtype": torch.float32, "folder": tmp_path / "vllm", "timeout": 5.0, "lora_sync": False, **options}
    return VllmServer(fake.url, model, byte_tokenizer("chatml"), transfer=transfer, **options)


def move(model) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.3 * torch.randn_like(weight))


def routes(fake) -> list[str]:
    return [path for path, _ in fake.requests if path in ROUTES]


@pytest.mark.parametrize(
    ("transfer", "adapter"),
    slow_except([("ipc", False), ("nccl", True)], itertools.product(["ipc", "nccl"], [True, False])),
)
@pytest.mark.usefixtures("_small_pieces")
def test_the_server_follows_the_policy(fake, folder, tmp_path, transfer, adapter):
    model = policy(folder, adapter)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    server = backend(fake, model, tmp_path, transfer)
    server.sync(0)  # compares log-probs, in float32 to 1e-3
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    first = routes(fake)
    updates = first.count("/update_weights")
    assert updates > 1
    assert first == [*ROUTES[:2], *["/update_weights"] * updates, *ROUTES[3:5]]
    move(model)
    server.sync(1)
    assert routes(fake)[len(first) :] == first[1:]  # they have met
    assert {one.versions[0] for group in server.generate(PROMPTS, 2, Sampling(3)) for one in group} == {1}
    server.close()
    assert not (tmp_path / "vllm").exists()


@pytest.mark.parametrize("transfer", ["ipc", "nccl"])
def test_what_is_said_of_weights(fake, folder, tmp_path, transfer):
    model = policy(folder, adapter=False)
    backend(fake, model, tmp_path, transfer).sync(0)
    old = fake.version == "0.26.0"
    (init,) = [body["init_info"] for body in fake.asked("/init_weight_transfer_engine")]
    (update,) = [body["update_info"] for body in fake.asked("/update_weights")]
    said = {
        name: (dtype, shape)
        for name, dtype, shape in zip(update["names"], update["dtype_names"], update["shapes"], strict=True)
    }
    own = {name: ("float32", list(value.shape)) for name, value in model.state_dict().items()}
    del own["lm_head.weight"]  # tied
    assert said == own
    if transfer == "ipc":
        assert init == ({} if old else {"packed": True})
        assert update.get("packed") == (True if old else None)
        assert update["tensor_sizes"] == [model.state_dict()[name].nbytes for name in update["names"]]
    else:
        assert (init["rank_offset"], init["world_size"], init["master_address"]) == (1, 2, "127.0.0.1")
        assert set(update) == {"names", "dtype_names", "shapes"}


@pytest.mark.parametrize(
    ("transfer", "route"),
    [("ipc", "/update_weights"), ("ipc", "/finish_weight_update"), ("nccl", "/finish_weight_update")],
)
def test_a_piece_that_fails_has_all_sent_again(fake, folder, tmp_path, transfer, route):
    server = backend(fake, policy(folder, adapter=False), tmp_path, transfer)
    fake.faults[route] = [500]
    server.sync(0)
    assert routes(fake).count("/init_weight_transfer_engine") == 2
    assert not fake.updating


def test_a_server_that_was_started_anew_ends_the_run_with_one_line(fake, folder, tmp_path):
    server = backend(fake, policy(folder, adapter=False), tmp_path, "ipc")
    server.sync(0)
    fake.restart()
    with pytest.raises(UserError, match="weights sent by ipc are not kept: go on with --resume"):
        server.generate(PROMPTS, 1, Sampling(3))
    server.sync(1)  # what `--resume` does
    assert server.version() == 1


@pytest.mark.parametrize("transfer", ["ipc", "nccl"])
def test_a_server_that_is_not_prepared_is_named(fake, folder, tmp_path, transfer):
    fake.faults["/init_weight_transfer_engine"] = [500]
    server = backend(fake, policy(folder, adapter=False), tmp_path, transfer)
    with pytest.raises(UserError, match=f"takes no weights by {transfer} .*500 as was asked.*vllm-serve"):
        server.sync(0)


def test_an_adapter_sent_alone_goes_its_own_way(fake, folder, tmp_path, caplog):
    server = backend(fake, policy(folder, adapter=True), tmp_path, "ipc", lora_sync=True)
    server.sync(0)
    assert not routes(fake)
    assert fake.loaded


def test_pieces_have_one_precision_and_a_size():
    sizes = {"a": 10, "b": 90, "c": 30, "d": 500, "e": 1}
    weights = [(name, torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items()]
    weights.append(("f", torch.zeros(2, dtype=torch.bfloat16)))
    assert [[name for name, _ in chunk] for chunk in vllm_direct.chunks(iter(weights), 100)] == [
        ["a", "b"], ["c"], ["d"], ["e"], ["f"]
    ]  # fmt: skip


READS = """
import base64, pickle, sys, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
((uuid, handle),) = pickle.loads(base64.b64decode(sys.stdin.read())).items()
assert uuid == str(torch.cuda.get_device_properties(0).uuid)
print(rebuild_cuda_tensor(*handle).view(torch.bfloat16).float().sum().item())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_process_reads_the_memory_of_a_piece():
    sums = []

    async def ask(path, body=None, **_):
        if path == "/update_weights":
            handle = body["update_info"]["ipc_handles_pickled"]
            read = subprocess.run(
                [sys.executable, "-c", READS], input=handle, capture_output=True, text=True, check=True
            )
            sums.append(float(read.stdout))
        return {"version": "0.32.0"}

    async def send(channel, client):
        await channel.connect(client)
        for value in (1.0, 2.0):
            await channel.send(client, [(name, torch.full((8, 4), value, device="cuda").bfloat16()) for name in "ab"])

    asyncio.run(send(vllm_direct.SharedMemory(), SimpleNamespace(ask=ask, load_seconds=60.0)))
    assert sums == [64.0, 128.0]
