"""What commands read has `hub_timeout` in force for every request to the hub; a hub out of reach is told of once."""

import socket
from pathlib import Path

import pytest
from huggingface_hub import constants, get_session, set_client_factory
from huggingface_hub.utils import _http
from typer.testing import CliRunner

from made_runs import write_config, write_model
from upweight.cli.app import app
from upweight.cli.fits import run as fits
from upweight.cli.inputs import find_trained, load_with_notices
from upweight.cli.starter.new import new
from upweight.models import hub


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """The library's own clients, which may ask; the address they are given refuses them."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    set_client_factory(_http.default_client_factory)
    yield
    set_client_factory(_http.default_client_factory)


def asked(**options):
    """The limits with which a request goes out, by kind."""
    client, sent = get_session(), []
    client.event_hooks["request"].append(sent.append)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(Exception, match="refused"):
        client.get(address, **options)
    return set(sent[0].extensions["timeout"].values())


def test_requests_without_a_limit_get_that_of_the_key(tmp_path):
    load_with_notices(write_config(tmp_path, tmp_path), None)
    assert asked() == {120}
    assert asked(timeout=10) == {10}


def test_a_limit_that_is_set_holds_for_all_until_the_next_config(tmp_path):
    file = write_config(tmp_path, tmp_path)
    load_with_notices(file, ["hub_timeout=3"])
    assert asked(timeout=10) == {3}
    load_with_notices(file, None)
    assert asked(timeout=10) == {10}
    assert len(_http._GLOBAL_CLIENT_FACTORY().event_hooks["request"]) == 2  # the library's and one limit


def test_clients_of_another_factory_keep_what_it_sets(tmp_path):
    kind = type(get_session())
    set_client_factory(lambda: kind(timeout=None, headers={"x-proxy": "mine"}))
    for _ in range(2):
        load_with_notices(write_config(tmp_path, tmp_path), None)
        assert get_session().headers["x-proxy"] == "mine"
        assert asked() == {120}


def by_doctor(file):
    CliRunner().invoke(app, ["doctor", str(file)])


def by_fits(file):
    fits(file, [], memory=24)


def by_run_folder(file):
    folder = file.parent / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(file.read_text())
    (folder / "config.json").write_text("{}")  # it holds a model
    find_trained(str(folder), [])


def by_folder_of_weights(file):
    file.unlink()  # no run is known then
    find_trained(str(file.parent / "model"), ["hub_timeout=3"])


@pytest.mark.parametrize("read", [by_doctor, by_fits, by_run_folder, by_folder_of_weights])
def test_every_command_has_the_limit(read, tmp_path):
    read(write_config(tmp_path, write_model(tmp_path / "model"), hub_timeout=3))
    assert asked() == {3}


def test_new_tells_of_a_hub_out_of_reach_once_with_the_model(tmp_path, monkeypatch, capsys, caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("prompt,chosen,rejected\nWhy?,So.,No.\n")
    hub._problem.cache_clear()
    new(Path("mine.csv"), model="nobody/nothing", yes=True)
    hub._problem.cache_clear()
    assert "reached" not in caplog.text
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "reached" in line]
    assert told.startswith("base_model: could not load the tokenizer of 'nobody/nothing'")
    assert f"the hub is not asked ({constants.ENDPOINT} cannot be reached: " in told
