"""A game with rewards of its own: guess a number in few turns, with a word after each guess (docs/environments.md)."""

import re


class Guess:
    """One episode; `get_reward` gives two rewards by name, and `reward_env` stands for both."""

    reward_names = ("found", "near")

    def reset(self, answer, **row):
        self.answer, self.guesses, self.done = int(answer), [], False
        return "Guess the number: answer with a number between -99 and 199, nothing else."

    def step(self, text):
        number = re.search(r"-?\d{1,4}", text)
        if number is None:
            return "That is no number."
        self.guesses.append(int(number[0]))
        self.done = self.guesses[-1] == self.answer
        return ("Right." if self.done else "Higher." if self.guesses[-1] < self.answer else "Lower."), self.done

    def get_reward(self):
        distance = min((abs(guess - self.answer) for guess in self.guesses), default=300)
        return {"found": float(self.done) / max(len(self.guesses), 1), "near": 1 / (1 + distance)}
