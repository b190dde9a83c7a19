"""Renders messages of plain text by the compiled chat template alone, which is most of what data consist of."""

from collections.abc import Mapping
from typing import Any

from transformers.utils import chat_template_utils

from upweight.data.tokenize.messages import Conversation
from upweight.watchdog import TimeUp

MOST_COMPARED = 16  # first renderings that are compared with what transformers renders
SCALARS = (str, int, float, bool, type(None))


class PlainRender:
    """Renders roles and texts; what transformers does besides (copies, tools, reasoning, open turns) changes none."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]) -> None:
        self._compile = getattr(chat_template_utils, "_compile_jinja_template", None)
        self._variables: dict[str, Any] = {**getattr(tokenizer, "special_tokens_map", {}), **variables}
        if not all(type(value) in SCALARS for value in self._variables.values()):
            self._compile = None
        self._uncompared = MOST_COMPARED

    def __call__(self, source: Any, conversation: Conversation, *, ask: bool) -> str | None:
        """Return the text of a conversation; None where it is not of plain text, or the template fails on it."""
        if self._compile is None or not isinstance(source, str) or not _is_plain(conversation):
            return None
        given = {"messages": conversation.messages, "tools": None, "documents": None, "add_generation_prompt": ask}
        try:
            return self._compile(source).render(**given, **self._variables)
        except TimeUp:
            raise
        except Exception:  # foreign code; transformers renders it again, with its messages
            return None

    @property
    def is_compared(self) -> bool:
        """Whether enough renderings were the same as those of transformers."""
        return self._uncompared <= 0

    def compare(self, text: str, right: str) -> None:
        """Count a rendering that was right; one that was not ends them."""
        self._uncompared -= 1
        if text != right:
            self._compile = None


def _is_plain(conversation: Conversation) -> bool:
    return not (conversation.tools or conversation.variables) and all(
        len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str
        for message in conversation.messages
    )
