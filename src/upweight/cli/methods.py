"""`upweight methods`: the training methods, and what each reads and needs."""

from collections.abc import Iterator
from pathlib import Path

from upweight.config.config import how_to_choose
from upweight.config.peers import FORMAT_NAMES, method_advice
from upweight.config.schema import section_rows, summary_of
from upweight.config.user_method import register_method
from upweight.errors import UserError, did_you_mean
from upweight.methods import METHODS
from upweight.methods.base import Method
from upweight.user_modules import is_path

_HEADS = {
    "tokens": "for each trained token its log-probability",
    "sequence_score": "a score for each sequence",
    "step_score": "a score for each step of an answer",
}
_OUTPUTS = {  # fields of `Outputs`, in words
    "entropy_T": "entropy",
    "log_sum_exp_T": "log-sum-exp of the logits",
    "mean_logit_T": "mean logit",
    "log_collision_T": "log of the sum of squared probabilities",
    "is_top_T": "whether it is the most likely token",
    "features_TF": "features",
    "divergence_T": "divergence from the teacher",
    "forward_kl_T": "forward KL to the teacher",
    "reverse_kl_T": "reverse KL to the teacher",
    "teacher_entropy_T": "the teacher's entropy",
    "teacher_logps_T": "the teacher's log-probability",
    "agrees_T": "whether the teacher's most likely token is the same",
}


def run(name: str | None) -> None:
    """Print all methods, or one with its keys and needs."""
    if name is None:
        width = max(map(len, METHODS))
        for known, method in METHODS.items():
            print(f"{known:<{width}}  {summary_of(method)}")
        print("`upweight methods NAME` prints the keys and needs of one; yours is named as mine.Method.")
        return
    if name not in METHODS and not is_path(name):
        remedy = "A method of yours is named by its path: mine.Method, or mine.py:Method."
        raise UserError(f"there is no method '{name}'.{method_advice(name) or did_you_mean(name, METHODS)} {remedy}")
    print("\n".join(described(METHODS[name] if name in METHODS else register_method(name, Path.cwd()))))


def described(kind: type[Method]) -> Iterator[str]:
    """Yield the lines about a method: how to choose it, its needs, its keys."""
    method = kind()
    yield f"{how_to_choose(kind.name)}: {summary_of(kind)}"
    reader = ", or rows without `type`, which it reads itself" if kind.read_row is not None else ""
    yield f"rows: {kind.formats()} (`type`: {', '.join(FORMAT_NAMES[kind.formats()])}{reader})"
    yield f"data: {'sampled while it trains (online)' if method.online else 'fixed (offline)'}"
    yield f"reference model: {'needed with its defaults' if method.needs_reference else 'not needed with its defaults'}"
    outputs = ", ".join(_OUTPUTS.get(field, field) for field in sorted(method.statistics))
    yield f"computed: {_HEADS[kind.head]}{outputs and ', '}{outputs}"
    yield f"passes over a step: {'two: the loss needs values of the whole step' if method.needs_preparation else 'one'}"
    lora = f", {kind.lora_learning_rate:g} with an adapter" if kind.lora_learning_rate else ""
    yield f"learning rate when left out: {kind.learning_rate:g}{lora}"
    yield "keys:"
    for path, value, default, text in section_rows(kind):
        yield f"  {path.replace('`', '')}: {text} ({value}{f'; {default}'.replace('`', '') if default else ''})"
