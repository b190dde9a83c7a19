"""The hub is asked once; without it, what this machine has is used, and what it lacks is one clear line."""

import socket
import time

import datasets
import pytest
from huggingface_hub import constants, get_session, set_client_factory
from huggingface_hub.utils import _http

from made_gguf import write_gguf
from made_runs import write_model
from tiny_models import tiny
from upweight.config.sections.data import DatasetSpec
from upweight.config.sections.model import ModelSection
from upweight.data.sources.open import open_entry
from upweight.errors import UserError
from upweight.models import hub
from upweight.models.load import load_model_config, resolve_source
from upweight.models.tokenizer import load_tokenizer

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """A hub whose address refuses connections; what was asked of it is listed."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "src" / "upweight" / "models" / "hub.py"))
    set_client_factory(_http.default_client_factory)
    asked = []
    get_session().event_hooks["request"].append(lambda request: asked.append(str(request.url)))
    hub._problem.cache_clear()
    yield asked
    hub._problem.cache_clear()
    set_client_factory(_http.default_client_factory)


def test_the_hub_is_asked_once_and_a_missing_model_is_one_line(unreachable, caplog):
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(
            UserError,
            match=r"not on this machine, and the hub is not asked .*reached: .*\). No other model is here .*: get",
        ) as raised:
            load_tokenizer(ModelSection(base_model=NAME))
        assert "\n" not in str(raised.value)
        made = "`upweight init sft tiny-model --tiny` makes a tiny model that learns nothing useful"
        assert f"{made}; name it with base_model: tiny-model/tiny" in str(raised.value)
    assert len(unreachable) == 1
    assert [record.message for record in caplog.records if "cannot be reached" in record.message][1:] == []
    assert "cannot be reached" in caplog.text
    assert time.monotonic() - start < 60


def test_a_hub_that_cannot_be_reached_is_no_wrong_name(unreachable):
    unreached = (
        r"hub_model_id: no repository: the hub \(.*\) cannot be reached \(.*\. Push the folder later; training without"
    )
    with pytest.raises(UserError, match=unreached), hub.hub_errors("no repository"):
        get_session().get(constants.ENDPOINT)
    with pytest.raises(UserError, match=r"no repository: 401\. Log in"), hub.hub_errors("no repository"):
        raise ValueError("401")


def test_datasets_are_not_asked_for_again(unreachable, tmp_path):
    with pytest.raises(UserError, match="cannot be loaded from the hub"):
        open_entry(DatasetSpec(path="someone/rows"), "datasets[0]", tmp_path)
    assert len(unreachable) == 1


def test_the_model_that_the_demo_fetched_stands_in(unreachable, tmp_path, monkeypatch, caplog):
    pytest.importorskip("gguf")
    folder = tmp_path / ".cache" / "demo" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    write_gguf(tiny("llama", tie_word_embeddings=False), folder / "model.gguf")
    (tmp_path / "grpo").mkdir()
    monkeypatch.chdir(tmp_path / "grpo")  # as `upweight init grpo` in the checkout has it
    assert resolve_source(NAME, None) == (str(folder), "model.gguf")
    assert load_model_config(ModelSection(base_model=NAME)).model_type == "llama"
    assert "which `make demo` fetched" in caplog.text
    with pytest.raises(UserError, match=r"another.*here with base_model: .*model\.gguf"):
        load_tokenizer(ModelSection(base_model="someone/another"))


def test_a_model_in_the_librarys_cache_comes_first(unreachable, tmp_path):
    write_model(tmp_path / "cache" / f"models--{NAME.replace('/', '--')}" / "snapshots" / "1")
    folder = tmp_path / ".cache" / "demo" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    (folder / "model.gguf").touch()
    assert resolve_source(NAME, None) == (NAME, None)
    assert hub.models_here()[0] == NAME


def test_models_in_folders_below_are_named_the_one_of_that_name_first(unreachable, tmp_path):
    for place in ("a", "models/org/SmolLM2-135M-Instruct", "out/checkpoint-2", ".git/b", "1/2/3/too-deep"):
        write_model(tmp_path / place)
    (tmp_path / "rows").mkdir()
    assert hub.models_here() == ["a", "models/org/SmolLM2-135M-Instruct"]
    with pytest.raises(UserError, match=r"here with base_model: models/org/SmolLM2-135M-Instruct; a$"):
        load_tokenizer(ModelSection(base_model=NAME))


def test_the_look_for_models_is_short(unreachable, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "MOST_FOLDERS", 3)
    for name in "abcd":
        write_model(tmp_path / name)
    assert hub.models_here() == ["a", "b", "c"]


def test_folders_ask_nothing(unreachable, tmp_path):
    resolve_source(str(write_model(tmp_path / "model")), None)
    assert unreachable == []
