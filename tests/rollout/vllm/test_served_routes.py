"""The experts that a vLLM server chose come back with its completions, for the layers that have routers."""

import base64
import io

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from made_tokenizers import byte_tokenizer
from made_vllm import FakeVllm, experts_chosen
from tiny_models import tiny
from upweight.engine.routing import install_routing
from upweight.errors import UserError
from upweight.rollout.vllm.served_routes import ServedRoutes
from upweight.rollout.vllm.server import VllmServer
from upweight.types import Sampling

PROMPTS = [[5, 6, 7, 8], [9, 10]]


def encoded(array) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def dense_first():
    """A mixture whose first decoder layer has no experts."""
    return tiny("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[0])


@pytest.fixture(scope="module")
def reader():
    return ServedRoutes(install_routing(dense_first()))


@pytest.fixture
def fake(tmp_path):
    dense_first().save_pretrained(tmp_path / "model")
    server = FakeVllm(tmp_path / "model")
    server.records_experts = True
    yield server
    server.close()


def backend(fake, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(fake.folder, dtype=torch.float32)
    options = {"dtype": torch.float32, "folder": tmp_path / "vllm", "timeout": 5.0}
    routes = ServedRoutes(install_routing(model))
    return model, VllmServer(fake.url, model, byte_tokenizer("chatml"), routes=routes, **options)


def test_experts_of_layers_without_routers_are_left_out(reader):
    returned = np.arange(5 * 3 * 2).reshape(5, 3, 2) % 4
    routes = reader.read(encoded(returned.astype(np.uint16)), 6)
    assert routes.dtype == np.int16
    assert routes[:5].tolist() == returned[:, 1:].tolist()
    assert (routes[5] == -1).all()
    assert reader.read(returned, 6).tolist() == routes.tolist()  # of an engine in this process


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returns no experts. Start it with `upweight vllm-serve`"),
        (encoded(np.ones((4, 3, 2))), r"as \[4, 3, 2\] where 5 tokens, 3 or more layers and 2 experts"),
        (encoded(np.ones((5, 2, 2))), "3 or more layers"),
        (encoded(np.ones((5, 3, 4))), "2 experts each"),
        (encoded(np.zeros((5, 3, 2), np.uint8)), "the same expert twice for one token"),
        (encoded(np.array([print], dtype=object)), "cannot be read"),
        ("no base64!", "cannot be read"),
    ],
)
def test_what_cannot_be_replayed_is_refused(reader, returned, words):
    with pytest.raises(UserError, match=f"trl.routing_replay: .*{words}"):
        reader.read(returned, 6)


def test_completions_have_the_experts_of_their_tokens(fake, tmp_path):
    model, server = backend(fake, tmp_path)
    server.sync(0)
    for prompt, group in zip(PROMPTS, server.generate(PROMPTS, 2, Sampling(5)), strict=True):
        assert len(group) == 2
        for one in group:
            ids = [*prompt, *one.ids]
            assert one.routes is not None
            assert one.routes.shape == (len(ids), 2, 2)
            assert one.routes[:-1].tolist() == experts_chosen(model, ids[:-1])[:, 1:].tolist()
    server.close()


def test_a_server_without_the_route_says_how_to_open_it(fake, tmp_path):
    fake.records_experts = False
    _, server = backend(fake, tmp_path)
    server.sync(0)
    with pytest.raises(UserError, match=r"takes no requests for the experts of tokens .*vllm.enable_scale_out: true"):
        server.generate(PROMPTS, 1, Sampling(3))
    server.close()
