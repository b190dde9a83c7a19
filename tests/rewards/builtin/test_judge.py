"""The judge, against a server on this machine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from upweight.rewards.builtin import builtin_reward
from upweight.rewards.builtin.judge import JudgeReward, score_in


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Good.\nScore: 7", 7),
        ("Score: 3. On reflection, **Score:** 8.5", 8.5),
        ("<think>Score: 1</think>Score: 9", 9),
        ("[[6]]", 6),
        ("<score> 4 </score>", 4),
        ('{"score": 5, "why": "x"}', 5),
        ("I give it 8/10", 8),
        ("8 out of 10", 8),
        (" **7** ", 7),
        ("Score: 11", None),
        ("Score: -1", None),
        ("It has 3 faults.", None),
        ("Score: NaN", None),
        ("", None),
        ("9" * 5000, None),
        ("I give it 4/5", None),
        ("score" + " " * 100_000 + "?", None),
        ("Score: " * 100_000, None),
    ],
)
def test_score_in(reply, score):
    assert score_in(reply, 0, 10) == score


class Judge(BaseHTTPRequestHandler):
    """Answers with what the test laid out, by a word in the question."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen: list = vars(self.server)["seen"]
        seen.append((self.path, self.headers.get("Authorization"), body))
        question = body["messages"][0]["content"]
        word, answers = next(
            (item for item in vars(self.server)["answers"].items() if item[0] in question), ("", [(200, "")])
        )
        asked = sum(word in one[2]["messages"][0]["content"] for one in seen)
        status, content = answers[min(asked, len(answers)) - 1]
        bare = status != 200 or content.startswith("[")
        reply = content if bare else json.dumps({"choices": [{"message": {"content": content}}]})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    vars(server).update(seen=[], answers={})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def url(server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


def test_scores_are_scaled_and_ordered(server):
    vars(server)["answers"] = {
        "good one": [(200, "Score: 10")],
        "fair one": [(200, "Score: 5")],
        "odd one": [(200, "?")],
    }
    reward = builtin_reward(f"judge(url={url(server)!r}, model='m', concurrency=3)")
    assert reward is not None
    texts = [[{"role": "assistant", "content": text}] for text in ("fair one", "good one", "odd one")]
    prompts = [[{"role": "user", "content": "Say {this}."}]] * 3
    assert reward(texts, prompts=prompts) == [0.5, 1.0, None]
    path, _, body = vars(server)["seen"][0]
    assert path == "/v1/chat/completions"
    assert body["model"] == "m"
    assert "user: Say {this}." in body["messages"][0]["content"]


def test_busy_and_broken_servers_are_asked_again(server):
    vars(server)["answers"] = {
        "busy": [(429, "wait"), (503, "wait"), (200, "Score: 8")],
        "broken": [(500, "no")],
        "denied": [(401, "no key")],
    }
    reward = JudgeReward(url=url(server), model="m", backoff=0.0, retries=2)
    assert reward(["busy", "broken", "denied"]) == [0.8, None, None]
    asked = [one[2]["messages"][0]["content"] for one in vars(server)["seen"]]
    counts = [sum(f"\n{word}\n" in question for question in asked) for word in ("busy", "broken", "denied")]
    assert counts == [3, 3, 1]


def test_the_key_comes_from_the_environment_and_columns_fill_the_template(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k-123")
    vars(server)["answers"] = {"gold": [(200, "Score: 1")]}
    reward = JudgeReward(
        url=url(server) + "/",
        model="m",
        api_key_env="JUDGE_KEY",
        lowest=1,
        highest=5,
        template="{answer}|{completion}|{x}",
    )
    assert reward(["{answer} {0}"], answer=["gold"]) == [0.0]
    _, key, body = vars(server)["seen"][0]
    assert key == "Bearer k-123"
    assert body["messages"][0]["content"] == "gold|{answer} {0}|{x}"
    assert "k-123" not in repr(reward)


def test_what_is_no_chat_completion_counts_as_failure(server):
    vars(server)["answers"] = {"a": [(201, "x")], "b": [(200, "[" * 5000)], "c": [(200, "[9" * 5000)]}
    assert JudgeReward(url=url(server), model="m", backoff=0.0, retries=0)(["a", "b", "c"]) == [None] * 3


def test_a_server_that_is_not_there_gives_none():
    reward = JudgeReward(url="http://127.0.0.1:1/v1", model="m", backoff=0.0, retries=1)
    assert reward(["a", "b"]) == [None, None]
