"""A transform for the rows of Anthropic's hh-rlhf: two whole conversations that differ in their last answer."""

import re

TURN = re.compile(r"\n\n(Human|Assistant): ")
ROLES = {"Human": "user", "Assistant": "assistant"}


def pairs(cfg, *args, **kwargs):
    """Rows with `chosen` and `rejected` as one text each -> prompt messages and two answers."""

    def transform(row):
        chosen, rejected = messages(row["chosen"]), messages(row["rejected"])
        if not chosen or not rejected or chosen[:-1] != rejected[:-1] or chosen[-1]["role"] != "assistant":
            return None
        if not chosen[-1]["content"] or not rejected[-1]["content"] or chosen[-1] == rejected[-1]:
            return None
        return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}

    return transform


def messages(text):
    """`\\n\\nHuman: ...\\n\\nAssistant: ...` as chat messages."""
    parts = TURN.split(text)[1:]
    return [{"role": ROLES[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]


def prompts(cfg, *args, **kwargs):
    """The same rows as conversations to be answered."""
    to_pair = pairs(cfg)

    def transform(row):
        pair = to_pair(row)
        return pair and {"prompt": pair["prompt"]}

    return transform
