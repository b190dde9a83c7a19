"""Images that real OpenEnv servers return: in observations, and from MCP tools; and a run that trains on them."""

import json

import pytest

pytest.importorskip("PIL")

from tiny_vision import processor, vision_model
from upweight.environments.episode import ToolCall
from with_openenv.real_server import running
from with_openenv.test_real_server import asked, played, said, trained, write_run

pytestmark = [pytest.mark.openenv, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def screen(tmp_path_factory):
    with running("screen", tmp_path_factory.mktemp("screen")) as server:
        yield server


def test_a_screenshot_of_numbers_is_shown(screen):
    opening, replies, _ = played(screen.url, {"prompt": "Play."}, said("hi"), image="screenshot")
    first, second = opening.messages[0]["content"][-1], replies[0].messages[0]["content"][-1]
    assert first["image"].size == (32, 32)
    assert [one["image"].getpixel((3, 3)) for one in (first, second)] == [(200, 40, 40), (140, 40, 40)]
    assert replies[0].messages[0]["content"][0] == {"type": "text", "text": "more"}


def test_an_mcp_tool_returns_an_image(tmp_path):
    with running("sums", tmp_path) as sums:
        _, replies, _ = played(sums.url, {"prompt": ""}, said("", ToolCall("look", {})))
    text, picture = replies[0].messages[0]["content"]
    assert text == {"type": "text", "text": "the blackboard:"}
    assert picture["type"] == "image"
    assert picture["base64"].startswith("iVBOR")


def test_a_vision_model_trains_on_what_an_environment_shows(screen, tmp_path):
    vision_model("llava").save_pretrained(tmp_path / "model")
    processor("llava").save_pretrained(tmp_path / "model")
    trl = {"num_generations": 4, "max_completion_length": 120}
    config = write_run(
        tmp_path, tmp_path / "model", screen.url, [asked() for _ in range(4)], environment={"image": "screenshot"},
        trl=trl, chat_template=None, freeze_vision=False,
    )  # fmt: skip
    lines = trained(config)
    assert len(lines) == 3
    assert all(line["environment/masked"] == 0 for line in lines)
    (file, *_) = sorted((tmp_path / "out" / "completions").glob("*.jsonl"))
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(one["observed_images"] for one in written)
