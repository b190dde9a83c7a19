"""A small server that speaks OpenEnv's wire, with answers as the real one gives them."""

import asyncio
import http
import json
import threading

from websockets.asyncio.server import serve

GUESS = {
    "action": {
        "properties": {"metadata": {"type": "object"}, "guess": {"title": "Guess", "type": "integer"}},
        "required": ["guess"],
    },
    "observation": {"properties": {"hint": {}, "remaining": {}, "metadata": {}, "done": {}, "reward": {}}},
}
MOVE = {
    "action": {
        "description": "Move a piece.",
        "properties": {"metadata": {"type": "object"}, "row": {"type": "integer"}, "way": {"$ref": "#/$defs/Way"}},
        "required": ["row"],
        "$defs": {"Way": {"enum": ["up", "down"]}},
    }
}
MCP = {"action": {"properties": {"type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}, "metadata": {}}}}
BAD_GUESS = {
    "type": "error",
    "data": {
        "message": "Invalid message",
        "code": "VALIDATION_ERROR",
        "errors": [{"type": "int_parsing", "loc": ["guess"], "msg": "Input should be a valid integer", "input": "x"}],
    },
}
HANG_UP = object()


def observed(observation, reward=None, done=False):
    """A message with an observation."""
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def failed(code, message="env bug"):
    """A message with an error."""
    return {"type": "error", "data": {"message": message, "code": code}}


class FakeOpenEnv:
    """Answers each message with the next of `answers`, a list for each connection (the last one for all others)."""

    def __init__(self, schema, *answers, sessions: int = 100) -> None:
        self.schema, self.answers, self.sessions = schema, list(answers), sessions
        self.connections = self.open = self.most = 0
        self.received: list[list[dict]] = []
        self.delay = 0.0
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    async def _serve(self, ready) -> None:
        self._end = asyncio.Event()
        async with serve(self._session, "127.0.0.1", 0, process_request=self._http) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()
            await self._end.wait()

    def _http(self, connection, request):
        if request.path == "/ws":
            return None
        found = {"/health": {"status": "healthy"}, "/schema": self.schema}.get(request.path)
        status = http.HTTPStatus.NOT_FOUND if found is None else http.HTTPStatus.OK
        return connection.respond(status, json.dumps(found))

    async def _session(self, socket) -> None:
        if self.open >= self.sessions:
            full = failed("CAPACITY_REACHED", "Server at capacity")
            full["data"] |= {"active_sessions": self.open, "max_sessions": self.sessions}
            await socket.send(json.dumps(full))
            return
        number, self.connections, self.open = self.connections, self.connections + 1, self.open + 1
        self.most = max(self.most, self.open)
        self.received.append([])
        answers = list(self.answers[min(number, len(self.answers) - 1)])
        try:
            async for text in socket:
                message = json.loads(text)
                self.received[number].append(message)
                if message["type"] == "close" or answers[0] is HANG_UP:
                    return
                await asyncio.sleep(self.delay)
                await socket.send(json.dumps(answers.pop(0)))
        finally:
            self.open -= 1

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
