"""The task: write the letter that the prompt asks for."""


def asked_letter(completions, letter, **columns):
    """Return the share of a completion's six letters that are the one asked for."""
    return [text.count(wanted) / 6 for text, wanted in zip(completions, letter, strict=True)]
