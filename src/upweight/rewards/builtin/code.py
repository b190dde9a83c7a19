"""A reward for programs: runs the completion's code against the row's tests or expected output."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from upweight.errors import UserError
from upweight.log import warn_once
from upweight.rewards.builtin.spec import builtin
from upweight.rewards.builtin.text import ScoreList, between_tags, fenced_blocks, rows_of, texts_of
from upweight.rewards.sandbox.run import Limits, SandboxError, run_program

_ISOLATION = {"read-only": "files that cannot be written", "hidden": "hidden home folders and sockets"}


class Task(NamedTuple):
    """What a program must do: tests to run after it, or pairs of stdin and the stdout it must give."""

    tests: list[str]
    cases: list[tuple[str, str]]


@builtin
class CodeReward:
    """Scores a completion whose Python code passes the row's tests, or prints the expected output, in a sandbox."""

    tests: str = "tests"
    stdin: str = "input"
    output: str = "output"
    tag: str | None = None
    block: Literal["last", "first", "all"] = "last"
    partial: bool = False
    time_limit: PositiveFloat = 10.0
    memory_mb: Annotated[int, Field(ge=64)] = 512
    file_mb: PositiveInt = 16
    processes: PositiveInt = 16
    parallel: PositiveInt = field(default_factory=lambda: os.cpu_count() or 1)
    score: float = 1.0
    wrong: float = 0.0
    __name__ = "code"

    def __post_init__(self) -> None:
        if os.name != "posix":
            raise UserError("Reward 'code' needs Linux or macOS: it has no way to limit a program on this system.")

    def __call__(self, completions: list[Any], **columns: Any) -> ScoreList:
        if not isinstance(columns.get(self.tests), list) and not isinstance(columns.get(self.output), list):
            problem = f"'{self.tests}' (tests) or '{self.output}' (expected output), and the rows have neither"
            remedy = "Name yours: code(tests='...') or code(output='...', stdin='...')."
            raise UserError(f"Reward 'code' reads the column {problem}. {remedy}")
        texts = texts_of(completions)
        tasks = [self._task_of_row(row) for row in rows_of(columns, len(texts))]
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(self._score, texts, tasks))

    def _task_of_row(self, row: dict[str, Any]) -> Task | None:
        tests = row.get(self.tests)
        if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
            with suppress(ValueError, RecursionError):
                tests = json.loads(tests)
        if isinstance(tests, dict):
            return _test_cases(tests.get("inputs"), tests.get("outputs"))
        if tests:
            texts = [tests] if isinstance(tests, str) else [str(test) for test in tests]
            entry = row.get("entry_point")
            checks = f"\ncheck({entry})" if entry else ""
            return Task([text + checks if "def check(" in text else text for text in texts], [])
        return _test_cases(row.get(self.stdin), row.get(self.output))

    def _extract_code(self, text: str) -> str:
        if self.tag is not None:
            text = between_tags(text, self.tag) or ""
        blocks = fenced_blocks(text) or [text]
        return {"last": blocks[-1], "first": blocks[0], "all": "\n".join(blocks)}[self.block]

    def _score(self, text: str, task: Task | None) -> float | None:
        if task is None:
            return None
        code = self._extract_code(text)
        if not code.strip():
            return self.wrong
        try:
            share = self._share_passed(code, task)
        except SandboxError as error:
            remedy = "As root, allow namespaces or let other users read this Python; or run as another user."
            warn_once(f"reward 'code': a program could not be isolated, its row does not count: {error}. {remedy}")
            return None
        if self.partial:
            return self.wrong + (self.score - self.wrong) * share
        return self.score if share == 1 else self.wrong

    def _share_passed(self, code: str, task: Task) -> float:
        """Code and its task -> the share of tests or cases that hold."""
        if task.tests:
            return sum(self._run_program(code, task.tests, "").held or []) / len(task.tests)
        right = 0
        for stdin, expected in task.cases:
            outcome = self._run_program(code, None, stdin)
            if outcome.ended_well and _stripped_lines(outcome.stdout) == _stripped_lines(expected):
                right += 1
            elif not self.partial:
                return 0.0
        return right / len(task.cases)

    def _run_program(self, code: str, tests: list[str] | None, stdin: str) -> Any:
        limits = Limits(self.time_limit, self.memory_mb * 2**20, self.file_mb * 2**20, processes=self.processes)
        outcome = run_program(code, tests=tests, stdin=stdin, limits=limits)
        missing = [what for name, what in _ISOLATION.items() if name not in outcome.isolation]
        if "plain" in outcome.isolation:
            missing = ["no network", "no sight of other processes", *missing]
        if missing:
            problem = f"this system does not allow all of the isolation; missing: {', '.join(missing)}"
            warn_once(f"reward 'code': {problem}. Run in a container, or allow user namespaces.")
        return outcome


def _test_cases(stdin: Any, expected: Any) -> Task | None:
    """One stdin and stdout, or lists of them -> the task; None when nothing is expected."""
    if expected is None or expected == []:
        return None
    outputs = expected if isinstance(expected, list) else [expected]
    inputs = stdin if isinstance(stdin, list) else [stdin] * len(outputs)
    if len(inputs) != len(outputs):
        raise UserError(f"Reward 'code': a row has {len(inputs)} inputs for {len(outputs)} outputs.")
    pairs = zip(inputs, outputs, strict=True)
    return Task([], [("" if text is None else str(text), str(output)) for text, output in pairs])


def _stripped_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
