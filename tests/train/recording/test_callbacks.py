"""Signals, losses that are no numbers, and the line a person reads."""

import json
import logging
import os
import signal
import sys
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from upweight.errors import UserError
from upweight.log import logger, set_up_logging
from upweight.runs.checkpoints import WHOLE
from upweight.runs.command import training_into
from upweight.train.recording.callbacks import Progress, StopOnNan, StopOnSignal, duration


@pytest.fixture
def said():
    """Lines that the package logs."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def state(step=1, **more):
    return TrainerState(global_step=step, max_steps=10, is_world_process_zero=True, **more)


def test_a_signal_asks_for_a_save_at_the_end_of_the_step(said):
    before = signal.getsignal(signal.SIGTERM)
    stop, control = StopOnSignal(), TrainerControl()
    stop.on_train_begin(None, state(), control)
    stop.on_step_end(None, state(), control)
    assert not control.should_training_stop
    os.kill(os.getpid(), signal.SIGTERM)
    stop.on_step_end(None, state(), control)
    assert control.should_training_stop
    assert control.should_save
    assert stop.caught == signal.SIGTERM
    assert said == ["SIGTERM: saving after this step, then stopping; a second signal ends it at once, without saving"]
    stop.restore()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_between_the_handlers_leaves_none_behind(monkeypatch):
    before, install, stop = signal.getsignal(signal.SIGTERM), signal.signal, StopOnSignal()

    def interrupted(number, handler):
        install(number, handler)
        install(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stop.on_train_begin(None, state(), TrainerControl())
    stop.restore()
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_a_notebook_an_interrupt_ends_the_cell_and_keeps_the_process(monkeypatch, said):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    before, stop = signal.getsignal(signal.SIGINT), StopOnSignal()
    stop.on_train_begin(None, state(), TrainerControl())
    signal.raise_signal(signal.SIGINT)
    assert stop.caught == signal.SIGINT
    assert said[0].startswith("interrupted: saving after this step, then stopping; a second interrupt ends it at once")
    with pytest.raises(KeyboardInterrupt, match=r"^stopped at step 3, which is saved; continue with resume_from_"):
        stop.exit_if_signalled(state(3))
    with pytest.raises(KeyboardInterrupt):  # a second one ends the step, not the process
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_promises_no_checkpoint_that_is_not_there(monkeypatch, tmp_path, caplog):
    stop = StopOnSignal()
    stop.caught = signal.SIGTERM
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "raise_signal", lambda _: None)
    with training_into(tmp_path):
        stop._on_signal(signal.SIGTERM, None)
    assert caplog.messages[0].startswith("ended at once, without saving; start again: there is no whole checkpoint")


def test_a_script_that_is_stopped_says_how_a_script_goes_on(caplog):
    stop = StopOnSignal()
    stop.caught = signal.SIGTERM
    with pytest.raises(SystemExit):
        stop.exit_if_signalled(state(3))
    assert caplog.messages == ["stopped at step 3; continue with resume_from_checkpoint=True"]


def test_an_epoch_that_was_left_is_neither_evaluated_nor_saved_again():
    stop = StopOnSignal()
    for caught, epoch, kept in ((0, 1.5, True), (15, 1.5, False), (15, 2.0, True)):
        stop.caught = caught
        control = TrainerControl(should_evaluate=True, should_save=True)
        stop.on_epoch_end(None, state(epoch=epoch), control)
        assert control.should_evaluate is control.should_save is kept


def on_nan(tmp_path, fp16=False):
    watch = StopOnNan(lambda step: [{"row": step, "ids": [1]}])
    return watch, SimpleNamespace(output_dir=str(tmp_path / "out"), fp16=fp16)


@pytest.mark.parametrize("bad", [{"loss": float("nan")}, {"loss": 1.0, "grad_norm": float("inf")}])
def test_no_number_ends_the_run_and_leaves_the_rows_since_the_last_log(bad, tmp_path):
    watch, args = on_nan(tmp_path)
    watch.on_train_begin(args, state(3), TrainerControl())
    watch.on_log(args, state(5), TrainerControl(), logs={"loss": 1.0, "grad_norm": 2.0})
    with pytest.raises(UserError, match=r"step 7: .* the rows of steps 6 to 7 are in"):
        watch.on_log(args, state(7), TrainerControl(), logs=bad)
    lines = (tmp_path / "out" / "nan_batch.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": s + 1, "row": s, "ids": [1]} for s in (5, 6)]


@pytest.mark.parametrize(
    ("saved", "way"), [(False, "start again: there is no"), (True, "go on from step 4 with --resume")]
)
def test_no_number_is_resumed_only_from_a_checkpoint(saved, way, tmp_path):
    watch, args = on_nan(tmp_path)
    if saved:
        (tmp_path / "out" / "checkpoint-4").mkdir(parents=True)
        (tmp_path / "out" / "checkpoint-4" / WHOLE).write_text("{}")
    with pytest.raises(UserError, match=f"then {way}"):
        watch.on_log(args, state(7), TrainerControl(), logs={"loss": float("nan")})


def test_code_of_the_user_is_named_first(tmp_path):
    _, args = on_nan(tmp_path)
    watch = StopOnNan(lambda step: [], ["mine.Margin"])
    with pytest.raises(UserError, match=r"Look first at 'mine.Margin', code of yours: .* Or lower 'learning_rate'"):
        watch.on_log(args, state(7), TrainerControl(), logs={"loss": float("nan")})


def test_an_overflow_that_float16_skips_is_no_reason_to_stop(tmp_path):
    watch, args = on_nan(tmp_path, fp16=True)
    watch.on_log(args, state(2), TrainerControl(), logs={"loss": 1.0, "grad_norm": float("inf")})
    with pytest.raises(UserError):
        watch.on_log(args, state(3), TrainerControl(), logs={"loss": float("nan")})


@pytest.mark.parametrize("asked", ["should_save", "should_evaluate"])
def test_every_checkpoint_and_evaluation_begins_a_new_log(asked, tmp_path):
    watch, args = on_nan(tmp_path)
    for end in (watch.on_step_end, watch.on_epoch_end):
        control = TrainerControl()
        end(args, state(), control)
        assert not control.should_log
        setattr(control, asked, True)
        end(args, state(), control)
        assert control.should_log


def test_the_line_shows_what_matters(said):
    line = Progress()
    line.on_train_begin(None, state(0), None)
    logs = {"loss": 0.51234, "rewards/margins": 1.0, "rewards/chosen": 2.0, "x": 3.0, "tokens_per_second": 9.0}
    line.on_step_end(None, state(1), None)
    line.on_log(None, state(1), None, logs=logs)
    line.on_step_end(None, state(2), None)
    line.on_log(None, state(2), None, logs=logs)
    line.on_log(None, state(2), None, logs={"eval_loss": 0.25})
    line.on_log(None, state(2), None, logs={"train_runtime": 0.25})
    assert said[0] == "step 1/10  loss 0.5123  margins 1  chosen 2  9 tokens/s"
    assert said[1].startswith("step 2/10  loss 0.5123  margins 1  chosen 2  9 tokens/s  ")
    assert said[2:] == ["evaluation 2/10  loss 0.25"]


def test_a_step_without_tokens_to_train_on_does_not_look_like_a_hang(said):
    line = Progress()
    line.on_train_begin(None, state(0), None)
    logs = {"loss": 0.0, "tokens_per_second": 0.0}
    line.on_log(None, state(1), None, logs=logs)
    line.on_log(None, state(1), None, logs={**logs, "rollout/tokens_per_second": 1350.4})
    assert said[0] == "step 1/10  loss 0  nothing to train on"
    assert said[1] == "step 1/10  loss 0  nothing to train on, sampled 1350 tokens/s"


def test_time_left_is_that_of_the_steps_after_the_first(monkeypatch):
    clock = iter([1000.0, 1010.0, 1030.0])  # the first step took long, and does not count
    monkeypatch.setattr("upweight.train.recording.callbacks.time.perf_counter", lambda: next(clock))
    line = Progress()
    line.on_train_begin(None, state(4), None)  # resumed
    line.on_step_end(None, state(5), None)
    assert line._time_left(5, 10) == []
    assert line._time_left(6, 10) == ["40 s left"]
    assert line._time_left(8, 10) == ["20 s left"]


def test_a_bar_passes_and_lines_stay(capsys):
    set_up_logging()
    line = Progress(bar=True)
    line.on_train_begin(None, state(0), None)
    line.on_step_end(None, state(5), None)
    logger.info("a line")
    line.on_train_end(None, state(5), None)
    shown = capsys.readouterr().err
    assert shown.startswith("[############------------]  5/10")
    assert shown.endswith("\r\x1b[2Ka line\n")


def test_durations_read_well():
    assert [duration(s) for s in (5, 119, 150, 7100, 7300)] == ["5 s", "119 s", "2 min", "118 min", "2.0 h"]
