"""What OpenEnv servers show as images: content blocks of MCP tools, and fields of observations."""

import asyncio
import base64
import io

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image

from made_openenv import GUESS, MCP, FakeOpenEnv, observed
from tiny_vision import drawn_image
from upweight.environments.episode import ToolCall, Turn
from upweight.environments.openenv import OpenEnv
from upweight.errors import UserError

PIXELS = np.asarray(drawn_image(3, 6, 4)).tolist()


def encoded(image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


PNG = encoded(drawn_image(3, 6, 4))


def played(schema, answers, *turns, row=None, **options):
    """Opening and replies of one episode, and what the server received."""
    server = FakeOpenEnv(schema, answers)

    async def play():
        environment = OpenEnv(server.url, timeout=5.0, wait=5.0, **options)
        await environment.start()
        episode = environment.episode()
        try:
            opening = await episode.open(row or {"prompt": "Play."})
            return opening, [await episode.reply(turn) for turn in turns], server.received[0]
        finally:
            await episode.close()

    try:
        return asyncio.run(play())
    finally:
        server.close()


@pytest.mark.parametrize(
    ("shown", "key"),
    [(PIXELS, "image"), (PNG, "base64"), (f"data:image/png;base64,{PNG}", "url")],
    ids=["numbers", "base64", "data URI"],
)
def test_a_field_of_an_observation_is_an_image(shown, key):
    first, second = (observed({"hint": hint, "remaining": shown}) for hint in ("look", "again"))
    opening, replies, _ = played(GUESS, [first, second], Turn("1", "1", (), True), image="remaining")
    text, picture = opening.messages[0]["content"][-2:]
    assert text == {"type": "text", "text": "look"}
    assert picture["type"] == "image"
    (source,) = [value for name, value in picture.items() if name != "type"]
    assert list(picture) == ["type", key]
    assert source.tobytes() == drawn_image(3, 6, 4).tobytes() if key == "image" else source == shown
    assert replies[0].messages[0]["content"][0] == {"type": "text", "text": "again"}


def test_grey_images_and_observations_without_one_are_shown():
    grey = np.asarray(drawn_image(3, 6, 4))[:, :, 0].tolist()
    answers = [observed({"hint": "", "remaining": grey}), observed({"hint": "dark", "remaining": None})]
    opening, replies, _ = played(
        GUESS, answers, Turn("1", "1", (), True), image="remaining", observation="hint", row={"prompt": ""}
    )
    (picture,) = opening.messages[0]["content"][-1:]
    assert (picture["image"].mode, picture["image"].size) == ("L", (6, 4))
    assert replies[0].messages[0]["content"] == "dark"


@pytest.mark.parametrize("shown", [7, [1, 2], [[1.5]], [[300]], [[[1, 2]]], [[1, 2], [1]], []])
def test_a_field_that_is_no_image_stops_the_run(shown):
    with pytest.raises(UserError, match=r"environment\.image: the field 'remaining' is no image"):
        played(GUESS, [observed({"hint": "", "remaining": shown})], image="remaining")


def test_a_field_that_no_observation_has_is_named():
    with pytest.raises(UserError, match=r"environment\.image: 'screen' is no field of .*hint, remaining"):
        played(GUESS, [observed({})], image="screen")


def test_tools_of_an_mcp_server_return_images():
    tools = observed({"tools": [{"name": "look", "description": "Look", "input_schema": {"type": "object"}}]})
    picture = {"type": "image", "data": PNG, "mimeType": "image/png", "annotations": None}
    blocks = [{"type": "text", "text": "the screen:"}, picture, {"type": "resource", "resource": {}}]
    result = observed({"tool_name": "look", "result": {"content": blocks, "data": None}, "error": None})
    call = Turn("", "", (ToolCall("look", {}),), True)
    _, replies, _ = played(MCP, [observed({"metadata": {"task": "look"}}), tools, result], call)
    content = [{"type": "text", "text": "the screen:"}, {"type": "image", "base64": PNG}]
    assert replies[0].messages == [{"role": "tool", "name": "look", "content": content}]
    assert Image.open(io.BytesIO(base64.b64decode(PNG))).size == (6, 4)


def test_images_of_rows_are_shown_and_not_sent():
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Play."}]}]
    row = {"prompt": prompt, "images": [drawn_image(1)], "seed": 3}
    opening, _, received = played(GUESS, [observed({"hint": "go"})], row=row)
    assert received[0] == {"type": "reset", "data": {"seed": 3}}
    assert opening.messages[0]["content"] == [*prompt[0]["content"], {"type": "text", "text": "\n\ngo"}]
    with pytest.raises(UserError, match=r"environment\.columns: images of rows are not sent"):
        played(GUESS, [observed({})], row=row, columns=["images"])
    _, _, received = played(GUESS, [observed({})], row={"prompt": "", "images": ["a.png"]})
    assert received[0]["data"] == {"images": ["a.png"]}  # of a text model: any other column
