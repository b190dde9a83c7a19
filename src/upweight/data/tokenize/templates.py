"""Chat templates: render conversations as text, and locate each turn in that text."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from upweight.config.peers import TEMPLATE_ALIASES
from upweight.config.sections.data import FALLBACK_PREFIX, DataSection, DatasetSpec
from upweight.data.images.marks import MARKS, as_parts, missing_images, with_marks
from upweight.data.raw_row import RowError, common_length
from upweight.data.tokenize.messages import Conversation, Message
from upweight.data.tokenize.plain_render import PlainRender
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.models.processor import image_reader
from upweight.watchdog import TimeUp, time_limit

REWRITTEN_PROMPT = "the chat template writes earlier turns differently once a completion follows; it is rendered alone"
REWRITTEN_TURN = "the chat template writes assistant turns differently once others follow: they become separate samples"
LEFT_OUT = (
    "the chat template leaves out part of some completions, perhaps their reasoning: it is not trained on "
    "(look at rows with `upweight preprocess CONFIG --show 3`; 'chat_template' names another template)"
)
TEXT_KEYS = ("content", "reasoning_content", "thinking")
MISTRAL_V7 = 7  # since which turns of plain text are written alike
PROBE_MARKS = ("\u2021", "\u2020")  # no text begins with both


@dataclass(frozen=True)
class Span:
    """A range of characters that is trained on: of a turn, from the first that the model writes to the last."""

    start: int
    end: int
    message: int = 0  # index of the turn's message
    untrained: tuple[tuple[int, int], ...] = ()  # ranges inside it that are not trained on


@dataclass(eq=False)
class ChatTemplate:
    """A chat template bound to a tokenizer; without a source, the tokenizer's template."""

    tokenizer: Any
    source: str | None
    variables: Mapping[str, Any]
    seconds: float = DataSection().template_timeout

    def render(self, conversation: Conversation, *, ask: bool = False, resume: bool = False) -> str:
        """Render a conversation as text; `ask` adds the generation prompt, `resume` leaves the last message open."""
        if not conversation.messages:
            raise RowError("messages", "at least one message")
        if self.source is None and not getattr(self.tokenizer, "chat_template", None):
            remedy = "Name one, for example 'chat_template: chatml'."
            raise UserError(f"chat_template: the tokenizer has no chat template. {remedy}")
        if conversation.tools and "tools" not in str(self.source or self.tokenizer.chat_template):
            warn_once("the chat template does not show tools to the model; describe in the prompt how to call them")
        try:
            return self._apply_template(self._with_supported_roles(conversation), ask, resume)
        except TimeUp as error:
            seconds = f"it took longer than chat_template_timeout, {self.seconds:g} seconds"
            raise RowError("messages", f"messages that the chat template accepts; {seconds}") from error
        except RowError:
            raise
        except Exception as error:  # a template is foreign code and may fail in any way
            reason = str(error).strip() or type(error).__name__
            raise RowError("messages", f"messages that the chat template accepts; its error: {reason}") from error

    def prompt(self, conversation: Conversation) -> str:
        """Render the prompt: with a generation prompt, or with an open last message if that is the assistant's."""
        resume = bool(conversation.messages) and conversation.messages[-1]["role"] == "assistant"
        return self.render(conversation, ask=not resume, resume=resume)

    def split(self, conversation: Conversation, answers: Sequence[Sequence[Message]]) -> tuple[str, list[str]]:
        """Return the prompt as text, and each completion as the text that follows it."""
        prompt = self.render(conversation, ask=True)
        whole = [self.render(conversation.then(*answer)) for answer in answers]
        if not all(text.startswith(prompt) for text in whole):
            # Some generation prompts add text that a finished turn lacks (`<think>`): the prompt ends before it.
            shared = prompt[: min(common_length(prompt, text) for text in whole)]
            if not shared.startswith(self.render(conversation)):
                warn_once(REWRITTEN_PROMPT)
                return prompt, [self._rendered_separately(conversation, answer) for answer in answers]
            prompt = shared
        for text, answer in zip(whole, answers, strict=True):
            _warn_if_left_out(answer[-1], text[len(prompt) :])
        return prompt, [text[len(prompt) :].rstrip() for text in whole]

    def turns(self, conversation: Conversation, wanted: Collection[int]) -> list[tuple[str, list[Span]]]:
        """Return the text with the ranges of the wanted turns; a turn that the template changes later comes apart."""
        text, turns, separate = self.render(conversation).rstrip(), [], []
        last = len(conversation.messages) - 1
        for number in sorted(wanted):
            message = conversation.messages[number]
            upto = text if number == last else self.render(conversation.upto(number + 1)).rstrip()
            turn = Span(self._turn_start(conversation.upto(number), message, upto), len(upto), number)
            if message["role"] == "assistant":
                _warn_if_left_out(message, upto[turn.start :])
            if text.startswith(upto):
                turns.append(turn)
            else:
                warn_once(REWRITTEN_TURN)
                separate.append((upto, [turn]))
        return [*separate, (text, turns)] if turns else separate

    def _turn_start(self, before: Conversation, message: Message, text: str) -> int:
        """Return where the last message's turn starts in `text`: after the header, which the model does not write."""
        if before.messages and message["role"] == "assistant":
            opened = self.render(before, ask=True)
            shared = common_length(opened, text)
            if shared == len(opened) and not self._has_generation_prompt:  # a header, if any, precedes the content
                content_start = self._content_start(before, message, text)
                return content_start if text[shared:content_start].strip() else shared
            if shared == len(opened) or text.startswith(self.render(before)):
                return shared
        # The template has no header for this turn, or renders earlier turns differently without it.
        return self._content_start(before, message, text)

    def _content_start(self, before: Conversation, message: Message, text: str) -> int:
        """Return where a text starts to differ from one with other content in its last message."""
        probe_content = next(mark for mark in PROBE_MARKS if not message["content"].lstrip().startswith(mark))
        return common_length(self.render(before.then({**message, "content": probe_content})), text)

    def _rendered_separately(self, conversation: Conversation, answer: Sequence[Message]) -> str:
        """Render a completion after the last message only."""
        short = Conversation(conversation.messages[-1:], conversation.tools, conversation.variables)
        prompt, whole = self.render(short, ask=True), self.render(short.then(*answer))
        return whole[len(prompt) :].rstrip() if whole.startswith(prompt) else answer[-1]["content"]

    def _apply_template(self, conversation: Conversation, ask: bool, resume: bool = False) -> str:
        options = {"tools": conversation.tools, "chat_template": self.source, "tokenize": False}
        ends = {"add_generation_prompt": ask, "continue_final_message": resume}
        variables = {**self.variables, **conversation.variables}
        messages, reader = conversation.messages, image_reader(self.tokenizer)
        if reader is None:
            with time_limit(self.seconds):
                source = self.source or getattr(self.tokenizer, "chat_template", None)
                plain = None if resume else self._plain(source, conversation, ask=ask)
                if plain is not None and self._plain.is_compared:
                    return plain
                text = self.tokenizer.apply_chat_template(messages, **options, **ends, **variables)
                if plain is not None:
                    self._plain.compare(plain, text)
                return text
        numbers = [number for message in messages for number in MARKS.findall(message["content"])]
        if literal := sum(message["content"].count(reader.placeholder) for message in messages):
            marked = f"texts without {reader.placeholder}, as image parts mark the places of images; got {literal}"
            raise RowError("messages", marked if numbers else missing_images(reader.placeholder))
        written = as_parts if self._takes_parts else partial(MARKS.sub, reader.placeholder)
        messages = [{**message, "content": written(message["content"])} for message in messages]
        with time_limit(self.seconds):
            text = self.tokenizer.apply_chat_template(messages, **options, **ends, **variables)
        return with_marks(text, reader.placeholder, numbers)

    def writes_otherwise(self, text: str) -> bool:
        """Return whether a question with its answer is not written as in another template's text of the same."""
        mine = self._probe("user", "assistant", ask=False)
        return bool(mine) and "".join(mine.split()) not in "".join(text.split())  # which may begin with a system text

    @cached_property
    def _plain(self) -> PlainRender:
        return PlainRender(self.tokenizer, self.variables)

    def _with_supported_roles(self, conversation: Conversation) -> Conversation:
        """Move system text into the first user message if the template has no system role."""
        system = [message["content"] for message in conversation.messages if message["role"] == "system"]
        if not system or self._has_system_role:
            return conversation
        others = [message for message in conversation.messages if message["role"] != "system"]
        number = next((n for n, message in enumerate(others) if message["role"] == "user"), None)
        if number is None:
            others.insert(0, {"role": "user", "content": "\n\n".join(system)})
        else:
            others[number] = {**others[number], "content": "\n\n".join([*system, others[number]["content"]])}
        return Conversation(others, conversation.tools, conversation.variables)

    @cached_property
    def _has_system_role(self) -> bool:
        return "SYSTEM-PROBE" in self._probe("system", "user")

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes contents that are lists of parts; others write them as Python shows them."""
        parts = [{"role": "user", "content": [{"type": "text", "text": "PARTS-PROBE"}]}]
        try:
            text = self.tokenizer.apply_chat_template(parts, chat_template=self.source, tokenize=False)
        except Exception:  # foreign code, which may take texts alone
            return False
        return "PARTS-PROBE" in text and "'text'" not in text

    @cached_property
    def _has_generation_prompt(self) -> bool:
        """Whether the generation prompt adds any text; a template that cannot be probed is taken to have one."""
        asked = self._probe("user")
        return not asked or asked != self._probe("user", ask=False)

    def _probe(self, *roles: str, ask: bool = True) -> str:
        messages = [{"role": role, "content": f"{role.upper()}-PROBE"} for role in roles]
        try:
            return self._apply_template(Conversation(messages), ask)
        except Exception:  # foreign code, which may lack a role or need more messages
            return ""


def _warn_if_left_out(message: Message, text: str) -> None:
    """Warn if a template does not write all of a completion; differences in white space do not count."""
    for part in filter(None, map(message.get, TEXT_KEYS)):
        if isinstance(part, str) and part not in text and "".join(part.split()) not in "".join(text.split()):
            warn_once(LEFT_OUT)


def chat_template(data: DataSection, entry: DatasetSpec, tokenizer: Any, folder: Path) -> ChatTemplate:
    """Return the template for the rows of one entry: the entry's, else the config's, else the tokenizer's."""
    section = entry if entry.chat_template or entry.chat_template_jinja else data
    source = template_source(section.chat_template, section.chat_template_jinja, tokenizer, folder)
    template = ChatTemplate(tokenizer, source, data.template_args, data.template_timeout)
    if source is not None and getattr(tokenizer, "chat_template", None):
        trained = ChatTemplate(tokenizer, None, data.template_args, data.template_timeout)
        if (theirs := trained._probe("user", "assistant", ask=False)) and template.writes_otherwise(theirs):
            name = section.chat_template or "jinja"
            warn_once(
                f"chat_template: '{name}' writes turns differently from the model's own template, which the model has "
                "learned; leave the key out to train and to ask with the model's own"
            )
    return template


def template_source(name: str | None, jinja: str | None, tokenizer: Any, folder: Path) -> str | None:
    """Return the text of a template by name; None means the tokenizer's template."""
    if name is not None and name.startswith(FALLBACK_PREFIX):
        if getattr(tokenizer, "chat_template", None):
            return None
        name = name.removeprefix(FALLBACK_PREFIX)
    if jinja and name in (None, "jinja"):
        if "{%" in jinja or "{{" in jinja or "\n" in jinja:
            return jinja
        for file in (Path(jinja).expanduser(), folder / Path(jinja).expanduser()):
            if file.is_file():
                return file.read_text(encoding="utf-8")
        raise UserError(f"chat_template_jinja: there is no file '{jinja}' in this folder or beside the config.")
    if name in (None, "tokenizer_default"):
        if getattr(tokenizer, "chat_template", None) or getattr(tokenizer, "tekken_version", 0) < MISTRAL_V7:
            return None
        name = "mistral_v7_tekken"
    file = f"{TEMPLATE_ALIASES.get(name, name)}.jinja"
    return files("upweight.data").joinpath("chat_templates", file).read_text(encoding="utf-8")
