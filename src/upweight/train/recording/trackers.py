"""Errors of trackers, which transformers starts with the first step, as messages with the key and a remedy."""

from collections.abc import Callable, Iterable
from typing import Any

from upweight.errors import UserError

REMEDY = "Log in or set its key, choose its offline mode, or drop the key."


def name_tracker_errors(trainer: Any, set_keys: Iterable[str] = ()) -> None:
    """Make the trackers of a trainer raise a UserError where they do not start, with the key that chose them."""
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__module__.startswith("transformers.integrations.") and hasattr(callback, "setup"):
            name = type(callback).__name__.removesuffix("Callback").lower()
            callback.setup = _named(callback.setup, key_of_tracker(name, set_keys))


def key_of_tracker(name: str, set_keys: Iterable[str]) -> str:
    """Return the key with which a config chose a tracker, by its name."""
    written = [key for key in set_keys if key == f"use_{name}" or key.startswith(f"{name}_")]
    return min(written, key=_rank, default=f"use_{name}")


def _rank(key: str) -> tuple[bool, bool]:
    """Sort a switch before a project, which turns a tracker on too, and both before other keys."""
    return not key.startswith("use_"), not key.endswith("_project")


def _named(setup: Callable[..., Any], key: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return setup(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:  # foreign code over a network; its errors have no common class
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise UserError(f"{key}: the tracker did not start: {reason}. {REMEDY}") from error

    return run
