"""An example row of every format for the documentation; a test reads each of them by its format."""

from dataclasses import dataclass
from typing import Any

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
        families = ("chatml", "llama3")
        return [
            name.replace("{family}", family)
            for name in self.types
            for family in (families if "{family}" in name else families[:1])
        ]


_ANSWERS: dict[str, Any] = {"chosen": ANSWER, "rejected": WRONG_ANSWER}
_CONVERSATIONS: dict[str, Any] = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}

PAIRS = (
    FormatExample(("{family}", "{family}.default", "{family}.prompt_pairs"), {"prompt": QUESTION, **_ANSWERS}),
    FormatExample(("{family}.intel",), {"system": "Be brief.", "question": QUESTION, **_ANSWERS}),
    FormatExample(
        ("{family}.argilla",), {"instruction": QUESTION, "chosen_response": ANSWER, "rejected_response": WRONG_ANSWER}
    ),
    FormatExample(("{family}.icr", "bradley_terry.{family}.icr"), {"input": QUESTION, **_ANSWERS}),
    FormatExample(("{family}.ultra",), {"prompt": QUESTION, **_CONVERSATIONS}),
    FormatExample(("{family}.argilla_chat", "chat_template.argilla_chat"), _CONVERSATIONS),
    FormatExample(
        ("chat_template.argilla", "orpo.chat_template"), {"prompt": QUESTION, "system": "Be brief.", **_CONVERSATIONS}
    ),
    FormatExample(("chat_template", "chat_template.default"), {"messages": [USER], "chosen": GOOD, "rejected": BAD}),
    FormatExample(("bradley_terry.chat_template",), {"system": "Be brief.", "input": QUESTION, **_ANSWERS}),
    FormatExample(
        ("zephyr.nectar",),
        {"prompt": QUESTION, "answers": [{"answer": ANSWER, "rank": 1}, {"answer": WRONG_ANSWER, "rank": 2}]},
    ),
    FormatExample(("user_defined", "user_defined.default"), {"prompt": QUESTION, **_ANSWERS}),
    FormatExample(("passthrough",), {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}),
)
LABELLED = (
    FormatExample(("{family}.argilla",), {"instruction": QUESTION, "completion": ANSWER, "label": True}),
    FormatExample(("{family}.argilla_chat",), {"completion": [USER, GOOD], "label": True}),
    FormatExample(
        ("{family}.intel",), {"system": "Be brief.", "question": QUESTION, "completion": ANSWER, "label": True}
    ),
    FormatExample(
        ("{family}.prompt_pairs", "{family}.ultra"), {"prompt": QUESTION, "completion": ANSWER, "label": True}
    ),
    FormatExample(("chat_template", "chat_template.default"), {"messages": [USER], "completion": GOOD, "label": True}),
    FormatExample(("user_defined", "user_defined.default"), {"prompt": QUESTION, "completion": ANSWER, "label": True}),
    FormatExample(("passthrough",), {"prompt": [USER], "completion": [GOOD], "label": True}),
)
STEPS = (
    FormatExample(
        ("stepwise_supervised", "stepwise_supervised.default"),
        {"prompt": "What is 2 + 3 + 4?", "completions": ["2 + 3 = 5", "5 + 4 = 10"], "labels": [True, False]},
    ),
)
TEXT = (
    FormatExample(("chat_template", "chat_template.default"), {"messages": [USER, GOOD]}),
    FormatExample(
        ("sharegpt",), {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]}
    ),
    FormatExample(("alpaca", "user_defined"), {"instruction": QUESTION, "input": "", "output": ANSWER}),
    FormatExample(("completion",), {"text": "Any text, all of which is trained on."}),
    FormatExample(("passthrough",), {"prompt": QUESTION, "completion": ANSWER}),
)
PROMPTS = (
    FormatExample(("passthrough",), {"prompt": [USER], "answer": "5"}),
    FormatExample(("chat_template", "chat_template.default"), {"messages": [USER], "answer": "5"}),
    FormatExample(("user_defined", "user_defined.default"), {"prompt": QUESTION, "answer": "5"}),
    FormatExample(("nemo_gym",), {"responses_create_params": {"input": [USER]}, "answer": "5"}),
)
EBFT = (
    FormatExample(
        ("ebft_opencode.transform", "ebft_strided_structured.transform"), {"input": QUESTION, "output": ANSWER}
    ),
    FormatExample(
        (
            "chat_template",
            "ebft_chat_multiturn.transform",
            "ebft_chat_multiturn.transform_last_turn",
            "ebft_chat_multiturn.transform_all_turns",
            "ebft_reasoning.transform",
            "ebft_reasoning.transform_split_thinking",
            "ebft_reasoning.transform_answer_only",
            "ebft_reasoning.transform_strided",
            "ebft_strided_chat.transform",
        ),
        {"messages": [USER, GOOD]},
    ),
    FormatExample(("completion",), {"text": "A document, in strided mode."}),
    FormatExample(("passthrough",), {"prompt": [USER], "ground_truth": ANSWER}),
)

SHOWN: dict[str, tuple[FormatExample, ...]] = {
    "pairs": PAIRS,
    "labelled": LABELLED,
    "steps": STEPS,
    "text": TEXT,
    "prompts": PROMPTS,
    "ebft": EBFT,
}
