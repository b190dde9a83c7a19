"""`upweight init`: a folder to start from: a commented config, sample rows, rewards, and what to do with them."""

import inspect
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from upweight.cli.starter import rewards
from upweight.cli.starter.pictures import FOLDER as PICTURES
from upweight.cli.starter.pictures import name_of, picture, picture_rows
from upweight.cli.starter.tiny import with_tiny_models, write_tiny_model
from upweight.config.peers import method_advice
from upweight.environments.nemo_gym.agent_config import agent_config
from upweight.errors import UserError, did_you_mean
from upweight.files import packaged_yaml

GYM_SERVER = "example_session_state_mgmt"  # comes with the Gym
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = Path(__file__).parent
TEXTS = packaged_yaml(FOLDER / "starters.yaml")
PARTS: dict[str, str] = TEXTS["parts"]


@dataclass(frozen=True)
class Starter:
    """A method's part of a starter."""

    about: str  # the first line of its config and README
    rows: str  # the kind of its sample rows, and the name of their file
    keys: str  # YAML of the method
    watch: str  # which metrics say that it works
    model: str = MODEL
    rate: str = "1e-4"
    batch: int = 4
    steps: int = 24

    def config(self) -> str:
        """Return the whole config."""
        keys = self.keys.format(gym_server=GYM_SERVER, **PARTS)
        batch_of = "completions" if "num_generations" in keys else "rows"
        return PARTS["top"].format(**vars(self)) + keys + PARTS["bottom"].format(**vars(self), batch_of=batch_of)


STARTERS = {method: Starter(**fields) for method, fields in TEXTS["starters"].items()}


def run(method: str | None, folder: Path | None, *, tiny: bool = False) -> None:
    """Write the starter of a method and say how to go on; or list them."""
    if method is None:
        print("\n".join(f"upweight init {name:<10}{starter.about}" for name, starter in STARTERS.items()))
        return
    folder = write_starter(method, folder or Path(method), tiny=tiny)
    if tiny:
        print("tiny: a model with random weights, for trying the commands without a download; it learns nothing useful")
    train = f"upweight {'doctor' if method == 'gym' else 'train'} config.yaml"  # the Gym has to be installed first
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"next: {train if folder == Path() else f'cd {folder} && {train}'}")


def write_starter(method: str, folder: Path, *, tiny: bool = False) -> Path:
    """Write the files of a starter; one that is there already is never written over."""
    files, models = starter_files(method), list[str]()
    if tiny:
        files["config.yaml"], models = with_tiny_models(method, files["config.yaml"])
    drawn = {name_of(number): picture(number) for number in range(_pictures_of(files))}
    there = [name for name in (*files, *drawn, *models) if (folder / name).exists()]
    if there:
        other = folder.parent / f"{folder.resolve().name}-2"
        again = f"upweight init {method} {shlex.quote(str(other))}{' --tiny' if tiny else ''}"
        raise UserError(f"{folder}: {', '.join(there)} would be written over. Name another folder: `{again}`")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, content in drawn.items():
        (folder / PICTURES).mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for seed, name in enumerate(models):
        write_tiny_model(folder / name, seed)
    return folder


def _pictures_of(files: Mapping[str, str]) -> int:
    """Return how many pictures belong to the rows of a starter: one for each, or none."""
    rows = next(text for name, text in files.items() if name.endswith(".jsonl"))
    return rows.count(f'"{PICTURES}/')


def starter_files(method: str) -> dict[str, str]:
    """Return names and texts of a starter's files."""
    starter = STARTERS.get(method)
    if starter is None and Path(method).is_file():
        raise UserError(f"{method}: is a file; `upweight new {method}` writes a config for your own rows.")
    if starter is None:
        hint = f"{method_advice(method) or did_you_mean(method, STARTERS)} There are: {', '.join(STARTERS)}."
        raise UserError(f"there is no starter '{method}'.{hint}")
    config, data = starter.config(), f"{starter.rows}.jsonl"
    if method.startswith("vlm-"):
        rows = picture_rows(rewarded="reward_funcs" in config)
    else:
        rows = (FOLDER / "rows" / data).read_text(encoding="utf-8")
    files = {"config.yaml": config, data: rows}
    about = {"config.yaml": "the run: model, data, method; every key has a comment", data: "a small sample of rows"}
    commands = {"upweight doctor config.yaml": "checks versions, memory, data and rewards"}
    if "reward_funcs" in config:
        files["rewards.py"], about["rewards.py"] = inspect.getsource(rewards), "what a good answer is: change this"
        commands["upweight rewards config.yaml"] = "shows what the rewards give before training"
    if method == "gym":
        files["gym.yaml"] = agent_config(GYM_SERVER)
        about["gym.yaml"] = "the Gym's servers: tools and verification, a proxy to the policy, an agent"
    commands["upweight train config.yaml"] = "minutes on a CPU" if starter.model == MODEL else "slow without a GPU"
    commands["upweight report out"] = "writes curves, completions and problems to one page"
    if "reward_model: true" in config:
        commands["upweight score out answers.jsonl"] = 'scores rows of {"prompt": ..., "completion": ...}'
    elif f'"{PICTURES}/' in rows:
        about[f"{PICTURES}/"] = "squares to be counted, one picture for each row"
        commands[f'upweight inference out --prompt "How many squares?" --image {name_of(0)}'] = "asks the model"
    else:
        commands["upweight inference out --chat"] = "talks to the trained model"
    readme = PARTS["readme"].format(
        files="\n".join(f"| `{name}` | {what} |" for name, what in about.items()),
        commands="\n".join(f"{command:<33} # {why}" for command, why in commands.items()),
        example=rows.partition("\n")[0],
        **vars(starter),
    )
    return {**files, "README.md": readme}
