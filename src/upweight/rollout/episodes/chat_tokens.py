"""A conversation as its chat template writes it: what follows a turn of the policy, as tokens.

What the policy wrote is never rendered to find out: a stand-in takes its place, and what the template writes after the
stand-in is what follows the policy's own tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upweight.data.raw_row import RowError
from upweight.data.tokenize.messages import Conversation
from upweight.data.tokenize.templates import ChatTemplate
from upweight.data.tokenize.tokens import TextTokens
from upweight.log import warn_once

Said = Mapping[str, Any]  # a message, or a call in one
THOUGHT_ENDS, THOUGHT_BEGINS = "</think>", "<think>"
WRITTEN_ANEW = (
    "the chat template writes earlier turns otherwise once more follow (it drops their reasoning, perhaps): such "
    "conversations are trained on as several sequences, each as the policy saw it (rollout/splits counts them)"
)


@dataclass(frozen=True)
class FollowUp:
    """What the policy reads before its next turn: tokens that follow its last, or a whole prompt anew."""

    ids: list[int]
    anew: bool


class ChatTokens:
    """One conversation under way."""

    def __init__(
        self,
        template: ChatTemplate,
        tokens: TextTokens,
        ends: Collection[int],
        messages: Sequence[Said],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._template, self._tokens, self._ends = template, tokens, ends
        opening = [dict(message) for message in messages]
        self._said = Conversation(opening, list(tools) or None)  # with what the policy wrote
        self._shown = self._said  # with stand-ins for it
        self._turns = 0

    def opening(self) -> list[int]:
        """The prompt of the first turn."""
        return self._tokens.begun(self._encoded(self._template.prompt(self._said)))

    def follow(self, text: str, last: int | None, calls: Sequence[Said], messages: Sequence[Said]) -> FollowUp:
        """What the policy reads after a turn that says `text` and ends in token `last`, when `messages` answer it."""
        mark = f"zq{self._turns}turnqz"
        self._turns += 1
        thinks = THOUGHT_ENDS in text
        stand_in = f"{THOUGHT_BEGINS}\n{mark}\n{THOUGHT_ENDS}\n\n{mark}" if thinks else mark
        before = self._template.prompt(self._shown)
        after, self._shown = self._after(stand_in, mark, calls, messages)
        if thinks and THOUGHT_BEGINS not in text:
            text = f"{THOUGHT_BEGINS}\n{text}"  # the prompt had it
        self._said = self._said.then({"role": "assistant", "content": text}, *map(dict, messages))
        opened = before.rstrip().endswith(THOUGHT_BEGINS)
        written = stand_in.removeprefix(THOUGHT_BEGINS) if opened else stand_in
        if not _squeezed(after).startswith(_squeezed(before + written)):
            warn_once(WRITTEN_ANEW)
            return FollowUp(self.opening(), anew=True)
        ids = self._encoded(after[after.rindex(mark) + len(mark) :])
        if last in self._ends and ids and ids[0] in self._ends:
            ids = ids[1:]  # the turn has its end already
        return FollowUp(ids, anew=False)

    def _after(
        self, stand_in: str, mark: str, calls: Sequence[Said], messages: Sequence[Said]
    ) -> tuple[str, Conversation]:
        """The conversation with a stand-in and what answers it, as text that opens the next turn."""
        plain = self._shown.then({"role": "assistant", "content": stand_in}, *map(dict, messages))
        try:
            text = self._template.render(plain, ask=True)
            if mark in text and _tells(text, messages):
                return text, plain
        except RowError:
            if not calls:
                raise
        # Some templates want to see the call that a tool's result belongs to.
        turn = {"role": "assistant", "content": stand_in}
        whole = self._shown.then({**turn, "tool_calls": list(calls)}, *map(dict, messages))
        ended, plainly = (
            self._template.render(self._shown.then(one)) for one in (whole.messages[len(self._shown.messages)], turn)
        )
        text, tail = self._template.render(whole, ask=True), plainly[plainly.rindex(mark) + len(mark) :]
        if not text.startswith(ended) or not ended.endswith(tail):
            raise RowError("messages", "a chat template that shows what tools answer to the model")
        begun = ended[: ended.rindex(mark) + len(mark)] if mark in ended else plainly[: len(plainly) - len(tail)]
        return begun + tail + text[len(ended) :], whole

    def _encoded(self, text: str) -> list[int]:
        return self._tokens.ids([text])[0]


def _tells(text: str, messages: Sequence[Said]) -> bool:
    """Whether a text has what messages say; white space is the template's own affair."""
    text = _squeezed(text)
    return all(_squeezed(str(message.get("content") or "")) in text for message in messages)


def _squeezed(text: str) -> str:
    return "".join(text.split())
