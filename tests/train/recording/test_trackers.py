"""Trackers are asked for by name and hear of their settings by environment variables."""

import os

from upweight.config.sections.run import TrackingSection
from upweight.train.recording.trackers import VARIABLES, enabled_trackers, set_variables, tracking_arguments


def test_none_is_the_default_and_a_project_turns_wandb_on():
    assert enabled_trackers(TrackingSection()) == []
    assert enabled_trackers(TrackingSection(wandb_project="p")) == ["wandb"]
    assert enabled_trackers(TrackingSection(wandb_project="p", wandb=False)) == []
    assert enabled_trackers(TrackingSection(mlflow=True, trackio=True)) == ["mlflow", "trackio"]


def test_settings_become_the_variables_that_trackers_read(monkeypatch):
    for variable in (*VARIABLES, "HF_MLFLOW_LOG_ARTIFACTS"):
        monkeypatch.setenv(variable, "before")
    set_variables(TrackingSection(wandb_project="p", wandb_mode="offline", mlflow_uri="file:x", mlflow_artifacts=True))
    found = {name: os.environ[name] for name in ("WANDB_PROJECT", "WANDB_MODE", "MLFLOW_TRACKING_URI", "WANDB_ENTITY")}
    assert found == {"WANDB_PROJECT": "p", "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "file:x",
                     "WANDB_ENTITY": "before"}  # fmt: skip
    assert os.environ["HF_MLFLOW_LOG_ARTIFACTS"] == "1"


def test_names_reach_the_tracker_that_is_on():
    section = TrackingSection(trackio=True, trackio_run="r", trackio_project="p", trackio_space="me/s", wandb_name="w")
    assert tracking_arguments(section) == {
        "report_to": ["trackio"], "run_name": "r", "project": "p", "trackio_space_id": "me/s",
    }  # fmt: skip
    assert tracking_arguments(TrackingSection()) == {"report_to": "none", "run_name": None}
