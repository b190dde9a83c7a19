"""Ollama's Modelfile: the chat template in Ollama's own language, what ends an answer, and sampling parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upweight.errors import UserError

MARKS = {"system": "\u2021SYSTEM\u2021", "user": "\u2021USER\u2021", "assistant": "\u2021ASSISTANT\u2021"}
LONGEST_CONTEXT = 8192  # tokens; Ollama takes memory for all of them
TEMPERATURE = 0.7  # as `upweight inference` samples
NOT_TURNS = "chat_template: it does more than write turns one after the other, which a Modelfile cannot say"
REMEDY = "Export with `--to gguf`, whose file carries the template for llama.cpp (`llama-server --jinja`)."
CHECKED = (  # conversations on which both templates have to give the same text
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
)


@dataclass(frozen=True)
class TurnTemplate:
    """A chat template as texts around the content of each role, a beginning, and what asks for an answer."""

    start: str
    around: Mapping[str, tuple[str, str]]
    ask: str
    default_system: str | None = None  # that the template writes where a conversation has no system text

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text that Ollama would make of these messages."""
        if self.default_system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default_system}, *messages]
        turns = (message["content"].join(self.around[message["role"]]) for message in messages)
        return self.start + "".join(turns) + self.ask

    def in_go(self) -> str:
        """Return the template in the language of Go, which Ollama reads."""
        start, around = self.start, dict(self.around)
        if self.default_system == "":  # Ollama leaves an empty system turn out, so that it stands before all turns
            start += "{{ .System }}".join(around.pop("system"))
        kinds = [
            f'{{{{ {"if" if n == 0 else "else if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for n, (role, (before, after)) in enumerate(around.items())
        ]
        return f"{start}{{{{ range .Messages }}}}{''.join(kinds)}{{{{ end }}}}{{{{ end }}}}{self.ask}"


def turn_template(tokenizer: Any) -> TurnTemplate:
    """Return the tokenizer's chat template as texts around turns; raise where it is more than that."""
    if not tokenizer.chat_template:
        raise UserError("Ollama needs a chat template, and the tokenizer has none; train with `chat_template: chatml`.")
    try:
        template = _read_turns(tokenizer)
        agrees = template is not None and all(
            template.render(messages) == _rendered(tokenizer, messages)
            for roles in CHECKED
            if "system" in template.around or "system" not in roles
            for messages in [[{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]]
        )
    except Exception as error:  # a template is foreign code and may refuse any conversation
        raise UserError(f"{NOT_TURNS}; its error: {error}. {REMEDY}") from error
    if template is None or not agrees or "{{" in template.start + template.ask:
        raise UserError(f"{NOT_TURNS}. {REMEDY}")
    return _without_bos(template, tokenizer)


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]], ask: bool = True) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)


def _read_turns(tokenizer: Any) -> TurnTemplate | None:
    """Return the texts around the contents of a conversation with marked contents, or None where marks are missing."""
    talk = [{"role": role, "content": MARKS[role]} for role in ("user", "assistant", "user")]
    whole, answered = _rendered(tokenizer, talk), _rendered(tokenizer, talk[:2], ask=False)
    ask = whole[len(_rendered(tokenizer, talk, ask=False)) :]
    if whole.count(MARKS["user"]) != 2 or whole.count(MARKS["assistant"]) != 1:
        return None
    first, between, last = whole.split(MARKS["user"])
    before_answer, after_answer = between.split(MARKS["assistant"])
    after_user = last.removesuffix(ask)
    end = answered.partition(MARKS["assistant"])[2]
    before_user = after_answer.removeprefix(end)
    turns = {"user": (before_user, after_user), "assistant": (before_answer.removeprefix(after_user), end)}
    start = first.removesuffix(before_user)
    try:
        asked = _rendered(tokenizer, [{"role": "system", "content": MARKS["system"]}, talk[0]])
    except Exception:  # some templates refuse system texts
        asked = ""
    head = asked.partition(MARKS["user"])[0]
    if head.count(MARKS["system"]) != 1 or not head.endswith(before_user):
        return TurnTemplate(start, turns, ask)
    before, after = head.removesuffix(before_user).split(MARKS["system"])
    if start.startswith(before) and start.endswith(after) and len(start) >= len(before) + len(after) and before:
        return TurnTemplate("", {"system": (before, after), **turns}, ask, start[len(before) : len(start) - len(after)])
    return TurnTemplate(start, {"system": (before.removeprefix(start), after), **turns}, ask)


def _without_bos(template: TurnTemplate, tokenizer: Any) -> TurnTemplate:
    """Leave the BOS out where the tokenizer adds it, as Ollama does by the file's note of that."""
    bos = tokenizer.bos_token
    if bos is None or tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return template
    if template.start.startswith(bos):
        return TurnTemplate(template.start.removeprefix(bos), template.around, template.ask, template.default_system)
    first, (before, after) = next(iter(template.around.items()))
    around = {**template.around, first: (before.removeprefix(bos), after)}
    return TurnTemplate(template.start, around, template.ask, template.default_system)


def modelfile(weights: Path, tokenizer: Any, ends: Sequence[str], positions: int | None) -> str:
    """Return the Modelfile of a GGUF file beside it; `ends` are the texts of tokens that end an answer."""
    template = turn_template(tokenizer)
    lines = [f"FROM ./{weights.name}", "", f"TEMPLATE {_quoted(template.in_go())}"]
    if template.default_system is not None:
        lines.append(f"SYSTEM {_quoted(template.default_system)}")
    lines += ["", *(f'PARAMETER stop "{end}"' for end in ends)]
    lines += [f"PARAMETER num_ctx {min(positions or LONGEST_CONTEXT, LONGEST_CONTEXT)}"]
    return "\n".join([*lines, f"PARAMETER temperature {TEMPERATURE}", ""])


def _quoted(text: str) -> str:
    return f'"""{text}"""'
