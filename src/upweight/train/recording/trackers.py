"""Errors of trackers, which transformers starts with the first step, as messages with the key and a remedy."""

from collections.abc import Callable
from typing import Any

from upweight.errors import UserError

REMEDY = "Log in or set its key, choose its offline mode, or drop the key."


def name_tracker_errors(trainer: Any) -> None:
    """Make the trackers of a trainer raise a UserError where they do not start."""
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__module__.startswith("transformers.integrations.") and hasattr(callback, "setup"):
            key = f"use_{type(callback).__name__.removesuffix('Callback').lower()}"
            callback.setup = _named(callback.setup, key)


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
