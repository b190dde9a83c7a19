"""`upweight init`: a folder to start from: a commented config, sample rows, rewards, and what to do with them."""

import inspect
import json
from pathlib import Path

from upweight.cli.starter import rewards
from upweight.cli.starter.configs import GYM_SERVER, MODEL, STARTERS, Starter
from upweight.cli.starter.rows import ROWS
from upweight.environments.nemo_gym.agent_config import agent_config
from upweight.errors import UserError, did_you_mean

README = """\
# {about}

| file | what it is |
|---|---|
{files}

```bash
{commands}
```

What to look at: {watch}. `upweight doctor out` names what goes wrong, with a remedy.

## Your own data

Put rows of this form into `{rows}.jsonl`, one JSON object on each line, or name another file (or a dataset on the
hub) in `config.yaml`:

```json
{example}
```

`upweight preprocess config.yaml --show 2` shows what the model will see. The sample is for trying things out: what it
teaches is small talk. Another model: `base_model` in `config.yaml`, or `base_model=...` behind any command.
"""


def run(method: str | None, folder: Path | None) -> None:
    """Write the starter of a method and say how to go on; or list them."""
    if method is None:
        print("\n".join(f"upweight init {name:<8}{starter.about}" for name, starter in STARTERS.items()))
        return
    folder = write_starter(method, folder or Path(method))
    train = "upweight train config.yaml"
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"next: {train if folder == Path() else f'cd {folder} && {train}'}")


def write_starter(method: str, folder: Path) -> Path:
    """The files of a starter; one that is there already is never written over."""
    files = starter_files(method)
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise UserError(f"{folder}: {', '.join(there)} would be written over. Name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def starter_files(method: str) -> dict[str, str]:
    """Names and texts of a starter's files."""
    starter = STARTERS.get(method)
    if starter is None:
        raise UserError(
            f"there is no starter '{method}'.{did_you_mean(method, STARTERS)} There are: {', '.join(STARTERS)}."
        )
    rows = list(ROWS[starter.rows]())
    files = {
        "config.yaml": starter.config(),
        f"{starter.rows}.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        **({"rewards.py": inspect.getsource(rewards)} if starter.online else {}),
        **({"gym.yaml": agent_config(GYM_SERVER)} if method == "gym" else {}),
    }
    return {**files, "README.md": _readme(starter, files, json.dumps(rows[0], ensure_ascii=False))}


def _readme(starter: Starter, files: dict[str, str], example: str) -> str:
    about = {
        "config.yaml": "the run: model, data, method, each key with a word on it",
        "rewards.py": "what a good answer is: change this",
        "gym.yaml": "the Gym's servers: tools and verification, a proxy to the policy, an agent",
        f"{starter.rows}.jsonl": "a small sample of rows",
    }
    commands = [
        ("upweight doctor config.yaml", "versions, memory, data, rewards: whether it will run"),
        *([("upweight rewards config.yaml", "what the rewards give now, without training")] if starter.online else []),
        ("upweight train config.yaml", "minutes on a CPU" if starter.model == MODEL else "wants a GPU"),
        ("upweight report out", "curves, completions and verdicts as one page"),
        ("upweight score out answers.jsonl", 'scores of {"prompt": ..., "completion": ...} rows')
        if "reward_model: true" in starter.keys
        else ("upweight inference out --chat", "talk to the result"),
    ]
    return README.format(
        about=starter.about,
        files="\n".join(f"| `{name}` | {about[name]} |" for name in files),
        commands="\n".join(f"{command:<34}# {why}" for command, why in commands),
        watch=starter.watch,
        rows=starter.rows,
        example=example,
    )
