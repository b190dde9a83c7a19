"""The tokens that a chat template adds after each turn of the policy.

The policy's turns are never rendered: a placeholder stands for each, and the text that the template writes after the
placeholder follows the sampled tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from upweight.data.images.marks import MARKS, Loaded, expanded
from upweight.data.raw_row import RowError
from upweight.data.tokenize.messages import Conversation
from upweight.data.tokenize.templates import ChatTemplate
from upweight.data.tokenize.tokens import TextTokens
from upweight.environments.episode import Message
from upweight.log import warn_once
from upweight.types import ImageRef

THINK_END, THINK_START = "</think>", "<think>"
HISTORY_CHANGED = (
    "the chat template renders earlier turns differently once later messages follow (for example, it drops their "
    "reasoning): such conversations are trained on as several sequences, each as the policy saw it (rollout/splits "
    "counts them)"
)


class FollowUp(NamedTuple):
    """The tokens before the policy's next turn: they follow its last turn, or restart with a whole new prompt."""

    ids: list[int]
    restarts: bool
    images: tuple[ImageRef, ...] = ()  # that these tokens hold


class ChatTokens:
    """Tokenizes one conversation turn by turn."""

    def __init__(
        self,
        template: ChatTemplate,
        tokens: TextTokens,
        ends: Collection[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        loaded: Sequence[Loaded] = (),  # images, which messages have marks of; it may grow
    ) -> None:
        self._template, self._tokens, self._ends, self._loaded = template, tokens, ends, loaded
        opening = [dict(message) for message in messages]
        self._conversation = Conversation(opening, list(tools) or None)  # with the policy's text
        self._with_placeholders = self._conversation
        self._turns = 0

    def opening(self) -> FollowUp:
        """Return the prompt of the first turn, or of a new beginning."""
        text = self._template.prompt(self._conversation)
        return FollowUp(self._tokens.with_bos(self._encode(text)), restarts=True, images=self._images(text))

    def follow(
        self, text: str, last_id: int | None, tool_calls: Sequence[Mapping[str, Any]], messages: Sequence[Message]
    ) -> FollowUp:
        """Return the tokens after a turn with this text, calls and last token, when `messages` answer it."""
        mark = f"zq{self._turns}turnqz"
        self._turns += 1
        thinks = THINK_END in text
        placeholder = f"{THINK_START}\n{mark}\n{THINK_END}\n\n{mark}" if thinks else mark
        before = self._template.prompt(self._with_placeholders)
        after, self._with_placeholders = self._render(placeholder, mark, tool_calls, messages)
        if thinks and THINK_START not in text:
            text = f"{THINK_START}\n{text}"  # the prompt ended with it
        self._conversation = self._conversation.then({"role": "assistant", "content": text}, *map(dict, messages))
        opens_thought = before.rstrip().endswith(THINK_START)
        turn = placeholder.removeprefix(THINK_START) if opens_thought else placeholder
        if not _without_space(after).startswith(_without_space(before + turn)):
            warn_once(HISTORY_CHANGED)
            return self.opening()
        added = after[after.rindex(mark) + len(mark) :]
        ids = self._encode(added)
        if last_id in self._ends and ids and ids[0] in self._ends:
            ids = ids[1:]  # the turn has its end token already
        return FollowUp(ids, restarts=False, images=self._images(added))

    def _render(
        self, placeholder: str, mark: str, tool_calls: Sequence[Mapping[str, Any]], messages: Sequence[Message]
    ) -> tuple[str, Conversation]:
        """Render the conversation with a placeholder turn and the messages after it, up to the next turn."""
        turn = {"role": "assistant", "content": placeholder}
        plain = self._with_placeholders.then(turn, *map(dict, messages))
        try:
            text = self._template.render(plain, ask=True)
            if mark in text and _contains(text, messages):
                return text, plain
        except RowError:
            if not tool_calls:
                raise
        # Some templates want to see the call that a tool's result belongs to.
        calling_turn = {**turn, "tool_calls": list(tool_calls)}
        whole = self._with_placeholders.then(calling_turn, *map(dict, messages))
        with_calls, without_calls = (
            self._template.render(self._with_placeholders.then(message)) for message in (calling_turn, turn)
        )
        text = self._template.render(whole, ask=True)
        tail = without_calls[without_calls.rindex(mark) + len(mark) :]
        if not text.startswith(with_calls) or not with_calls.endswith(tail):
            raise RowError("messages", "a chat template that shows tool results to the model")
        if mark in with_calls:
            head = with_calls[: with_calls.rindex(mark) + len(mark)]
        else:
            head = without_calls[: len(without_calls) - len(tail)]
        return head + tail + text[len(with_calls) :], whole

    def _encode(self, text: str) -> list[int]:
        return self._tokens.ids([expanded(text, self._loaded)])[0]

    def _images(self, text: str) -> tuple[ImageRef, ...]:
        return tuple(self._loaded[int(number)][0] for number in MARKS.findall(text))


def _contains(text: str, messages: Sequence[Message]) -> bool:
    """Whether a text has the content of all messages; templates may change white space."""
    text = _without_space(text)
    return all(_without_space(str(message.get("content") or "")) in text for message in messages)


def _without_space(text: str) -> str:
    return "".join(text.split())
