"""Prompt styles that Axolotl names: texts written from the columns of a row; prompt and answer are tokenized alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from upweight.data.examples import Example, Format, Segment, Segments, Setup, Text
from upweight.data.formats.markup import PLACEHOLDER, filled
from upweight.data.raw_row import Row, RowError, checked_list, checked_mappings, checked_text, describe_value
from upweight.data.tokenize.templates import Span

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
CONCISE_INPUT = (
    "Below is an instruction from a USER that describes a task, paired with an input that provides further context. "
    "The ASSISTANT writes a response that concisely and appropriately completes the request.\n\n"
)
CONCISE = (
    "Below is an instruction from a USER that describes a task. "
    "The ASSISTANT writes a response that appropriately and concisely completes the request.\n\n"
)
CONTEXT = "SYSTEM: Use the following contextual information to concisely answer the question.\n\nUSER: {article}\n===\n"
NOT_IN_CONTEXT = (
    "The context provided does not contain any information about your inquiry. "
    "Therefore, I'm unable to answer your question based on the given context."
)
CHOOSE = "Choose the answer that best answers the question. "
CREATIVE = (
    "Answer the following question in a comprehensive, in-depth, and creative way. "
    "Additionally your response should be relevant, accurate, and free of any ambiguity.\n"
)
START_OF_CHAT = "\n<START>"  # at the end of Pygmalion's personas


@dataclass(frozen=True)
class Style:
    """Texts with `{column}` placeholders; of several, the first whose columns all have text is written."""

    prompts: tuple[str, ...]
    answers: tuple[str, ...] = ("{output}",)
    ends: int = 1  # end tokens after the answer

    def prompt(self, row: Row) -> str:
        return _written(row, self.prompts)

    def __call__(self, setup: Setup, row: Row) -> list[Example]:
        prompt, answer = self.prompt(row), _written(row, self.answers)
        return [Segments((Segment(prompt, setup.data.train_on_inputs), Segment(answer, True, self.ends)))]


def _written(row: Row, forms: Sequence[str]) -> str:
    missing = ""
    for form in forms:
        values = {name: _value(row, name) for name in PLACEHOLDER.findall(form)}
        if all(values.values()):
            return filled(form, values)
        missing = next(name for name, text in values.items() if not text)
    raise RowError(missing, f"text, got {describe_value(row.value(missing))}")


def _value(row: Row, name: str) -> str:
    if name != "choices" or not row.has(name):
        return row.optional_text(name)
    choices = checked_list(row.value(name), name, "texts")
    return "\n".join(f'- "{checked_text(choice, f"{name}[{number}]")}"' for number, choice in enumerate(choices))


def _instruct(with_input: str, without: str) -> tuple[str, ...]:
    end = "### Response:\n"
    return (
        f"{with_input}### Instruction:\n{{instruction}}\n\n### Input:\n{{input}}\n\n{end}",
        f"{without}### Instruction:\n{{instruction}}\n\n{end}",
    )


def _chat(with_input: str, without: str) -> tuple[str, ...]:
    return f"{with_input}USER: {{instruction}}\n{{input}}\nASSISTANT:", f"{without}USER: {{instruction}}\nASSISTANT:"


def _chatml(system: str, user: str) -> str:
    turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
    return f"{turns}<|im_start|>assistant\n"


INSTRUCT = _instruct(f"{WITH_INPUT}\n\n", f"{WITHOUT_INPUT}\n\n")
ALPACA = {
    "": INSTRUCT,
    ":instruct": INSTRUCT,
    ":chat": _chat(f"SYSTEM: {WITH_INPUT}\n", f"SYSTEM: {WITHOUT_INPUT}\n"),
    ":chatml": (_chatml(WITH_INPUT, "{instruction}\n{input}"), _chatml(WITHOUT_INPUT, "{instruction}")),
    ":phi": (
        f"<|system|>\n{WITH_INPUT}<|end|>\n<|user|>\n{{instruction}}<|end|>{{input}}<|assistant|>",
        f"<|system|>\n{WITHOUT_INPUT}<|end|>\n<|user|>\n{{instruction}}<|end|>\n<|assistant|>\n",
    ),
}
# With and without a system text, and of both with and without an input.
SYSTEM_CHAT = (*_chat("SYSTEM: {system}\n", "SYSTEM: {system}\n"), *_chat("", ""))
SYSTEM_INSTRUCT = (*_instruct("{system}\n\n", "{system}\n\n"), *_instruct("", ""))
CHOICES = "USER: {question}\n{choices}\nASSISTANT:"
QUESTION = f"SYSTEM: {CONCISE}\nUSER: {{question}}\nASSISTANT:"
THOUGHTS = "### Thought:\n{output}\n\n### Agent Reflection:\n{reflection}\n\n### Final Response:\n{corrected}"


def _with_columns(forms: Sequence[str], **names: str) -> tuple[str, ...]:
    placeholders = {name: f"{{{names.get(name, name)}}}" for name in ("instruction", "input")}
    return tuple(filled(form, placeholders) for form in forms)


def _answered(prompt: str, *answers: str) -> Style:
    return Style((prompt,), answers or ("{answer}",))


STYLES: dict[str, Style] = {
    **{f"alpaca{name}": Style(forms) for name, forms in ALPACA.items() if name},
    **{f"gpteacher{name}": Style(forms, ("{response}",)) for name, forms in ALPACA.items()},
    **{
        f"oasst{name}": Style(_with_columns(forms[1:], instruction="INSTRUCTION"), ("{RESPONSE}",))
        for name, forms in ALPACA.items()
    },
    "alpaca_instruct": Style(INSTRUCT),
    "alpaca_instruct.load_no_prompt": Style(_instruct("", "")),
    "alpaca_chat": Style(ALPACA[":chat"]),
    "alpaca_chat.load_concise": Style(_chat(f"SYSTEM: {CONCISE_INPUT}\n", f"SYSTEM: {CONCISE}\n")),
    "alpaca_chat.load_no_prompt": Style(_chat("", "")),
    "alpaca_chat.load_qa": _answered(QUESTION),
    "alpaca_chat.load_camel_ai": _answered(QUESTION.replace("{question}", "{message_1}"), "{message_2}"),
    **{f"alpaca_w_system{name}": Style(SYSTEM_CHAT) for name in ("", ".load_chat")},
    "alpaca_w_system.load_instruct": Style(SYSTEM_INSTRUCT),
    "alpaca_w_system.load_open_orca": Style(
        ("### System:\n{system_prompt}\n### Human:\n{question}\n### Assistant:\n",
         "### Human:\n{question}\n### Assistant:\n"),
        ("{response}",),
    ),
    "alpaca_w_system.load_open_orca_chatml": Style(
        (_chatml("{system_prompt}", "{question}"), _chatml("", "{question}").partition("<|im_end|>\n")[2]),
        ("{response}",),
    ),
    "orcamini": Style(
        ("### System:\n{system_prompt}\n\n### User:\n{question}\n\n### Response:\n",
         "### User:\n{question}\n\n### Response:\n"),
        ("{response}",),
    ),
    "context_qa": _answered(f"{CONTEXT}{{question}}\nASSISTANT:"),
    "context_qa.load_404": _answered(f"{CONTEXT}{{unanswerable_question}}\nASSISTANT:", NOT_IN_CONTEXT),
    "context_qa.load_v2": _answered("Context: {context}\nQuestion: {question}\n", "Answer: {answer}"),
    "explainchoice": Style(
        _with_columns(
            _instruct(f"{CHOOSE}Explain your reasoning.\n\n\n", "")[:1], instruction="question", input="choices"
        ),
        ("{solution}", "{explanation}"),
    ),
    "explainchoice:chat": _answered(
        f"SYSTEM: {CHOOSE}Explain your reasoning.\n\n{CHOICES}", "{solution}", "{explanation}"
    ),
    **{
        f"concisechoice{name}": _answered(
            f"{CHOOSE}Be concise in your response.\n\n{CHOICES}", "{solution}", "{explanation}"
        )
        for name in ("", ":chat")
    },
    **{
        f"summarizetldr{name}": _answered(
            "USER: Summarize the following article as a TL;DR.\n{article}\nASSISTANT:", "{summary}"
        )
        for name in ("", ":chat")
    },
    "jeopardy": Style(
        _with_columns(INSTRUCT[:1], instruction="question", input="category"), ("what is {answer}",)
    ),
    "reflection": Style(_instruct("", ""), (THOUGHTS,)),
    "creative_acr.load_answer": _answered(f"{CREATIVE}USER: {{instruction}}\nASSISTANT:", "{revision}"),
    "metharme": Style(("{prompt}",), ("{generation}",), ends=3),
}  # fmt: skip


def segments(setup: Setup, row: Row) -> list[Example]:
    """Read `segments` of text, joined as they are, without BOS or EOS; those with `label: true` are trained on."""
    parts = []
    items = checked_mappings(row.value("segments"), "segments", "label and text", "segments")
    for number, item in enumerate(items):
        if not isinstance(item.get("label"), bool):
            raise RowError(f"segments[{number}].label", f"true or false, got {describe_value(item.get('label'))}")
        text = checked_text(item.get("text"), f"segments[{number}].text", empty=True)
        parts.append(Segment(text, item["label"]))
    return [Segments(tuple(parts), bos=False)]


def pygmalion(setup: Setup, row: Row) -> list[Example]:
    """Read a persona and turns of `human` and `bot`; the bot's are trained on."""
    openings = {"system": "<|system|>Persona: ", "human": "<|user|> ", "bot": "<|model|>"}
    parts = []
    turns = checked_mappings(row.value("conversations"), "conversations", "role and value", "messages")
    for number, turn in enumerate(turns):
        role, key = turn.get("role"), f"conversations[{number}]"
        if role not in openings:
            raise RowError(f"{key}.role", f"one of system, human, bot, got {role!r}")
        text = checked_text(turn.get("value"), f"{key}.value", empty=True).removesuffix(START_OF_CHAT).strip()
        if role == "bot":
            parts += [Segment(openings[role], False), Segment(f" {text}", True, 1)]
        else:
            parts.append(Segment(openings[role] + text, False))
    return [Segments(tuple(parts))]


def llama2_chat(setup: Setup, row: Row) -> list[Example]:
    """Read a conversation and write it by Llama 2's marks; the answers and their end tokens are trained on."""
    key, tokenizer = setup.entry.field_messages or row.first_of("conversations", "messages"), setup.tokens.tokenizer
    messages = setup.reader.conversation(row, setup.messages(row, key), key).messages
    system = "".join(f"<<SYS>>\n{one['content']}\n<</SYS>>\n\n" for one in messages if one["role"] == "system")
    text, spans = f"[INST] {system}", []
    turns = [message for message in messages if message["role"] != "system"]
    roles = zip(turns, cycle(("user", "assistant")), strict=False)
    if not turns or len(turns) % 2 or any(turn["role"] != role for turn, role in roles):
        raise RowError(key, "turns of the user and the assistant in alternation, the user's first")
    for number in range(0, len(turns), 2):
        question, answer = turns[number]["content"], turns[number + 1]["content"]
        if number:
            text += f"{tokenizer.bos_token or ''}[INST] {question} [/INST]"
        else:
            text += f"{question}[/INST]"
        spans.append(Span(len(text), len(text) + len(f" {answer} {tokenizer.eos_token}")))
        text += f" {answer} {tokenizer.eos_token}"
    return [Text(text, spans)]


FORMATS: dict[str, Format] = {
    **STYLES, "input_output": segments, "pygmalion": pygmalion, "llama2_chat": llama2_chat,
}  # fmt: skip
