"""`upweight merge-lora`: an adapter folded into its base model."""

from pathlib import Path

from upweight.cli.trained import trained
from upweight.errors import UserError
from upweight.log import quiet_transformers
from upweight.models.merge import Adapted, difference, merge_adapter


def run(place: str, overrides: list[str], *, output: Path | None, check: bool) -> None:
    """Merge, compare log-probs before and after, and print where the model lies and how far they differ."""
    quiet_transformers()
    found = trained(place, overrides)
    if found.adapter is None and not Path(found.model.base_model or "").expanduser().exists():
        raise UserError(f"{place}: there is neither a config nor a folder of that name, which would hold an adapter")
    if found.adapter is None:
        raise UserError(f"{place}: there is no adapter to merge in {found.model.base_model}; it is a whole model")
    adapted = Adapted(found.model, found.adapter)
    target = output or found.adapter / "merged"
    merge_adapter(adapted, target)
    print(target)
    if check:
        what = "log-prob" if adapted.head() == "tokens" else "score"
        kind = str(adapted.dtype()).removeprefix("torch.")
        print(f"largest difference of a {what} before and after, in {kind}: {difference(adapted, target):.2g}")
