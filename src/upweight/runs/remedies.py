"""Remedies of verdicts as a run's owner types them: with the names of its config and of its checkpoints."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upweight.runs.files import CONFIG

_NAMED = "RUN/checkpoint-N"  # in the remedies of rules, inside of what is typed


def as_typed(
    remedy: str, evidence: Mapping[str, Any], folder: Path, record: Mapping[str, Any], whole: Sequence[tuple[int, Path]]
) -> str:
    """Return a remedy with the config of a run, and with the newest checkpoint from before its verdict held.

    `evidence`: the verdict's `step`, and for how many `steps` it had held; `whole`: checkpoints, the newest first.
    """
    is_script = "settings" in record
    since = evidence.get("step", 0) - evidence.get("steps", 0)
    before = next((str(path) for step, path in whole if step <= since), None)

    def typed(words: re.Match[str]) -> str:
        if before is None:
            return "none of before is left"
        return words[0].replace(_NAMED, before if is_script else shlex.quote(before))

    remedy = re.sub(f"`[^`]*{_NAMED}[^`]*`", typed, remedy)
    if is_script or not (folder / CONFIG).is_file():  # a script has no config to name
        return remedy
    config = shlex.quote(str(folder / CONFIG))
    return re.sub(r"\bCONFIG\b", lambda _: config, remedy)
