"""A small HTTP server that stands for a Gym: its head, its servers, and what they were recorded to answer."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from made_vllm import FakeVllm, json_server

EXCHANGES = Path(__file__).parent / "environments" / "nemo_gym" / "exchanges"
SECRET = "do-not-log-me"
Answer = tuple[int, Any, dict[str, str]]


def exchange(name: str) -> dict:
    """A recorded request with its answer."""
    return json.loads((EXCHANGES / f"{name}.json").read_text())


def recorded(name: str) -> Answer:
    """A recorded answer."""
    response = exchange(name)["response"]
    kept = {key: value for key, value in response["headers"].items() if key == "set-cookie"}
    return response["status"], response["json"], kept


class FakeGym:
    """Servers by instance; `answers` holds what (instance, path) says: an answer, or a function of body and cookies.

    `faults` come first, in turn: a status, "hang" (no answer) or "drop" (the connection is closed).
    """

    def __init__(self, **implementations: str) -> None:
        self.implementations = implementations  # of resource servers, by instance
        self.agents: dict[str, str] = {}  # agent -> instance of its resource server
        self.policy = {"policy_base_url": "http://127.0.0.1:9/v1", "policy_model_name": "policy"}
        self.answers: dict[tuple[str, str], Answer | Callable[[Any, str], Answer]] = {}
        self.faults: dict[tuple[str, str], list[int | str]] = {}
        self.seen: list[tuple[str, str, Any, str]] = []  # instance, path, body, cookies
        self.life = 1
        self.open = threading.Event()
        self._server = json_server(self.answer)
        self.port = self._server.server_address[1]

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()

    def asked(self, instance: str, path: str) -> list[Any]:
        return [body for where, route, body, _ in self.seen if (where, route) == (instance, path)]

    def answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        instance, _, rest = handler.path.strip("/").partition("/")
        path, cookies = f"/{rest}", handler.headers.get("cookie", "")
        if body is not None:
            self.seen.append((instance, path, body, cookies))
        waiting = self.faults.get((instance, path))
        fault = waiting.pop(0) if waiting else None
        if fault == "hang":
            self.open.wait(60)
        if fault in ("drop", "hang"):
            handler.close_connection = True
            return
        status, content, headers = (fault, "as was asked", {}) if fault else self._found(instance, path, body, cookies)
        text = json.dumps(content).encode()
        handler.send_response(status)
        for key, value in {"content-type": "application/json", "content-length": str(len(text)), **headers}.items():
            handler.send_header(key, value)
        handler.end_headers()
        handler.wfile.write(text)

    def _found(self, instance: str, path: str, body: Any, cookies: str) -> Answer:
        if instance == "server_instances":
            kinds = {name: ("resources_servers", kind) for name, kind in self.implementations.items()}
            kinds |= dict.fromkeys(self.agents, ("responses_api_agents", "simple_agent"))
            return 200, [self._listed(name, *kind) for name, kind in kinds.items()], {}
        if instance == "global_config_dict_yaml":
            return 200, json.dumps(self._config()), {}
        if body is None:
            return 200, {"status": "ok"}, {}
        found = self.answers.get((instance, path), (404, {"detail": "Not Found"}, {}))
        return found(body, cookies) if callable(found) else found

    def _listed(self, instance: str, kind: str, implementation: str) -> dict:
        return {
            "config_path": instance, "name": implementation, "server_type": kind, "pid": self.life, "start_time": 1.0,
            "url": f"http://127.0.0.1:{self.port}/{instance}", "status": None,
        }  # fmt: skip

    def _config(self) -> dict:
        proxy = {"base_url": "${policy_base_url}", "api_key": "${policy_api_key}", "model": "${policy_model_name}"}
        agents = {
            agent: {
                "responses_api_agents": {
                    "simple_agent": {"resources_server": {"name": server}, "model_server": {"name": "policy_model"}}
                }
            }
            for agent, server in self.agents.items()
        }
        models = {"policy_model": {"responses_api_models": {"vllm_model": proxy}}}
        return {**agents, **models, **self.policy, "policy_api_key": SECRET}


def verdict(reward: float, **more: Any) -> Answer:
    return 200, {"reward": reward, "response": {}, "responses_create_params": {}, **more}, {}


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    stop = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < stop, "it did not come about"
        time.sleep(0.02)


class ChatVllm(FakeVllm):
    """A vLLM server that also chats, with the tokenizer and template of its folder."""

    def respond(self, path: str, body):
        if path != "/v1/chat/completions":
            return super().respond(path, body)
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        messages = [{**message, "content": message.get("content") or ""} for message in body["messages"]]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        status, found = self.complete({**body, "prompt": prompt, "n": 1, "logprobs": 0,
                                       "stop_token_ids": [tokenizer.eos_token_id]})  # fmt: skip
        if status != 200:
            return status, found
        (choice,) = found["choices"]
        text = tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        said = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
        content = [{"token": f"token_id:{token}", "logprob": logp} for token, logp in said]
        return 200, {
            "prompt_token_ids": prompt,
            "choices": [{"message": {"role": "assistant", "content": text}, "token_ids": choice["token_ids"],
                         "logprobs": {"content": content}, "finish_reason": choice["finish_reason"]}],
        }  # fmt: skip


def agent_of(
    fake: FakeGym,
    instance: str,
    *,
    turns: int = 2,
    rewrites: bool = False,
    between: Callable[[], None] = lambda: None,
) -> None:
    """An agent that asks the policy as often as told, answers in between, and has its server verify the last text.

    `rewrites`: what the policy wrote is put otherwise in the next prompt. `between`: done after each turn.
    """

    def run(body, _):
        url = fake.policy["policy_base_url"] + "/chat/completions"
        messages, output = list(body["responses_create_params"]["input"]), []
        for turn in range(turns):
            asked = {"model": fake.policy["policy_model_name"], "messages": messages}
            found = httpx.post(url, json=asked, timeout=60, trust_env=False).json()
            choice = found["choices"][0]
            output.append(
                {
                    "type": "message", "id": f"m{turn}", "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": choice["message"]["content"], "annotations": []}],
                    "prompt_token_ids": found["prompt_token_ids"], "generation_token_ids": choice["token_ids"],
                    "generation_log_probs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
                }
            )  # fmt: skip
            between()
            text = "..." if rewrites else choice["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
        reward = sum(len(item["generation_token_ids"]) for item in output) / 100
        return 200, {"reward": reward, "response": {"output": output}, "responses_create_params": {}}, {}

    fake.answers[instance, "/run"] = run
