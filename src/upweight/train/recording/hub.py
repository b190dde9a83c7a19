"""What a trainer gives to the hub: the model card, and the model, which a hub that does not answer cannot lose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer

from upweight.files import write_text
from upweight.heartbeat import activity
from upweight.models.hub import hub_errors
from upweight.train.recording.model_card import card_arguments


class HubTrainer(Trainer):
    """The Trainer, with a model card of ours and errors of the hub in one line."""

    card: Callable[[], str] | None = None  # returns the text of the model card

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository on the hub."""
        with hub_errors("there is no repository to push to"):
            super().init_hf_repo(token)

    def push_to_hub(
        self, commit_message: str | None = "End of training", blocking: bool = True, token: str | None = None,
        revision: str | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Push the model, which is saved before the hub is asked for anything."""
        folder = self.args.output_dir or "."
        name = self.args.hub_model_id or Path(folder).absolute().name
        if not self.args.push_to_hub:  # else every rank has saved it, and the repository was made before training
            self.save_model(_internal_call=True)
        with activity(f"pushing to the hub as {name}"), hub_errors(f"{folder} was not pushed", (name, folder)):
            if self.hub_model_id is None:
                super().init_hf_repo(token)
            return super().push_to_hub(commit_message, blocking, token, revision, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write README.md to the run folder: the card of the run, else that of the Trainer, which takes TRL's names."""
        if self.card is None:
            kwargs = card_arguments(kwargs, getattr(self.model, "model_tags", None), tagged=len(args) > 2)
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero():
            write_text(Path(self.args.output_dir or ".") / "README.md", self.card())
