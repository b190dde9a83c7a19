"""A row of every format, as the documentation shows it; a test reads each of them by its format."""

from dataclasses import dataclass
from typing import Any

ASK, SAY, WORSE = "What is 2 + 3?", "2 + 3 is 5.", "It is 6."
USER = {"role": "user", "content": ASK}
GOOD = {"role": "assistant", "content": SAY}
BAD = {"role": "assistant", "content": WORSE}


@dataclass(frozen=True)
class Shown:
    """A row that several formats read; `{family}` in a name stands for chatml and llama3."""

    types: tuple[str, ...]
    row: dict[str, Any]

    def names(self) -> list[str]:
        """The formats, one by one."""
        families = ("chatml", "llama3")
        return [
            name.replace("{family}", family)
            for name in self.types
            for family in (families if "{family}" in name else families[:1])
        ]


_ANSWERS: dict[str, Any] = {"chosen": SAY, "rejected": WORSE}
_TALKS: dict[str, Any] = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}

PAIRS = (
    Shown(("{family}", "{family}.default", "{family}.prompt_pairs"), {"prompt": ASK, **_ANSWERS}),
    Shown(("{family}.intel",), {"system": "Be brief.", "question": ASK, **_ANSWERS}),
    Shown(("{family}.argilla",), {"instruction": ASK, "chosen_response": SAY, "rejected_response": WORSE}),
    Shown(("{family}.icr", "bradley_terry.{family}.icr"), {"input": ASK, **_ANSWERS}),
    Shown(("{family}.ultra",), {"prompt": ASK, **_TALKS}),
    Shown(("{family}.argilla_chat", "chat_template.argilla_chat"), _TALKS),
    Shown(("chat_template.argilla", "orpo.chat_template"), {"prompt": ASK, "system": "Be brief.", **_TALKS}),
    Shown(("chat_template", "chat_template.default"), {"messages": [USER], "chosen": GOOD, "rejected": BAD}),
    Shown(("bradley_terry.chat_template",), {"system": "Be brief.", "input": ASK, **_ANSWERS}),
    Shown(("zephyr.nectar",), {"prompt": ASK, "answers": [{"answer": SAY, "rank": 1}, {"answer": WORSE, "rank": 2}]}),
    Shown(("user_defined", "user_defined.default"), {"prompt": ASK, **_ANSWERS}),
    Shown(("passthrough",), {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}),
)
LABELLED = (
    Shown(("{family}.argilla",), {"instruction": ASK, "completion": SAY, "label": True}),
    Shown(("{family}.argilla_chat",), {"completion": [USER, GOOD], "label": True}),
    Shown(("{family}.intel",), {"system": "Be brief.", "question": ASK, "completion": SAY, "label": True}),
    Shown(("{family}.prompt_pairs", "{family}.ultra"), {"prompt": ASK, "completion": SAY, "label": True}),
    Shown(("chat_template", "chat_template.default"), {"messages": [USER], "completion": GOOD, "label": True}),
    Shown(("user_defined", "user_defined.default"), {"prompt": ASK, "completion": SAY, "label": True}),
    Shown(("passthrough",), {"prompt": [USER], "completion": [GOOD], "label": True}),
)
STEPS = (
    Shown(
        ("stepwise_supervised", "stepwise_supervised.default"),
        {"prompt": "What is 2 + 3 + 4?", "completions": ["2 + 3 = 5", "5 + 4 = 10"], "labels": [True, False]},
    ),
)
TEXT = (
    Shown(("chat_template", "chat_template.default"), {"messages": [USER, GOOD]}),
    Shown(("sharegpt",), {"conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": SAY}]}),
    Shown(("alpaca", "user_defined"), {"instruction": ASK, "input": "", "output": SAY}),
    Shown(("completion",), {"text": "Any text, all of which is trained on."}),
    Shown(("passthrough",), {"prompt": ASK, "completion": SAY}),
)
PROMPTS = (
    Shown(("passthrough",), {"prompt": [USER], "answer": "5"}),
    Shown(("chat_template", "chat_template.default"), {"messages": [USER], "answer": "5"}),
    Shown(("user_defined", "user_defined.default"), {"prompt": ASK, "answer": "5"}),
    Shown(("nemo_gym",), {"responses_create_params": {"input": [USER]}, "answer": "5"}),
)
EBFT = (
    Shown(("ebft_opencode.transform", "ebft_strided_structured.transform"), {"input": ASK, "output": SAY}),
    Shown(
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
    Shown(("completion",), {"text": "A document, in strided mode."}),
    Shown(("passthrough",), {"prompt": [USER], "ground_truth": SAY}),
)

SHOWN: dict[str, tuple[Shown, ...]] = {
    "pairs": PAIRS,
    "labelled": LABELLED,
    "steps": STEPS,
    "text": TEXT,
    "prompts": PROMPTS,
    "ebft": EBFT,
}
