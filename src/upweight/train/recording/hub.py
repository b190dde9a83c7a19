"""What a trainer gives to the hub: the model card, and the model, which a hub that does not answer cannot lose."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer

from upweight.files import write_text
from upweight.heartbeat import activity
from upweight.models.hub import hub_errors
from upweight.train.recording.model_card import card_arguments


@contextmanager
def pushing(trainer: Trainer) -> Iterator[None]:
    """Save the model, and raise what the hub answers inside as one error that names the folder to push later."""
    folder = trainer.args.output_dir or "."
    name = trainer.args.hub_model_id or Path(folder).absolute().name
    if not trainer.args.push_to_hub:  # else every rank has saved it, and the repository was made before training
        trainer.save_model(_internal_call=True)
    with activity(f"pushing to the hub as {name}"), hub_errors(f"{folder} was not pushed", (name, folder)):
        yield


def write_card(trainer: Any, stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Write README.md to the run folder: the card of the run, else that of the Trainer, which takes TRL's names."""
    if trainer.card is None:
        stock(*args, **card_arguments(kwargs, getattr(trainer.model, "model_tags", None), tagged=len(args) > 2))
    elif trainer.is_world_process_zero():
        write_text(Path(trainer.args.output_dir or ".") / "README.md", trainer.card())
