"""GSM8K as prompts with a format to keep, and rewards for keeping it and for being right."""

import re

SYSTEM = """Solve the problem step by step. Reply in this format:
<reasoning>
your steps
</reasoning>
<answer>
the number
</answer>"""


def transform(cfg, *args, **kwargs):
    """A row of GSM8K -> a prompt and the number after the hashes."""

    def row(example, tokenizer=None):
        prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["question"]}]
        return {"prompt": prompt, "answer": example["answer"].split("####")[-1].strip().replace(",", "")}

    return row, {"remove_columns": ["question"]}


def demonstrations(cfg, *args, **kwargs):
    """A row of GSM8K -> a conversation to imitate: its worked answer, in the format."""

    def row(example, tokenizer=None):
        steps, _, number = example["answer"].partition("####")
        answer = f"<reasoning>\n{steps.strip()}\n</reasoning>\n<answer>\n{number.strip()}\n</answer>"
        asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["question"]}]
        return {"messages": [*asked, {"role": "assistant", "content": answer}]}

    return row, {"remove_columns": ["question", "answer"]}


def tags(completions, **kwargs) -> list[float]:
    """A quarter for each of the four tags that is there exactly once."""
    wanted = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    return [sum(text[-1]["content"].count(tag) == 1 for tag in wanted) / 4 for text in completions]


def layout(completions, **kwargs) -> list[float]:
    """1 where the whole answer has the format."""
    form = re.compile(r"\s*<reasoning>.+</reasoning>\s*<answer>[^<]+</answer>\s*", re.DOTALL)
    return [float(form.fullmatch(text[-1]["content"]) is not None) for text in completions]


def correct(completions, answer, **kwargs) -> list[float]:
    """2 where the tagged answer is the right number."""
    found = [re.search(r"<answer>([^<]*)</answer>", text[-1]["content"]) for text in completions]
    numbers = [match[1].strip().strip("$. ").replace(",", "") if match else None for match in found]
    return [2.0 if number == right else 0.0 for number, right in zip(numbers, answer, strict=True)]
