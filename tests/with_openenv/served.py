"""Environments on the real OpenEnv package, for `uvicorn served:<name>`: it has an interpreter of its own."""

import base64
import time

from fastmcp import FastMCP
from fastmcp.utilities.types import Image
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = 4
# A picture of one pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str = ""
    remaining: int = 0


class GuessEnv(Environment):
    """A number is to be found; a second step asks for more when the first was wrong."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, target=7, tries=3, delay=0.0, **kwargs):
        self.target, self.remaining, self.delay = target, tries, delay
        self._state = State(episode_id=episode_id)
        return Hint(hint="guess a number in [0,9]", remaining=tries)

    def step(self, action, timeout_s=None, **kwargs):
        time.sleep(self.delay)
        if action.guess == 13:
            raise ValueError("env bug")
        self._state.step_count += 1
        self.remaining -= 1
        right = action.guess == self.target
        hint = "correct" if right else "higher" if action.guess < self.target else "lower"
        return Hint(hint=hint, remaining=self.remaining, reward=float(right), done=right or not self.remaining)

    @property
    def state(self):
        return self._state


class Said(Action):
    message: str


class Echoed(Observation):
    text: str = ""


class EchoEnv(Environment):
    """Two turns; each earns the share of characters whose code is even."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, delay=0.0, **kwargs):
        self.delay = delay
        self._state = State(episode_id=episode_id)
        return Echoed(text="speak")

    def step(self, action, timeout_s=None, **kwargs):
        print("a step", flush=True)
        time.sleep(self.delay)
        self._state.step_count += 1
        even = sum(ord(character) % 2 == 0 for character in action.message)
        return Echoed(text="more", reward=even / max(len(action.message), 1), done=self._state.step_count == 2)

    @property
    def state(self):
        return self._state


class Screen(Observation):
    text: str = ""
    screenshot: list[list[list[int]]] | None = None  # [height][width][channels], as OpenEnv's browsers have it


class ScreenEnv(EchoEnv):
    """The echo with a screen, whose colour changes with each step."""

    def _shown(self, echoed):
        pixels = [[[200 - 60 * self._state.step_count, 40, 40]] * 32] * 32
        return Screen(text=echoed.text, screenshot=pixels, reward=echoed.reward, done=echoed.done)

    def reset(self, seed=None, episode_id=None, delay=0.0, **kwargs):
        return self._shown(super().reset(seed, episode_id, delay, **kwargs))

    def step(self, action, timeout_s=None, **kwargs):
        return self._shown(super().step(action, timeout_s, **kwargs))


class SumEnv(MCPEnvironment):
    """Tools `add` and `submit`; the right sum is worth 1 and ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("sums")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two integers"""
            return a + b

        @mcp.tool
        def look():
            """See the blackboard"""
            return ["the blackboard:", Image(data=PNG, format="png")]

        @mcp.tool
        def submit(answer: int) -> str:
            """Submit the final answer"""
            return "ok"

        super().__init__(mcp)
        self._state = State()

    def reset(self, seed=None, episode_id=None, a=2, b=2, **kwargs):
        self.right = a + b
        self._state = State(episode_id=episode_id)
        return Observation(metadata={"task": f"what is {a}+{b}?"})

    def _judged(self, action, observation):
        self._state.step_count += 1
        if isinstance(action, CallToolAction) and action.tool_name == "submit" and observation.error is None:
            observation.reward, observation.done = float(action.arguments["answer"] == self.right), True
        return observation

    def step(self, action, timeout_s=None, **kwargs):
        return self._judged(action, super().step(action, timeout_s, **kwargs))

    async def step_async(self, action, timeout_s=None, **kwargs):
        return self._judged(action, await super().step_async(action, timeout_s, **kwargs))

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("tools only")

    @property
    def state(self):
        return self._state


guess = create_app(GuessEnv, Guess, Hint, env_name="guess", max_concurrent_envs=SESSIONS)
echo = create_app(EchoEnv, Said, Echoed, env_name="echo", max_concurrent_envs=64)
screen = create_app(ScreenEnv, Said, Screen, env_name="screen", max_concurrent_envs=64)
sums = create_app(SumEnv, CallToolAction, CallToolObservation, env_name="sums", max_concurrent_envs=64)
