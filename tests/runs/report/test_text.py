"""A run as text for a terminal."""

import json
import os
import re
import time

import pytest

from made_reports import as_lines, completion, metrics, write_run
from made_runs import upweight
from upweight.processes import start_ticks
from upweight.runs.files import this_machine
from upweight.runs.report.page import PageReader
from upweight.runs.report.text import is_over, text_page


def text_of(*folders, width=100):
    return text_page(PageReader(folders).read(), width)


def test_a_run_in_one_screen(tmp_path):
    shown = text_of(write_run(tmp_path / "run", steps=40))
    assert "run  GRPO  done" in shown.splitlines()[0]
    assert "step 40" in shown
    (reward,) = [line for line in shown.splitlines() if line.strip().startswith("reward  ")]
    assert "▁" in reward
    assert "█" in reward
    assert "0.4  (from 0.01 at step 1)" in reward
    assert "alarm: kl explosion at step 7" in shown
    assert "Remedy: raise `trl.beta`" in shown
    assert "completions of step 40 (4):" in shown
    assert "question 0\n      reward 2: answer 0" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_prompt_is_printed_once_for_all_its_completions(tmp_path):
    run = write_run(tmp_path / "run")
    same = [completion(10, place, row=0, prompt="the question") for place in range(3)]
    (run / "completions" / "step_00010.jsonl").write_text(as_lines([*same, completion(10, 3, row=1, prompt="other")]))
    _, _, shown = text_of(run).partition("completions of step 10")
    shown, _, _ = shown.partition("held-out")
    assert (shown.count("the question"), shown.count("reward 2: ")) == (1, 3)


def test_what_a_model_wrote_cannot_command_the_terminal(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "completions" / "step_00010.jsonl").write_text(as_lines([completion(10, completion="a\x1b[2Jb\nc")]))
    assert "\x1b" not in text_of(run)
    assert "a [2Jb c" in text_of(run)


def test_a_young_run_is_too_early(tmp_path):
    record = {"state": "running", "max_steps": 40, "started": 1e9}
    rows = [{**metrics(1), "frac_reward_zero_std": 1.0, "grad_norm": 0.1}]
    text = " ".join(text_of(write_run(tmp_path / "run", rows=rows, record=record)).split())
    assert "too early for rules" in text
    assert re.search(r"reward at zero \(\d+\).* and \d+ that only warn", text)


def test_completions_that_did_not_end_are_marked(tmp_path):
    run = write_run(tmp_path / "run")
    rows = [completion(10, place, row=0, prompt="the question", finished=place == 0) for place in range(2)]
    (run / "completions" / "step_00010.jsonl").write_text(as_lines(rows))
    shown = text_of(run)
    assert "reward 2, cut off: " in shown
    assert "reward 2: " in shown


def test_the_time_left_of_a_resumed_run_counts_the_steps_since(tmp_path):
    here = {"pid": os.getpid(), "begun": start_ticks(os.getpid()), "machine": this_machine()}
    record = {**here, "state": "running", "max_steps": 60, "started": time.time() - 100, "resumed_step": 30}
    assert "about 3 min left" in text_of(write_run(tmp_path / "run", steps=40, record=record))
    shown = text_of(write_run(tmp_path / "new", steps=40, record=record | {"resumed_step": 0}))
    assert "about 50 s left" in shown


def test_folders_without_anything(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "empty" in text_of(tmp_path / "empty")
    assert not is_over(PageReader([tmp_path / "missing"]).read())
    assert is_over(PageReader([write_run(tmp_path / "run")]).read())


def test_the_command_prints_once_where_nobody_looks(tmp_path):
    done = upweight("watch", "--text", write_run(tmp_path / "run"), write_run(tmp_path / "other"))
    assert (done.returncode, done.stdout.count("GRPO  done")) == (0, 2)
    assert "\x1b[2J" not in done.stdout
    assert upweight("watch", "--text", tmp_path / "run", "--port", 1).returncode == 2


def test_an_offline_run(tmp_path):
    rows = [{"step": step, "loss": 1 / step} for step in range(1, 6)]
    shown = text_of(write_run(tmp_path / "run", rows=rows, config={"rl": "dpo"}))
    assert "DPO" in shown
    assert "0.2  (from 1 at step 1)" in shown
    broken = [*rows, {"step": 6, "loss": float("nan")}]
    assert "not a number  (from 1 at step 1)" in text_of(write_run(tmp_path / "nan", rows=broken, config={"rl": "dpo"}))


@pytest.mark.parametrize("steps", [1, 5, 200])
def test_any_number_of_steps(steps, tmp_path):
    run = write_run(tmp_path / "run", steps=steps)
    assert json.loads((run / "run.json").read_text())["state"] == "done"
    assert f"step {steps}" in text_of(run)


SYSTEM = "You are a helpful assistant who answers in few words, whatever the question is about. "
QUESTION = "What is the capital of the country that lies north of Spain and west of Germany?"
RENDERED = {
    "chatml": "<|im_start|>system\n{s}<|im_end|>\n<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{s}<|eot_id|>"
              "<|start_header_id|>user<|end_header_id|>\n\n{q}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<bos><start_of_turn>user\n{q}<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[INST] {q} [/INST]",
    "plain": "{q}",
}  # fmt: skip


@pytest.mark.parametrize("template", RENDERED)
def test_the_users_question_is_shown_with_answers_before_and_after(template, tmp_path):
    run = write_run(tmp_path / "run", rows=[{"step": 1, "loss": 1.0}], config={"rl": "dpo"})
    for file in (run / "completions").glob("*"):
        file.unlink()
    prompt = RENDERED[template].format(s=SYSTEM, q=QUESTION)
    for step, answer in ((0, "I do not know."), (12, "Paris.")):
        row = {"step": step, "row": 0, "prompt": prompt, "completion": answer, "tokens": 3, "finished": True}
        (run / "completions" / f"eval_step_{step:05d}.jsonl").write_text(as_lines([row]))
    shown = text_of(run)
    assert "held-out answers, before (step 0) and after (step 12):" in shown
    assert f"\n    {QUESTION}\n      before: I do not know.\n      after: Paris.\n" in shown
    assert "helpful" not in shown


def test_one_answer_after_stands_beside_one_before_where_a_prompt_has_several(tmp_path):
    run = write_run(tmp_path / "run", rows=[{"step": 1, "loss": 1.0}], config={"rl": "dpo"})
    for file in (run / "completions").glob("*"):
        file.unlink()
    for step, answers in ((0, ("No.", "Nothing.")), (12, ("Paris.", "It is Paris."))):
        rows = [{"step": step, "row": 0, "prompt": QUESTION, "completion": one, "finished": True} for one in answers]
        (run / "completions" / f"eval_step_{step:05d}.jsonl").write_text(as_lines(rows))
    shown = text_of(run)
    assert "      before: No.\n      after: Paris.\n" in shown
    assert (shown.count("before:"), shown.count("after:")) == (1, 1)


def test_messages_show_the_users_turn(tmp_path):
    run = write_run(tmp_path / "run")
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    (run / "completions" / "step_00010.jsonl").write_text(as_lines([completion(10, prompt=prompt)]))
    assert QUESTION in " ".join(text_of(run).split())
    assert "helpful" not in text_of(run)


@pytest.mark.parametrize("said", ["a: or b: which is it?", "user: who is that?", "model: which one is it?"])
def test_a_question_that_begins_like_a_role_is_whole(said, tmp_path):
    run = write_run(tmp_path / "run")
    for prompt in ([{"role": "user", "content": said}], f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"):
        (run / "completions" / "step_00010.jsonl").write_text(as_lines([completion(10, prompt=prompt)]))
        assert said in " ".join(text_of(run).split())


def test_a_narrow_window_has_every_number_and_a_low_one_the_top(tmp_path):
    run = write_run(tmp_path / "run", steps=40)
    reward = next(line for line in text_of(run, width=80).splitlines() if line.strip().startswith("reward "))
    assert reward.endswith("(from 0.01 at step 1)")
    low = text_page(PageReader([run]).read(), 80, 8).splitlines()
    assert len(low) == 7  # and a line for the cursor
    assert "step 40" in low[0]
    assert "more lines" in low[-1]
