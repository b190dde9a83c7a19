"""The endpoint as clients meet it: models, chat, streams, errors, and who is answered."""

import json
import threading

import httpx
import pytest

from made_adapters import write_run
from upweight.cli.export.serve import _load
from upweight.cli.inputs import find_trained
from upweight.errors import UserError
from upweight.inference.endpoint.server import open_endpoint
from upweight.types import Sampling

GREEDY = {"temperature": 0, "max_tokens": 12}
ASKED = {"messages": [{"role": "user", "content": "hello"}], **GREEDY}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return _load(find_trained(str(write_run(tmp_path_factory.mktemp("serve") / "my run")), []), True)


@pytest.fixture(scope="module")
def client(models):
    with open_endpoint(models, {"temperature": 0.7, "max_tokens": 5}, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        with httpx.Client(base_url=address, trust_env=False, timeout=60) as opened:
            yield opened
        server.shutdown()


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def events_of(answer: httpx.Response) -> list[dict]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last = answer.text.strip().split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_the_trained_model_and_its_base_are_served(client, models):
    assert [row["id"] for row in client.get("/v1/models").json()["data"]] == ["my-run", "base"]
    assert client.get("/health").json() == {"status": "ok"}
    for name, generator in models.items():
        ids = generator.encode({"prompt": "hello"})
        ((right,),) = generator([ids], Sampling(1, temperature=0.0), new_tokens=12)
        answer = client.post("/v1/chat/completions", json=ASKED | {"model": name})
        assert text_of(answer) == right.text
        assert answer.json()["usage"]["prompt_tokens"] == len(ids)
        assert answer.json()["usage"]["completion_tokens"] == len(right.ids)
    both = [text_of(client.post("/v1/chat/completions", json=ASKED | {"model": name})) for name in models]
    assert both[0] != both[1]
    assert text_of(client.post("/v1/chat/completions", json=ASKED)) == both[0], "the trained one, if none is named"


def test_a_stream_has_the_same_text(client):
    whole = client.post("/v1/chat/completions", json=ASKED)
    streamed = client.post(
        "/v1/chat/completions", json=ASKED | {"stream": True, "stream_options": {"include_usage": True}}
    )
    *pieces, last, usage = events_of(streamed)
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == text_of(whole)
    assert last["choices"][0]["finish_reason"] == whole.json()["choices"][0]["finish_reason"]
    assert usage["usage"] == whole.json()["usage"]
    assert {event["object"] for event in events_of(streamed)} == {"chat.completion.chunk"}


def test_texts_are_continued_without_the_template(client, models):
    generator = models["my-run"]
    body = {"prompt": "the quick", **GREEDY}
    answer = client.post("/v1/completions", json=body).json()
    ids = generator.encode({"prompt": "the quick"}, raw=True)
    assert answer["usage"]["prompt_tokens"] == len(ids) < len(generator.encode({"prompt": "the quick"}))
    assert answer["object"] == "text_completion"
    *pieces, _ = events_of(client.post("/v1/completions", json=body | {"stream": True}))
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == answer["choices"][0]["text"]


def test_stop_strings_end_the_text_and_are_not_in_it(client):
    text = text_of(client.post("/v1/chat/completions", json=ASKED))
    stop = next(letter for letter in text[1:] if letter.isascii() and letter.isprintable())
    body = ASKED | {"stop": [stop]}
    answer = client.post("/v1/chat/completions", json=body)
    assert text_of(answer) == text[: text.index(stop)]
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    *pieces, _ = events_of(client.post("/v1/chat/completions", json=body | {"stream": True}))
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == text_of(answer)


def test_seeds_repeat_and_several_answers_differ(client):
    body = ASKED | {"temperature": 1.0, "seed": 4, "n": 3}
    first, again = (client.post("/v1/chat/completions", json=body).json()["choices"] for _ in range(2))
    assert first == again
    assert len({choice["message"]["content"] for choice in first}) > 1
    assert (
        client.post("/v1/chat/completions", json={"messages": ASKED["messages"]}).json()["usage"]["completion_tokens"]
        <= 5
    )


def test_errors_name_the_field(client):
    wrong = client.post("/v1/chat/completions", json=ASKED | {"model": "my-rum"})
    assert wrong.status_code == 400
    assert "Did you mean 'my-run'" in wrong.json()["error"]["message"]
    assert client.post("/v1/chat/completions", json=ASKED | {"top_pp": 1}).json()["error"]["param"] == "top_pp"
    assert (
        client.post("/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"}).status_code
        == 400
    )
    assert client.post("/v1/chat/completions", content=json.dumps(ASKED)).status_code == 400, "no JSON by its type"
    long = [{"role": "user", "content": "x" * 5000}]
    assert (
        "positions" in client.post("/v1/chat/completions", json=ASKED | {"messages": long}).json()["error"]["message"]
    )
    assert client.post("/v1/embeddings", json={}).status_code == client.get("/v1/nothing").status_code == 404


def test_pages_of_others_are_not_answered(client):
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        assert client.post("/v1/chat/completions", json=ASKED, headers=headers).status_code == 421
        assert client.get("/", headers=headers).status_code == 421


def test_the_page_loads_nothing_from_elsewhere(client):
    page = client.get("/")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    for part in ("chat.js", "chat.css"):
        assert f'"{part}"' in page.text
        assert client.get(f"/{part}").status_code == 200
    assert "innerHTML" not in client.get("/chat.js").text


def test_a_taken_port_is_named(client, models):
    with pytest.raises(UserError, match=r"--port \d+: .*Name another"):
        open_endpoint(models, {}, client.base_url.port)
