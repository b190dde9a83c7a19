"""Guess a number: an OpenEnv environment. Start it with `uvicorn server:app --host 127.0.0.1 --port 8000`."""

from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int  # one field: what the model writes is its value


class Hint(Observation):
    hint: str = ""


class GuessEnv(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True  # many rollouts are open at once

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, target=7, highest=20, **kwargs):
        self.target, self._state = target, State(episode_id=episode_id)
        return Hint(hint=f"Guess a number from 1 to {highest}. Answer with the number alone.")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.guess == self.target:
            return Hint(hint="Right.", reward=1.0 / self._state.step_count, done=True)
        return Hint(hint="Higher." if action.guess < self.target else "Lower.", reward=0.0)

    @property
    def state(self):
        return self._state


app = create_app(GuessEnv, Guess, Hint, env_name="guess", max_concurrent_envs=256)
