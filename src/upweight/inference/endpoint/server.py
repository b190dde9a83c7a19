"""Answers OpenAI's completions API over HTTP on 127.0.0.1, one request at a time, and serves the chat page."""

import dataclasses
import json
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from upweight.data.raw_row import RowError
from upweight.errors import UserError, did_you_mean
from upweight.inference.endpoint.requests import BadRequest, CompletionRequest, read_request
from upweight.inference.generate import TextGenerator
from upweight.log import logger
from upweight.runs.report.live import HEADERS as PAGE_HEADERS
from upweight.types import Completion

HERE, PORT = "127.0.0.1", 8000  # the port is the default, if it is free
LARGEST_BODY = 8 << 20  # bytes
PAGE = {
    "/": ("chat.html", "text/html"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/chat.css": ("chat.css", "text/css"),
}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
HEADERS = PAGE_HEADERS | {"Content-Security-Policy": POLICY}


class EndpointServer(ThreadingHTTPServer):
    """Serves models by name, the trained one first; `serve_forever` starts it."""

    daemon_threads = True

    def __init__(self, models: Mapping[str, TextGenerator], defaults: Mapping[str, Any], port: int) -> None:
        super().__init__((HERE, port), Handler)
        self.models, self.defaults = dict(models), dict(defaults)
        self.sampling = threading.Lock()  # one request at a time has the model

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that closes the connection during an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def generator(self, name: str | None) -> tuple[str, TextGenerator]:
        """Return the model of a name, and the trained one if the request names none."""
        name = name or next(iter(self.models))
        if name not in self.models:
            raise BadRequest(
                "model",
                f"there is no {name!r:.80}.{did_you_mean(name, self.models)} There is " + " and ".join(self.models),
            )
        return name, self.models[name]


def open_endpoint(models: Mapping[str, TextGenerator], defaults: Mapping[str, Any], port: int | None) -> EndpointServer:
    """Create a server at this port, or at a free one if `port` is None and 8000 is taken."""
    try:
        return EndpointServer(models, defaults, PORT if port is None else port)
    except OSError as error:
        if port is not None:
            raise UserError(f"--port {port}: {error.strerror}. Name another, or leave it out.") from error
        return EndpointServer(models, defaults, 0)


class Handler(BaseHTTPRequestHandler):
    """One request; only local host names are answered, as a protection against DNS rebinding."""

    server_version, sys_version = "upweight", ""
    server: EndpointServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if self._is_foreign():
            return
        if path in PAGE:
            name, kind = PAGE[path]
            text = files("upweight.inference.endpoint").joinpath("page", name).read_text(encoding="utf-8")
            self._send(HTTPStatus.OK, text.encode(), kind)
        elif path == "/health":
            self._send_json({"status": "ok"})
        elif path == "/v1/models":
            rows = [{"id": name, "object": "model", "owned_by": "upweight"} for name in self.server.models]
            self._send_json({"object": "list", "data": rows})
        else:
            self._send_error(HTTPStatus.NOT_FOUND, f"there is nothing at {path:.100}", None)

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        if self._is_foreign():
            return
        if path not in ("/v1/chat/completions", "/v1/completions"):
            self._send_error(HTTPStatus.NOT_FOUND, f"there is nothing at {path:.100}", None)
            return
        try:
            request = read_request(self._body(), self.server.defaults, chat="chat" in path)
            self._answer(request, chat="chat" in path)
        except BadRequest as error:
            self._send_error(HTTPStatus.BAD_REQUEST, str(error), error.field)
        except (RowError, UserError) as error:
            self._send_error(HTTPStatus.BAD_REQUEST, str(error), "messages" if "chat" in path else "prompt")

    def _answer(self, request: CompletionRequest, *, chat: bool) -> None:
        """Sample completions and send them, whole or as a stream."""
        name, generator = self.server.generator(request.model)
        if chat and not generator.templated:
            raise BadRequest("messages", "the tokenizer has no chat template; ask /v1/completions, or train with one")
        ids = generator.encode({"prompt": request.prompt}, raw=not chat)
        seed = secrets.randbits(31) if request.sampling.seed is None else request.sampling.seed
        request = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=seed))
        answer = _Answer(name, chat)
        stream = _Stream(self, answer, request.sampling.stop_strings) if request.stream else None
        with self.server.sampling:
            ((*group,),) = generator(
                [ids], request.sampling, request.count, stream and stream.add, new_tokens=request.max_tokens
            )
        usage = _usage(len(ids), group)
        if stream is None:
            choices = [answer.choice(n, _cut(one, request), _reason(one)) for n, one in enumerate(group)]
            self._send_json({**answer.head(""), "choices": choices, "usage": usage})
        else:
            stream.end(_reason(group[0]), usage if request.with_usage else None)

    def _body(self) -> Any:
        """Return the JSON of a request; other content types could be sent by any page in a browser."""
        if not self.headers.get("Content-Type", "").startswith("application/json"):
            raise BadRequest("Content-Type", "expected application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST_BODY:
            raise BadRequest("Content-Length", f"expected a body of at most {LARGEST_BODY} bytes")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise BadRequest("body", f"not JSON: {error}") from error

    def _is_foreign(self) -> bool:
        """Answer a request that was made under another host name, or by a page from elsewhere."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        local = (host.rpartition(":")[0] or host) in (HERE, "localhost")
        if local and (origin is None or urlsplit(origin).hostname in (HERE, "localhost")):
            return False
        self._send_error(HTTPStatus.MISDIRECTED_REQUEST, f"this server answers to {HERE} only", None)
        return True

    def _send_json(self, content: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, json.dumps(content, ensure_ascii=False).encode(), "application/json")

    def _send_error(self, status: HTTPStatus, message: str, field: str | None) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": field, "code": int(status)}
        self._send_json({"error": error}, status)

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.begin(status, kind, len(body))
        self.wfile.write(body)

    def begin(self, status: HTTPStatus, kind: str, length: int | None = None) -> None:
        """Send the status and the headers; a stream has no length."""
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests only where debugging is asked for."""
        logger.debug(format, *args)


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The parts that all objects of one answer share."""

    model: str
    chat: bool
    number: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def head(self, ending: str) -> dict[str, Any]:
        kind = f"chat.completion{ending}" if self.chat else "text_completion"
        return {"id": f"cmpl-{self.number}", "object": kind, "created": self.created, "model": self.model}

    def choice(self, number: int, text: str, reason: str | None, *, field: str = "message") -> dict[str, Any]:
        content: dict[str, Any] = {field: {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {"index": number, **content, "logprobs": None, "finish_reason": reason}


class _Stream:
    """Sends pieces of a text as server-sent events, and keeps back what may begin a stop string."""

    def __init__(self, handler: Handler, answer: _Answer, stops: tuple[str, ...]) -> None:
        self._handler, self._answer, self._stops = handler, answer, stops
        self._text, self._sent, self._begun = "", 0, False

    def add(self, piece: str) -> None:
        self._text += piece
        kept = max((n for stop in self._stops for n in range(1, len(stop)) if self._text.endswith(stop[:n])), default=0)
        self._send_to(len(self._text) - kept)

    def end(self, reason: str, usage: Mapping[str, int] | None) -> None:
        self._send_to(len(self._text))
        last = self._answer.choice(0, "", reason, field="delta")
        self._event({**self._answer.head(".chunk"), "choices": [last | ({"delta": {}} if self._answer.chat else {})]})
        if usage is not None:
            self._event({**self._answer.head(".chunk"), "choices": [], "usage": usage})
        self._handler.wfile.write(b"data: [DONE]\n\n")

    def _send_to(self, end: int) -> None:
        places = [place for stop in self._stops if (place := self._text.find(stop)) >= 0]
        text = self._text[self._sent : min([end, *places])]
        if text:
            self._sent += len(text)
            self._event({**self._answer.head(".chunk"), "choices": [self._answer.choice(0, text, None, field="delta")]})

    def _event(self, content: Mapping[str, Any]) -> None:
        if not self._begun:
            self._handler.begin(HTTPStatus.OK, "text/event-stream")
            self._begun = True
        self._handler.wfile.write(f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode())
        self._handler.wfile.flush()


def _reason(completion: Completion) -> str:
    return "stop" if completion.finished else "length"


def _cut(completion: Completion, request: CompletionRequest) -> str:
    """Return the text before the first stop string."""
    text = str(completion.text)
    return text[
        : min((place for stop in request.sampling.stop_strings if (place := text.find(stop)) >= 0), default=len(text))
    ]


def _usage(prompt: int, group: list[Completion]) -> dict[str, int]:
    new = sum(len(completion.ids) for completion in group)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
