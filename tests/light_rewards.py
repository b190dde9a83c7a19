"""Reward functions of tests, in a module that imports nothing, since a worker process imports the module of each."""


def even_tokens(completion_ids, **kwargs):
    """Share of tokens with an even id: rarely the same for two completions."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def each_even_token(completion_ids, **kwargs):
    """One for each token with an even id, where it stands."""
    return [[float(token % 2 == 0) for token in ids] for ids in completion_ids]


def short(completions, **kwargs):
    """Shorter text is better; ties happen."""
    return [-round(len(text) / 8) / 4 for text in completions]


def never_dogs(prompts, completion_ids, **kwargs):
    """No completion of a prompt with dogs is right."""
    return [
        0.0 if "dogs" in prompt else float(sum(ids) % 5 + 1)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def one_prompt_only(prompts, completion_ids, **kwargs):
    """Only prompts with a cat teach anything."""
    return [
        float(sum(ids) % 7) if "cat" in prompt else 0.0 for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def message_length(completions, **kwargs):
    """Characters of all messages of a completion."""
    return [float(sum(len(message["content"]) for message in messages)) for messages in completions]


def letters(completions, **kwargs):
    """Hundreds of characters of all messages of a completion."""
    return [length / 100 for length in message_length(completions)]


def unlike_texts(completions, **kwargs):
    """Different characters of a text that a rollout function wrote; anything else fails."""
    assert all(isinstance(text, str) and text.startswith("so ") for text in completions)
    return [float(len(set(text))) for text in completions]


def equal_rewards(completion_ids, **kwargs):
    """One group of two has no signal."""
    return [1.0 if number < 4 else float(len(set(ids))) for number, ids in enumerate(completion_ids)]


def checksum(completions, **columns):
    """A number of a text or a message that differs between completions."""
    return [float(sum(map(ord, str(one))) % 101) for one in completions]


def checksum_of_images(completions, images=(), **columns):
    """As `checksum`, for messages that follow images of one size, or none."""
    assert len(images) in (0, len(completions))
    assert all(one.size == (48, 32) for several in images for one in several)
    return [sum(map(ord, one[0]["content"])) % 101 / 100 for one in completions]
