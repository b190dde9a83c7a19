"""What a config names by path for the loop: users' callbacks, optimizer and learning rate schedule."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from transformers import Trainer, TrainerCallback

from upweight.config import Config
from upweight.errors import UserError
from upweight.train.optimizers.muon import muon_factory
from upweight.user_modules import asked_names, bind_options, is_path, load_function, named_errors, named_method

EVENTS = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))
CLASS_GETS, FUNCTION_GETS = ("params", "lr"), ("model", "lr", "weight_decay")
SCHEDULE_GETS = ("step", "optimizer", "num_training_steps", "num_warmup_steps")


NEVER_CALLED = (  # hooks that scripts for other trainers override and the loop does not call
    "compute_loss", "_compute_loss", "prediction_step", "get_batch_loss_metrics", "concatenated_forward",
    "tokenize_row", "_prepare_dataset", "_generate_and_score_completions",
)  # fmt: skip


def refuse_unused_hooks(kind: type[Trainer]) -> None:
    """Raise where a script's trainer overrides what is never called."""
    for name in NEVER_CALLED:
        if getattr(kind, name, None) is not getattr(Trainer, name, None):
            remedy = "Override `training_step`, which returns a loss after its backward, or use the settings."
            raise UserError(f"{kind.__name__}.{name}: is never called here. {remedy}")


class UserCallback(TrainerCallback):
    """A user's callback: its errors name its path, and its `metrics` are added to each log."""

    where: ClassVar[str]  # key and path

    def metrics(self, state: Any, logs: Mapping[str, float]) -> Any:
        """Return metrics that a log gets besides."""
        return {}

    def checked_metrics(self, state: Any, logs: Mapping[str, float]) -> Mapping[str, float]:
        """Return what `metrics` returns, or say that it is no dict."""
        metrics = self.metrics(state, logs)
        if not isinstance(metrics, Mapping):
            raise UserError(f"{self.where}: metrics returned a {type(metrics).__name__}, not a dict of numbers.")
        return metrics


@dataclass(frozen=True)
class UserCode:
    """The users' parts of a loop; None or empty where a config names none."""

    callbacks: tuple[Callable[[], TrainerCallback], ...] = ()  # each builds one
    optimizer: tuple[Any, dict[str, Any]] | None = None  # a class or factory of transformers, and its arguments
    schedule: Callable[[Optimizer, int, int], LRScheduler] | None = None  # (optimizer, steps, warm-up steps)


NONE = UserCode()


def load_user_code(config: Config) -> UserCode:
    """Load what a config names by path, or raise with every error at once."""
    code: dict[str, Any] = {}
    problems = []
    for name, load in (("callbacks", _callbacks), ("optimizer", _optimizer), ("schedule", _schedule)):
        try:
            code[name] = load(config)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return UserCode(**code)


def _callbacks(config: Config) -> tuple[Callable[[], TrainerCallback], ...]:
    return tuple(_callback(config, number, *entry) for number, entry in enumerate(_entries(config)))


def _entries(config: Config) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield path and options of each entry of `callbacks`."""
    for entry in config.callbacks.callbacks:
        yield (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))


def _callback(config: Config, number: int, path: str, options: Mapping[str, Any]) -> Callable[[], TrainerCallback]:
    key = f"callbacks[{number}]"
    kind: Any = load_function(path, config.folder, key)
    if not (isinstance(kind, type) and issubclass(kind, TrainerCallback)):
        raise UserError(f"{key}: '{path}' is no subclass of transformers.TrainerCallback. Make it one.")
    arguments = bind_options(kind, options, f"{key}.{path}", path)
    events = [event for event in EVENTS if getattr(kind, event) is not getattr(TrainerCallback, event)]
    events += ["metrics"] if hasattr(kind, "metrics") else []
    named = _with_named_errors(kind, events, f"{key}: '{path}'", UserCallback)
    named.where = f"{key}: '{path}'"

    def build() -> TrainerCallback:
        with named_errors(f"{named.where} cannot be built"):
            return named(**arguments)

    return build


def _with_named_errors(kind: Any, methods: Iterable[str], what: str, *bases: type) -> Any:
    """Return a class whose methods say what failed; its name stays, by which checkpoints hold a callback's state."""
    named = {name: named_method(kind, name, what) for name in methods}
    return type(kind.__name__, (kind, *bases), {"__module__": kind.__module__, **named})


def _optimizer(config: Config) -> tuple[Any, dict[str, Any]] | None:
    path, options, optim = config.optim.optimizer, config.optim.optimizer_args or {}, config.optim
    if not is_path(path):
        return muon_factory(optim) if path == "muon" else None
    assert isinstance(options, dict), "a rule refuses text"
    kind: Any = load_function(path, config.folder, "optimizer")
    is_class = isinstance(kind, type)
    if is_class and not issubclass(kind, Optimizer):
        raise UserError(f"optimizer: '{path}' is no subclass of torch.optim.Optimizer. Make it one, or a function.")
    gets = CLASS_GETS if is_class else FUNCTION_GETS
    arguments = bind_options(kind, options, "optim_args", path, gets)
    passed = {"lr": optim.learning_rate or 0.0, "weight_decay": optim.weight_decay}
    arguments |= {name: value for name, value in passed.items() if name in gets and name in asked_names(kind)}
    if is_class:
        return _with_named_errors(kind, ["step"], f"optimizer: '{path}'"), arguments
    return lambda: partial(_built, kind, path), arguments


def _built(function: Callable[..., Any], path: str, model: Any, **arguments: Any) -> Optimizer:
    """Return the optimizer that a function makes for a model."""
    optimizer = function(model=model, **arguments)
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optimizer: '{path}' returned a {type(optimizer).__name__}, not a torch.optim.Optimizer.")
    optimizer.__class__ = _with_named_errors(type(optimizer), ["step"], f"optimizer: '{path}'")
    return optimizer


def _schedule(config: Config) -> Callable[[Optimizer, int, int], LRScheduler] | None:
    path, options = config.optim.scheduler, config.optim.scheduler_args
    if not is_path(path):
        return None
    function = load_function(path, config.folder, "lr_scheduler")
    arguments = bind_options(function, options, "lr_scheduler_kwargs", path, SCHEDULE_GETS)
    asked = asked_names(function)
    if "step" not in asked and "optimizer" not in asked:
        remedy = "Ask for 'step' and return a factor of the rate, or for 'optimizer' and return an LRScheduler"
        raise UserError(f"lr_scheduler: '{path}' asks for neither 'step' nor 'optimizer'. {remedy}.")
    return partial(_made_schedule, partial(function, **arguments), asked, path)


def _made_schedule(
    function: Callable[..., Any], asked: tuple[str, ...], path: str, optimizer: Optimizer, *counts: int
) -> LRScheduler:
    """Return the user's schedule for so many steps, of which so many are for warm-up."""
    known = dict(zip(("optimizer", "num_training_steps", "num_warmup_steps"), (optimizer, *counts), strict=True))
    function = partial(function, **{name: value for name, value in known.items() if name in asked})
    with named_errors(f"lr_scheduler: '{path}' failed"):
        if "step" in asked:
            return LambdaLR(optimizer, partial(_factor, function, path))
        schedule = function()
    if isinstance(schedule, ReduceLROnPlateau) or not isinstance(schedule, LRScheduler):
        wanted = "an LRScheduler that needs no metric"
        raise UserError(f"lr_scheduler: '{path}' returned a {type(schedule).__name__}, not {wanted}.")
    schedule.__class__ = _with_named_errors(type(schedule), ["step"], f"lr_scheduler: '{path}'")
    return schedule


def _factor(function: Callable[..., Any], path: str, step: int) -> float:
    with named_errors(f"lr_scheduler: '{path}' failed at step {step}"):
        factor = function(step=step)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < float("inf"):
        raise UserError(f"lr_scheduler: '{path}' returned {factor!r} at step {step}, not a factor of at least 0.")
    return float(factor)
