"""Servers that are started and watched, with a small program in the place of the Gym's."""

import asyncio
import os
import sys
import textwrap

import pytest
import yaml

from made_gym_server import wait_until
from upweight.config.sections.rollout import GymDataset, GymSection
from upweight.environments.episode import Turn
from upweight.environments.nemo_gym import gym as gym_module
from upweight.environments.nemo_gym.gym import NemoGym
from upweight.environments.nemo_gym.process import GymProcess
from upweight.environments.nemo_gym.servers import GymFault
from upweight.errors import UserError
from upweight.processes import free_port

PROGRAM = """
import http.server, json, os, sys, time

port = int(next(one for one in sys.argv if "head_server.port" in one).partition("=")[2])
base = f"http://127.0.0.1:{port}"
listed = [{"config_path": "sums", "name": "sums", "server_type": "resources_servers", "url": base + "/sums",
           "pid": os.getpid(), "start_time": time.time()}]
hung = []

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        while hung:
            time.sleep(1)
        self.answer(listed if self.path == "/server_instances" else {"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        texts = [part["text"] for item in body.get("response", {}).get("output", []) for part in item["content"]]
        if texts == ["die"]:
            os._exit(1)
        hung.extend(text for text in texts if text == "hang")
        while hung:
            time.sleep(1)
        self.answer({"reward": 1.0})

    def answer(self, content):
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

if os.path.exists("broken") or "broken" in sys.argv[1]:
    sys.exit("it is broken")
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
ROW = {"prompt": "1 + 1", "responses_create_params": {"input": "1 + 1"}, "nemo_gym_server": "sums"}


@pytest.fixture
def section(tmp_path):
    """A Gym whose program is the small one."""
    home = tmp_path / "env"
    place = home / "lib" / "python3.12" / "site-packages" / "resources_servers" / "sums"
    place.mkdir(parents=True)
    for kind in ("responses_api_agents", "responses_api_models"):
        (place.parents[1] / kind).mkdir()
    for name in ("sums", "broken"):
        (place / f"{name}.yaml").write_text(yaml.safe_dump({"sums": {"resources_servers": {"sums": {}}}}))
    (home / "bin").mkdir()
    program = home / "bin" / "ng_run"
    program.write_text(f"#!{sys.executable}\n{textwrap.dedent(PROGRAM)}")
    program.chmod(0o755)
    return GymSection(
        enabled=True,
        folder=str(home),
        config_paths=["resources_servers/sums/sums.yaml"],
        datasets=[GymDataset(path="x", server_name="sums")],
        head_port=free_port(),
        server_timeout=60.0,
        verify_timeout=3.0,
    )


def started(section, tmp_path) -> NemoGym:
    process = GymProcess(section, tmp_path, tmp_path / "out", policy=None)
    return NemoGym(section, process=process, uds=process.uds)


async def rewarded(environment: NemoGym, text: str):
    episode = environment.episode()
    await episode.open(ROW)
    await episode.reply(Turn(text, text, (), finished=True))
    return (await episode.outcome()).rewards["nemo_gym"]


@pytest.mark.slow
@pytest.mark.parametrize("poison", ["die", "hang"])
def test_servers_that_die_or_hang_are_started_anew(section, tmp_path, monkeypatch, caplog, poison):
    monkeypatch.setattr(gym_module, "MIN_CHECK_TIMEOUT", 2.0)
    monkeypatch.setattr(gym_module, "RETRY_SECONDS", (0.1, 0.2, 0.5))
    environment = started(section, tmp_path)

    async def run():
        await environment.start()
        try:
            assert await rewarded(environment, "2") == 1.0
            with pytest.raises(GymFault):
                await rewarded(environment, poison)
            await asyncio.sleep(0.5)
            assert await rewarded(environment, "2") == 1.0
        finally:
            await environment.stop()

    asyncio.run(run())
    restarts = sum("restarting the servers of NeMo Gym" in message for message in caplog.messages)
    assert restarts == 1 if poison == "hang" else restarts >= 1
    wait_until(lambda: not running(section))


def running(section) -> bool:
    """Whether a process of the small program is left."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if section.folder.encode() in file.read():
                    return True
        except OSError:
            continue
    return False


def test_servers_that_do_not_start_are_told_of(section, tmp_path):
    broken = section.model_copy(update={"config_paths": ["resources_servers/sums/broken.yaml"]})
    environment = started(broken, tmp_path)

    async def run():
        try:
            await environment.start()
        finally:
            await environment.stop()

    with pytest.raises(UserError, match=r"ended: it is broken. See .*nemo_gym.log"):
        asyncio.run(run())


def test_agents_that_have_to_reach_a_policy_cannot_be_isolated(section, tmp_path):
    isolated = section.model_copy(update={"isolate": True})
    with pytest.raises(UserError, match="nemo_gym_isolate"):
        GymProcess(isolated, tmp_path, tmp_path, policy=("http://127.0.0.1:1/v1", "m"))
