"""Preference pairs as prompts to answer."""


def of_pairs(cfg, *args, **kwargs):
    """A row with `chosen` (a conversation) -> its turns before the answer."""

    def row(example):
        return {"prompt": example["chosen"][:-1]}

    return row
