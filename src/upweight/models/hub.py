"""Whether the hub can be reached, asked once; and the models that this machine has without it."""

import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from itertools import islice
from pathlib import Path

from huggingface_hub import constants, get_session

from upweight.errors import UserError
from upweight.heartbeat import activity
from upweight.log import logger, warn_once

LIMIT_SECONDS = 5.0
DEEPEST, MOST_FOLDERS = 3, 500  # below the working folder, where models are looked for
MOST_NAMED = 5  # models in a message
PASSED_OVER = ("checkpoint-*", "*cache__", "node_modules", "site-packages", "venv")  # and hidden ones but .cache
MAKE_TINY, TINY = "upweight init sft tiny-model --tiny", "tiny-model/tiny"  # the model of a starter is for any method
DEMO_MODELS = Path(".cache") / "demo"  # where `make demo` puts the model that it fetches
_unanswered: list[str] = []  # why the hub did not answer, once it was asked


def is_offline(*, is_told: bool = True) -> bool:
    """Return whether nothing is to be asked of the hub: it is switched off, or did not answer, which a line tells."""
    if constants.HF_HUB_OFFLINE:
        return True
    problem = _problem()
    if problem is not None and is_told:
        logger.warning(
            "warning: the hub (%s) cannot be reached (%s): only what is on this machine is used. "
            "HF_HUB_OFFLINE=1 skips this question.",
            constants.ENDPOINT,
            problem,
        )
    return problem is not None


def why_offline() -> str:
    """Return why nothing is asked of the hub."""
    return f"{constants.ENDPOINT} cannot be reached: {_unanswered[0]}" if _unanswered else "HF_HUB_OFFLINE is set"


@cache
def _problem() -> str | None:
    """Ask the hub once; where no answer comes, switch it off for this process and those that it starts."""
    _unanswered.clear()
    # The library looks up names without a limit, so the whole question has one.
    asking = threading.Thread(target=_ask, args=(_unanswered,), daemon=True, name="hub")
    with activity("asking the hub (hub_timeout)"):
        asking.start()
        asking.join(LIMIT_SECONDS + 1)
    if asking.is_alive():
        _unanswered.append(f"no answer in {LIMIT_SECONDS:g} s")
    if not _unanswered:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if (config := sys.modules.get("datasets.config")) is not None:  # it read the variable when it was imported
        vars(config)["HF_HUB_OFFLINE"] = True
    return _unanswered[0]


def _ask(problems: list[str]) -> None:
    """Send one small request; whatever is answered, the hub is there."""
    try:
        get_session().head(constants.ENDPOINT, timeout=LIMIT_SECONDS)
    except Exception as error:  # of the network, of a proxy, of certificates: none of them is an answer
        problems.append(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)


def local_copy(model: str) -> Path | None:
    """Return the GGUF file that `make demo` fetched for a model, where the library's cache does not have the model."""
    if (Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "snapshots").is_dir():
        return None
    file = next((file for file in _demo_files() if file.parent.name == model.rpartition("/")[2]), None)
    if file is not None:
        warn_once(f"{model}: {file} is used, which `make demo` fetched; its weights are rounded to fewer bits")
    return file


def models_here() -> list[str]:
    """Return how `base_model` can name the models that this machine has, as far as a short look finds them."""
    stored = sorted(Path(constants.HF_HUB_CACHE).glob("models--*/snapshots"))
    names = [folder.parent.name.removeprefix("models--").replace("--", "/") for folder in stored]
    return list(dict.fromkeys([*names, *map(str, _model_folders()), *map(str, _demo_files())]))


def models_like(source: str) -> list[str]:
    """Return the models that are here, one that is called like another first."""
    return sorted(models_here(), key=lambda one: Path(one).name != Path(source).name)


def models_to_name(key: str, source: str) -> str:
    """Return which models can be named in place of a missing one, or how to get one."""
    if here := models_like(source):
        more = f" and {len(here) - MOST_NAMED} more" if len(here) > MOST_NAMED else ""
        return f"Name one of those here with {key}: {'; '.join(here[:MOST_NAMED])}{more}"
    return (
        f"No other model is here either, in the hub's cache or up to {DEEPEST} folders below {Path.cwd()}: get one "
        "where there is a network (`hf download ORGANISATION/MODEL --local-dir "
        f"FOLDER`), bring the folder, and name it with {key}. To try any method without a network: `{MAKE_TINY}` "
        f"makes a tiny model that learns nothing useful; name it with {key}: {TINY}"
    )


def _model_folders() -> Iterator[Path]:
    """Yield the folders of models below the working folder, the nearest first."""
    level, looked_into = [Path()], 0
    for _ in range(DEEPEST):
        names = (Path(folder, name) for folder in level for name in _folders_in(folder))
        level = list(islice(names, MOST_FOLDERS - looked_into))
        looked_into += len(level)
        yield from (one for one in level if (one / "config.json").is_file() and any(one.glob("model*.safetensors")))


def _folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder that may hold models."""
    try:
        names = sorted(one.name for one in folder.iterdir() if one.is_dir())
    except OSError:  # which may not be read
        return []
    visible = (name for name in names if not name.startswith(".") or name == ".cache")
    return [name for name in visible if not any(fnmatch(name, pattern) for pattern in PASSED_OVER)]


def _demo_files() -> Iterator[Path]:
    """Yield the models of `make demo`, run in this folder or one above, or in the checkout that is installed."""
    here = Path.cwd()
    roots = dict.fromkeys([here, *here.parents, Path(__file__).parents[3]])
    for root in roots:
        yield from sorted((root / DEMO_MODELS).glob("*/*.gguf"))


def is_of_network(error: BaseException | None) -> bool:
    """Whether no answer came: the name of the host is unknown, the connection was refused or broke, or time ran out."""
    while error is not None:
        if isinstance(error, socket.gaierror | ConnectionError | TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def hub_errors(problem: str, saved: tuple[str, str] | None = None) -> Iterator[None]:
    """Raise errors of the hub as a `UserError` that names the key; `saved`: the repository and the folder to push."""
    try:
        yield
    except Exception as error:  # errors of the hub and of its HTTP library have no common class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        remedy = "Log in with `hf auth login`, correct the name, or drop it."
        unreached = is_of_network(error)
        if unreached:
            reason = f"the hub ({constants.ENDPOINT}) cannot be reached ({reason})"
            remedy = "Push the folder later; training without the key (in a script: push_to_hub) needs no hub."
        if constants.HF_HUB_OFFLINE:
            reason, remedy = "the hub is not asked, as HF_HUB_OFFLINE is set", "Unset it, or push later."
        if saved is not None:
            first = remedy.partition(",")[0]
            how = f"{first}, then push it" if constants.HF_HUB_OFFLINE or not unreached else "Push it later"
            remedy = f"The model is saved in {saved[1]}. {how}: `{shlex.join(['hf', 'upload', *saved])}`."
        failure = UserError(f"hub_model_id: {problem}: {reason}. {remedy}")
        says_all = unreached or isinstance(error, OSError)  # traces of requests, of hundreds of lines, add nothing
        raise failure from None if says_all else error
