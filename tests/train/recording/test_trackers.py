"""A tracker that does not start is named with its key, and the run ends before its first step."""

import pytest
from transformers import TrainerCallback

from made_runs import write_config
from upweight.config import load_config
from upweight.errors import UserError
from upweight.train.recording.trackers import name_tracker_errors
from upweight.train.run import train


@pytest.mark.parametrize(
    ("tracker", "keys", "named"),
    [
        ("Comet", (), "use_comet"),
        ("Wandb", ("wandb_name", "wandb_project"), "wandb_project"),
        ("Wandb", ("wandb_project", "use_wandb"), "use_wandb"),
    ],
)
def test_a_tracker_that_does_not_start_is_named_with_the_key_that_chose_it(  # noqa: PLR0917
    tracker, keys, named, model_folder, tmp_path, monkeypatch
):
    class CometCallback(TrainerCallback):
        """As that of transformers: it starts with the run."""

        def setup(self, args, state, model):
            raise ValueError("Comet.ml requires an API key.\nSee its pages")

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.setup(args, state, model)

    CometCallback.__name__ = f"{tracker}Callback"
    CometCallback.__module__ = "transformers.integrations.integration_utils"

    def with_tracker(trainer, set_keys=()):
        trainer.add_callback(CometCallback())
        name_tracker_errors(trainer, (*set_keys, *keys))

    monkeypatch.setattr("upweight.train.recording.run_folder.name_tracker_errors", with_tracker)
    config = load_config(write_config(tmp_path, model_folder, max_steps=2))
    with pytest.raises(
        UserError, match=rf"^{named}: the tracker did not start: Comet\.ml requires an API key\. Log in"
    ):
        train(config)
