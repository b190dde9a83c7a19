"""An example row of every format for the documentation; a test reads each of them by its format."""

import re
from dataclasses import dataclass
from typing import Any

from upweight.config.peers import FORMAT_NAMES

QUESTION, ANSWER, WRONG_ANSWER = "What is 2 + 3?", "2 + 3 is 5.", "It is 6."
USER = {"role": "user", "content": QUESTION}
GOOD = {"role": "assistant", "content": ANSWER}
BAD = {"role": "assistant", "content": WRONG_ANSWER}


@dataclass(frozen=True)
class FormatExample:
    """An example row that several formats read; `{family}` in a name stands for chatml and llama3."""

    types: tuple[str, ...]
    row: dict[str, Any]

    def names(self) -> list[str]:
        """Return the names of the formats, with `{family}` expanded."""
        both = [name.replace("{family}", family) for name in self.types for family in ("chatml", "llama3")]
        return list(dict.fromkeys(both))


_ANSWERS: dict[str, Any] = {"chosen": ANSWER, "rejected": WRONG_ANSWER}
_RESPONSES = {"chosen_response": ANSWER, "rejected_response": WRONG_ANSWER}
_CONVERSATIONS: dict[str, Any] = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
_LABELLED: dict[str, Any] = {"completion": ANSWER, "label": True}
_BRIEF = {"system": "Be brief."}
_TEMPLATE = ("chat_template", "chat_template.default")
_MAPPING = ("user_defined", "user_defined.default")
_RANKED = [{"answer": ANSWER, "rank": 1}, {"answer": WRONG_ANSWER, "rank": 2}]
_SHAREGPT = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]
_STEPS = {"prompt": "What is 2 + 3 + 4?", "completions": ["2 + 3 = 5", "5 + 4 = 10"], "labels": [True, False]}
_EBFT_CHAT = tuple(name for name in FORMAT_NAMES["ebft"] if "chat" in name or "reasoning" in name)
_REFLECTION = {
    "instruction": QUESTION, "input": "", "output": WRONG_ANSWER, "reflection": "That is one too many.",
    "corrected": ANSWER,
}  # fmt: skip
_PYGMALION = [{"role": "system", "value": "A calculator."}, {"role": "human", "value": QUESTION}]
_PYGMALION += [{"role": "bot", "value": ANSWER}]


def _names(*families: str) -> tuple[str, ...]:
    """Return the SFT formats of these families, without those that read other columns."""
    others = ("load_qa", "load_camel_ai", "load_open_orca", "load_open_orca_chatml")
    names = [(re.split("[.:]", name), name) for name in FORMAT_NAMES["text"]]
    return tuple(name for parts, name in names if parts[0] in families and parts[-1] not in others)


_ALPACA = _names("alpaca", "alpaca_instruct", "alpaca_chat")
_ORCA = ("alpaca_w_system.load_open_orca", "alpaca_w_system.load_open_orca_chatml", "orcamini")

SHOWN: dict[str, list[FormatExample]] = {
    kind: [FormatExample(types, row) for types, row in examples]
    for kind, examples in {
        "pairs": [
            (("{family}", "{family}.default", "{family}.prompt_pairs"), {"prompt": QUESTION, **_ANSWERS}),
            (("{family}.intel",), {**_BRIEF, "question": QUESTION, **_ANSWERS}),
            (("{family}.argilla",), {"instruction": QUESTION, **_RESPONSES}),
            (("{family}.icr", "bradley_terry.{family}.icr"), {"input": QUESTION, **_ANSWERS}),
            (("{family}.ultra",), {"prompt": QUESTION, **_CONVERSATIONS}),
            (("{family}.argilla_chat", "chat_template.argilla_chat"), _CONVERSATIONS),
            (("chat_template.argilla", "orpo.chat_template"), {"prompt": QUESTION, **_BRIEF, **_CONVERSATIONS}),
            (_TEMPLATE, {"messages": [USER], "chosen": GOOD, "rejected": BAD}),
            (("bradley_terry.chat_template",), {**_BRIEF, "input": QUESTION, **_ANSWERS}),
            (("zephyr.nectar",), {"prompt": QUESTION, "answers": _RANKED}),
            (_MAPPING, {"prompt": QUESTION, **_ANSWERS}),
            (("passthrough",), {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}),
        ],
        "labelled": [
            (("{family}.argilla",), {"instruction": QUESTION, **_LABELLED}),
            (("{family}.argilla_chat",), {"completion": [USER, GOOD], "label": True}),
            (("{family}.intel",), {**_BRIEF, "question": QUESTION, **_LABELLED}),
            (("{family}.prompt_pairs", "{family}.ultra"), {"prompt": QUESTION, **_LABELLED}),
            (_TEMPLATE, {"messages": [USER], "completion": GOOD, "label": True}),
            (_MAPPING, {"prompt": QUESTION, **_LABELLED}),
            (("passthrough",), {"prompt": [USER], "completion": [GOOD], "label": True}),
        ],
        "steps": [(("stepwise_supervised", "stepwise_supervised.default"), _STEPS)],
        "text": [
            (_TEMPLATE, {"messages": [USER, GOOD]}),
            (("sharegpt",), {"conversations": _SHAREGPT}),
            ((*_ALPACA, "user_defined"), {"instruction": QUESTION, "input": "", "output": ANSWER}),
            (_names("alpaca_w_system"), {**_BRIEF, "instruction": QUESTION, "input": "", "output": ANSWER}),
            (_names("gpteacher"), {"instruction": QUESTION, "input": "", "response": ANSWER}),
            (_names("oasst"), {"INSTRUCTION": QUESTION, "RESPONSE": ANSWER}),
            (("alpaca_chat.load_qa",), {"question": QUESTION, "answer": ANSWER}),
            (("alpaca_chat.load_camel_ai",), {"message_1": QUESTION, "message_2": ANSWER}),
            (_ORCA, {"system_prompt": "Be brief.", "question": QUESTION, "response": ANSWER}),
            (("context_qa",), {"article": "Two and three are five.", "question": QUESTION, "answer": ANSWER}),
            (("context_qa.load_404",), {"article": "It rains.", "unanswerable_question": QUESTION}),
            (("context_qa.load_v2",), {"context": "Two and three are five.", "question": QUESTION, "answer": ANSWER}),
            (_names("explainchoice", "concisechoice"), {"question": QUESTION, "choices": ["5", "6"], "solution": "5"}),
            (_names("summarizetldr"), {"article": "It rains in the north.", "summary": "Rain."}),
            (("jeopardy",), {"question": "It follows 4.", "category": "Numbers", "answer": "5"}),
            (("reflection",), _REFLECTION),
            (("creative_acr.load_answer",), {"instruction": QUESTION, "revision": ANSWER}),
            (("metharme",), {"prompt": f"<|user|>{QUESTION}<|model|>", "generation": ANSWER}),
            (("pygmalion",), {"conversations": _PYGMALION}),
            (("llama2_chat",), {"conversations": _SHAREGPT}),
            (("input_output",), {"segments": [{"label": False, "text": QUESTION}, {"label": True, "text": ANSWER}]}),
            (("completion", "pretrain"), {"text": "Any text, all of which is trained on."}),
            (("passthrough",), {"prompt": QUESTION, "completion": ANSWER}),
        ],
        "prompts": [
            (("passthrough",), {"prompt": [USER], "answer": "5"}),
            (_TEMPLATE, {"messages": [USER], "answer": "5"}),
            (_MAPPING, {"prompt": QUESTION, "answer": "5"}),
            (("nemo_gym",), {"responses_create_params": {"input": [USER]}, "answer": "5"}),
        ],
        "ebft": [
            (("ebft_opencode.transform", "ebft_strided_structured.transform"), {"input": QUESTION, "output": ANSWER}),
            (_EBFT_CHAT, {"messages": [USER, GOOD]}),
            (("completion",), {"text": "A document, in strided mode."}),
            (("passthrough",), {"prompt": [USER], "ground_truth": ANSWER}),
        ],
        "distill": [
            ((*_TEMPLATE, "axolotl.integrations.kd.chat_template"), {"messages": [USER, GOOD]}),
            (("sharegpt",), {"conversations": _SHAREGPT}),
            (("user_defined",), {"instruction": QUESTION, "input": "", "output": ANSWER}),
            (("passthrough",), {"prompt": QUESTION, "completion": ANSWER, "teacher_id": "maths"}),
        ],
    }.items()
}
