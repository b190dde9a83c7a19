"""Chat templates: conversations in, text out, and where in that text each turn stands."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from upweight.config.sections.data import FALLBACK_PREFIX, TEMPLATE_ALIASES, DataSection, DatasetRow
from upweight.data.raw_row import RowError, common_length
from upweight.data.tokenize.messages import Conversation, Message
from upweight.errors import UserError
from upweight.log import warn_once

REWRITTEN_PROMPT = (
    "the chat template writes earlier turns differently once an answer follows: prompts are kept as the model meets "
    "them, and answers are rendered on their own"
)
REWRITTEN_TURN = (
    "the chat template writes an assistant turn differently when it is not the last one: such turns become samples of "
    "their own, each rendered as the last one"
)
LEFT_OUT = (
    "the chat template leaves out part of what some answers say, their reasoning perhaps: it is not trained on "
    "(look at rows with `upweight preprocess CONFIG --show 3`; 'chat_template' names another template)"
)
SAID_IN = ("content", "reasoning_content", "thinking")
OTHER_WORDS = ("\u2021", "\u2020")  # whatever a turn says, it does not begin with both


@dataclass(frozen=True)
class Turn:
    """A turn's place in the rendered text: from the first character the model writes to the last."""

    start: int
    end: int
    message: int  # number of the message


class ChatTemplate:
    """A template bound to a tokenizer; without a source, the tokenizer's own."""

    def __init__(
        self, tokenizer: Any, source: str | None, variables: Mapping[str, Any], written: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.variables = dict(variables)
        self.written = written  # the user's own text, if the source is that

    def render(self, conversation: Conversation, *, ask: bool = False, resume: bool = False) -> str:
        """The conversation as text; `ask` opens the assistant's next turn, `resume` leaves its last one open."""
        if not conversation.messages:
            raise RowError("messages", "at least one message")
        if self.source is None and not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                "chat_template: the tokenizer has no chat template of its own. "
                "Name one, for example 'chat_template: chatml'."
            )
        if conversation.tools and "tools" not in str(self.source or self.tokenizer.chat_template):
            warn_once("the chat template does not show tools to the model; say in the prompt how to call them")
        try:
            return self._apply(self._fit(conversation), ask, resume)
        except Exception as error:  # a template is foreign code and may fail in any way
            reason = str(error).strip() or type(error).__name__
            raise RowError("messages", f"messages that the chat template accepts; it says: {reason}") from error

    def prompt(self, conversation: Conversation) -> str:
        """The text that the assistant goes on from: its next turn opened, or its last one where that ends the chat."""
        resume = bool(conversation.messages) and conversation.messages[-1]["role"] == "assistant"
        return self.render(conversation, ask=not resume, resume=resume)

    def split(self, conversation: Conversation, answers: Sequence[Sequence[Message]]) -> tuple[str, list[str]]:
        """The prompt as text, and each answer as the text that follows it."""
        prompt = self.render(conversation, ask=True)
        whole = [self.render(conversation.then(*answer)) for answer in answers]
        if not all(text.startswith(prompt) for text in whole):
            # Some templates open a turn with more than they keep of it (`<think>`): the prompt ends where they part.
            shared = prompt[: min(common_length(prompt, text) for text in whole)]
            if not shared.startswith(self.render(conversation)):
                warn_once(REWRITTEN_PROMPT)
                return prompt, [self._alone(conversation, answer) for answer in answers]
            prompt = shared
        for text, answer in zip(whole, answers, strict=True):
            _warn_if_left_out(answer[-1], text[len(prompt) :])
        return prompt, [text[len(prompt) :].rstrip() for text in whole]

    def turns(self, conversation: Conversation, wanted: Collection[int]) -> list[tuple[str, list[Turn]]]:
        """The text with the places of the wanted turns; a turn that later ones rewrite gets a text of its own."""
        text, turns = self.render(conversation).rstrip(), []
        alone = []
        last = len(conversation.messages) - 1
        for number, message in enumerate(conversation.messages):
            if number not in wanted:
                continue
            upto = text if number == last else self.render(conversation.upto(number + 1)).rstrip()
            turn = Turn(self._start(conversation.upto(number), message, upto), len(upto), number)
            if message["role"] == "assistant":
                _warn_if_left_out(message, upto[turn.start :])
            if text.startswith(upto):
                turns.append(turn)
            else:
                warn_once(REWRITTEN_TURN)
                alone.append((upto, [turn]))
        return [*alone, (text, turns)] if turns else alone

    def _start(self, before: Conversation, message: Message, text: str) -> int:
        """Where in the text that a message ends its turn begins: behind the header, which is given and not written."""
        if before.messages and message["role"] == "assistant":
            opened = self.render(before, ask=True)
            shared = common_length(opened, text)
            if shared == len(opened) and not self._opens_turns:  # a header, if there is one, lies before the words
                words = self._words(before, message, text)
                return words if text[shared:words].strip() else shared
            if shared == len(opened) or text.startswith(self.render(before)):
                return shared
        # Nothing opens this turn, or earlier ones look different without it.
        return self._words(before, message, text)

    def _words(self, before: Conversation, message: Message, text: str) -> int:
        """Where a text parts from one with other words in its last message."""
        other = next(mark for mark in OTHER_WORDS if not message["content"].lstrip().startswith(mark))
        return common_length(self.render(before.then({**message, "content": other})), text)

    def _alone(self, conversation: Conversation, answer: Sequence[Message]) -> str:
        """An answer rendered after the last message only."""
        short = Conversation(conversation.messages[-1:], conversation.tools, conversation.variables)
        prompt, whole = self.render(short, ask=True), self.render(short.then(*answer))
        return whole[len(prompt) :].rstrip() if whole.startswith(prompt) else answer[-1]["content"]

    def _apply(self, conversation: Conversation, ask: bool, resume: bool = False) -> str:
        text = self.tokenizer.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            chat_template=self.source,
            tokenize=False,
            add_generation_prompt=ask,
            continue_final_message=resume,
            **{**self.variables, **conversation.variables},
        )
        assert isinstance(text, str)
        return text

    def _fit(self, conversation: Conversation) -> Conversation:
        """The conversation with system text in the first user turn, where the template has no system role."""
        system = [message["content"] for message in conversation.messages if message["role"] == "system"]
        if not system or self._takes_system:
            return conversation
        others = [message for message in conversation.messages if message["role"] != "system"]
        number = next((n for n, message in enumerate(others) if message["role"] == "user"), None)
        if number is None:
            others.insert(0, {"role": "user", "content": "\n\n".join(system)})
        else:
            others[number] = {**others[number], "content": "\n\n".join([*system, others[number]["content"]])}
        return Conversation(others, conversation.tools, conversation.variables)

    @cached_property
    def _takes_system(self) -> bool:
        probe = Conversation([{"role": "system", "content": "SYSTEM-PROBE"}, {"role": "user", "content": "USER-PROBE"}])
        try:
            return "SYSTEM-PROBE" in self._apply(probe, ask=True)
        except Exception:  # foreign code, and failing is an answer: rows are rendered without that role
            return False

    @cached_property
    def _opens_turns(self) -> bool:
        """Whether asking for the assistant's turn writes anything."""
        probe = Conversation([{"role": "user", "content": "USER-PROBE"}])
        try:
            return self._apply(probe, ask=True) != self._apply(probe, ask=False)
        except Exception:  # foreign code, which may want more messages
            return True


def _warn_if_left_out(message: Message, text: str) -> None:
    """Say so where a template does not write all that an answer says; white space is the template's own affair."""
    for said in filter(None, map(message.get, SAID_IN)):
        if isinstance(said, str) and said not in text and "".join(said.split()) not in "".join(text.split()):
            warn_once(LEFT_OUT)


def chat_template(data: DataSection, entry: DatasetRow, tokenizer: Any, folder: Path) -> ChatTemplate:
    """The template for the rows of one entry: its own setting, else the config's, else the tokenizer's."""
    own = entry if entry.chat_template or entry.chat_template_jinja else data
    source = template_source(own.chat_template, own.chat_template_jinja, tokenizer, folder)
    return ChatTemplate(tokenizer, source, data.template_args, source if own.chat_template_jinja else None)


def template_source(name: str | None, jinja: str | None, tokenizer: Any, folder: Path) -> str | None:
    """The text of a template by name; None is the tokenizer's own."""
    if name is not None and name.startswith(FALLBACK_PREFIX):
        if getattr(tokenizer, "chat_template", None):
            return None
        name = name.removeprefix(FALLBACK_PREFIX)
    if jinja and name in (None, "jinja"):
        return _jinja_text(jinja, folder)
    if name is None or name == "tokenizer_default":
        return None
    file = f"{TEMPLATE_ALIASES.get(name, name)}.jinja"
    return files("upweight.data").joinpath("chat_templates", file).read_text(encoding="utf-8")


def _jinja_text(jinja: str, folder: Path) -> str:
    if "{%" in jinja or "{{" in jinja or "\n" in jinja:
        return jinja
    for place in (Path.cwd(), folder):
        if (place / Path(jinja).expanduser()).is_file():
            return (place / Path(jinja).expanduser()).read_text(encoding="utf-8")
    raise UserError(f"chat_template_jinja: there is no file '{jinja}' in the working directory or beside the config.")
