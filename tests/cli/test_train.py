"""Training as a person starts it: one process or several, what is printed, how it exits."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from made_runs import largest_difference, metrics_of, on_ranks, upweight, write_config, write_online
from upweight.cli.app import main
from upweight.cli.train import _load_config
from upweight.config import load_config
from upweight.errors import UserError
from upweight.processes import free_port
from upweight.runs.checkpoints import checkpoints_of, is_whole
from upweight.train.distributed.launch import MESSAGE_FOLDER
from upweight.train.run import train


def command(*arguments):
    return [sys.executable, "-m", "upweight", *map(str, arguments)]


def launched(*arguments):
    """A command in an interpreter of its own."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.slow
def test_two_processes_train_what_one_trains_and_print_once(model_folder, tmp_path):
    results = []
    for count, micro in ((1, 2), (2, 1)):
        folder = tmp_path / str(count)
        folder.mkdir()
        file = write_config(folder, model_folder, max_steps=3, micro_batch_size=micro, val_set_size=4)
        done = (upweight if count == 1 else launched)("train", file, "--num-processes", count)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        lines = done.stderr.splitlines()
        assert (
            [line[:8].strip() for line in lines]
            == [
                "datasets",  # held-out rows repeat prompts
                *("model", "batch", "device", "memory", "steps", "look"),
                "step 1/3",
                "step 2/3",
                "step 3/3",
                "evaluati",
                "report:",
                "done: " + str(folder)[:2],
            ]
        )
        assert (folder / "out" / "model.safetensors").exists()
        results.append(metrics_of(folder / "out"))
    for one, two in zip(*results, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-4)


def test_json_writes_every_log_to_stdout_and_quiet_nothing(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, max_steps=2, save_strategy="no")
    done = upweight("train", file, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows == [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    done = upweight("train", file, "--quiet", "output_dir=" + str(tmp_path / "other"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_evaluate_prints_one_json_line(model_folder, tmp_path):
    done = upweight("evaluate", write_config(tmp_path, model_folder, val_set_size=4))
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["eval_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert "%|" not in done.stderr


def test_evaluate_measures_what_a_run_trained_and_says_which_weights_it_took(model_folder, tmp_path):
    keys = {"adapter": "lora", "lora_target_linear": True, "save_steps": 2}
    file = write_config(tmp_path, model_folder, val_set_size=4, max_steps=4, eval_steps=2, learning_rate=1e-2, **keys)
    out = tmp_path / "out"
    assert upweight("train", file).returncode == 0
    before = upweight("evaluate", file)
    assert f"the model before training; for the result: upweight evaluate {out}" in before.stderr
    logged = {row["step"]: row["eval_loss"] for row in metrics_of(out) if "eval_loss" in row}
    for step, arguments in ((4, (out,)), (2, (out, "--checkpoint", 2)), (2, (out / "checkpoint-2",))):
        done = upweight("evaluate", *arguments)
        assert "with the adapter in" in done.stderr
        assert json.loads(done.stdout)["eval_loss"] == pytest.approx(logged[step], rel=1e-5)
    assert logged[2] != pytest.approx(logged[4], rel=1e-4)
    missing = upweight("evaluate", out, "--checkpoint", 3)
    assert (missing.returncode, "Steps there: 2, 4" in missing.stderr) == (2, True)
    assert "name a run's folder" in upweight("evaluate", file, "--checkpoint", 2).stderr
    assert "is no folder of a run" in upweight("evaluate", model_folder).stderr
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "run.json").write_text("{}")
    assert "Call trainer.evaluate(rows) in the script" in upweight("evaluate", tmp_path / "script").stderr


def test_evaluate_of_an_online_run_finds_its_rewards_from_anywhere_and_warns_of_nothing(
    model_folder, tmp_path, monkeypatch
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "elsewhere").mkdir()
    keys = {"val_set_size": 2, "max_steps": 1, "adapter": "lora", "lora_target_linear": True}
    file = write_online(tmp_path / "mine", model_folder, output_dir=str(tmp_path / "out"), **keys)
    assert upweight("train", file).returncode == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = upweight("evaluate", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "eval_reward" in json.loads(done.stdout)
    assert "vllm" not in done.stderr
    assert "warning" not in done.stderr


def test_evaluate_of_whole_weights_that_were_compared_with_others_is_refused(model_folder, tmp_path):
    assert upweight("train", write_config(tmp_path, model_folder, val_set_size=4, max_steps=1)).returncode == 0
    done = upweight("evaluate", tmp_path / "out")
    assert (done.returncode, "dpo compares with the model before training" in done.stderr) == (2, True)


def test_a_used_folder_is_asked_about(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, max_steps=2, adapter="lora", lora_target_linear=True)
    assert upweight("train", file).returncode == 0
    made = upweight("merge-lora", file)
    assert made.returncode == 0, made.stderr
    refused = upweight("train", file)
    assert refused.returncode == 2
    assert f"output_dir: {tmp_path / 'out'} holds a run of 2 steps, which finished. `--resume`" in refused.stderr
    assert "give one of them" in upweight("train", file, "--resume", "--overwrite").stderr
    assert "in it already" in upweight("merge-lora", file).stderr
    again = upweight("train", file, "--overwrite", "learning_rate=0.05")
    assert again.returncode == 0, again.stderr
    assert "merged was merged from the adapter before this run" in again.stderr
    merged = tmp_path / "out" / "merged"
    assert (
        "merged from an earlier adapter" in upweight("inference", merged, "--prompt", "a", "--max-new-tokens", 1).stderr
    )
    remade = upweight("merge-lora", file)
    assert (remade.returncode, "is written again" in remade.stderr) == (0, True)
    assert upweight("train", file, "output_dir=" + str(tmp_path / "other")).returncode == 0


def test_a_finished_model_is_not_written_over_where_its_checkpoints_are_damaged(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, max_steps=1)
    assert upweight("train", file).returncode == 0
    for weights in (tmp_path / "out").glob("checkpoint-*/model.safetensors"):
        weights.write_bytes(b"cut off")
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    for arguments in (["--resume"], ["auto_resume_from_checkpoints=true"]):
        refused = upweight("train", file, *arguments, "max_steps=2")
        assert (refused.returncode, "none of its checkpoints is whole" in refused.stderr) == (2, True), refused.stderr
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
def test_an_error_of_one_for_all_is_printed_once_and_exits_2(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, lora_target_modules=["nowhere"], adapter="lora")
    done = launched("train", file, "--num-processes", 2)
    assert done.returncode == 2
    assert done.stderr.count("lora_target_modules: 'nowhere' matches nothing in the model") == 1
    assert "Traceback" not in done.stderr


def begun(file, *arguments):
    """A started training whose first step is done."""
    process = subprocess.Popen(command("train", file, *arguments), stderr=subprocess.PIPE, text=True)
    metrics = file.parent / "out" / "metrics.jsonl"
    while process.poll() is None and not metrics.exists():
        time.sleep(0.05)
    return process


def children_of(process):
    return [int(pid) for pid in open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()]


def is_running(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def listening(pid):
    """The addresses, in hexadecimal, on which a process listens."""
    sockets = {os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
    tables = [Path(f"/proc/net/{kind}").read_text().splitlines()[1:] for kind in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


@pytest.mark.slow
def test_ctrl_c_saves_once_for_all_ranks_and_resume_continues(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, num_epochs=400, save_strategy="no")
    process = begun(file, "--num-processes", 2, "seed=7")
    ranks = children_of(process)
    assert len(ranks) == 2
    assert listening(process.pid) == {"0100007F"}
    assert set().union(*map(listening, ranks)) <= {"0100007F"}
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert said.count("SIGINT: saving after this step") == 1
    ((step, folder),) = checkpoints_of(tmp_path / "out")
    assert is_whole(folder)
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in folder.iterdir()}
    command = re.search(r"continue with `upweight ([^`]*)`", said)[1]
    assert command == shlex.join(["train", str(file), "seed=7", "--num-processes", "2", "--resume"])
    done = launched(*shlex.split(command), f"max_steps={step + 1}")
    assert done.returncode == 0, done.stderr
    assert "changed since the run began: max_steps" in done.stderr
    assert metrics_of(tmp_path / "out")[-1]["step"] == step + 1


LOST = {
    signal.SIGKILL: "process 1 of 2 was ended by SIGKILL (out of host memory?), and the run with it; go on",
    signal.SIGSTOP: "process 1 of 2 was stopped (SIGSTOP), and the run with it; go on",
}


def run_rank(file, resume=False):
    """What the command runs on a rank, in processes that have imported most of what it needs."""
    train(load_config(file), resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "fsdp"),
    [
        (signal.SIGKILL, True),
        (signal.SIGSTOP, None),
        pytest.param(signal.SIGKILL, None, marks=pytest.mark.sweep),
        pytest.param(signal.SIGSTOP, True, marks=pytest.mark.sweep),
    ],
)
def test_a_lost_rank_ends_all_and_resume_is_exact(number, fsdp, model_folder, tmp_path, monkeypatch):
    keys = {"max_steps": 18, "save_steps": 3, "save_total_limit": 2, "fsdp": fsdp}
    (undisturbed := tmp_path / "undisturbed").mkdir()
    on_ranks(run_rank, 2, write_config(undisturbed, model_folder, **keys))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the ranks of `on_ranks`
    file = write_config(tmp_path, model_folder, **keys)
    process = begun(file, "--num-processes", 2)
    ranks = children_of(process)
    assert len(ranks) == 2
    while not any(is_whole(folder) for _, folder in checkpoints_of(tmp_path / "out")) and process.poll() is None:
        time.sleep(0.02)
    os.kill(ranks[1], number)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (1, 137)
    assert not any(is_running(rank) for rank in ranks)
    assert LOST[number] in said
    on_ranks(run_rank, 2, file, True)  # `--resume` of the command is tried after Ctrl-C
    assert metrics_of(tmp_path / "out") == metrics_of(undisturbed / "out")
    found, right = (load_file(folder / "out" / "model.safetensors") for folder in (tmp_path, undisturbed))
    assert largest_difference(found, right) == 0


@pytest.mark.slow
def test_ranks_do_not_outlive_their_launcher(model_folder, tmp_path):
    process = begun(write_config(tmp_path, model_folder, num_epochs=4000, save_strategy="no"), "--num-processes", 2)
    ranks = children_of(process)
    process.kill()
    process.communicate(timeout=60)
    for _ in range(100):
        if not any(is_running(rank) for rank in ranks):
            break
        time.sleep(0.1)
    assert not any(is_running(rank) for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_other_launchers_train_the_same(launcher, model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, max_steps=2, micro_batch_size=1)
    extra = ["--", "--max-restarts", 0] if launcher == "torchrun" else []
    done = launched("train", file, "--num-processes", 2, "--launcher", launcher, *extra)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 2/2") == 1
    assert metrics_of(tmp_path / "out")[-1]["step"] == 2


@pytest.mark.slow
def test_two_nodes_on_one_machine_meet(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, max_steps=1, micro_batch_size=1)
    port = free_port()
    where = ["--num-processes", 1, "--nodes", 2, "--master-address", "127.0.0.1", "--master-port", port]
    nodes = [
        subprocess.Popen(command("train", file, *where, "--node-rank", rank), stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert ["step 1/1" in text for text in said] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nodes", 2], "add --master-address"),
        (["--nodes", 2, "--master-address", "a", "--node-rank", 2], "has to be below --nodes 2"),
        (["--launcher", "mpirun"], "is one of torchrun, accelerate, none"),
        (["--launcher", "none", "--num-processes", 2], "starts no processes"),
        (["--", "--rdzv-backend", "c10d"], "name one of them"),
    ],
)
def test_starts_that_cannot_be_are_refused(arguments, text, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["upweight", "train", "nothing.yaml", *map(str, arguments)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert text in capsys.readouterr().err


def test_code_that_moved_before_a_resume_is_named_with_its_former_place(tmp_path):
    checkpoint = tmp_path / "out" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    code = {"gone_losses.loss": {"file": str(tmp_path / "gone_losses.py"), "digest": "0"}}
    (checkpoint / "data.json").write_text(json.dumps({"train": "", "code": code}))
    file = tmp_path / "run.yaml"
    trl = "trl: {loss_type: gone_losses.loss, reward_funcs: [r.f]}"
    file.write_text(f"base_model: m\nrl: grpo\n{trl}\noutput_dir: {tmp_path / 'out'}\ndatasets: [{{path: x}}]\n")
    with pytest.raises(UserError) as error:
        _load_config(file, [])
    first, second = str(error.value).splitlines()
    assert first.startswith("trl.loss_type: there is no 'gone_losses': no gone_losses.py in ")
    was = f"'gone_losses.loss' was in {tmp_path}/gone_losses.py, which is gone"
    assert second == f"When {checkpoint} was written, {was}: put it back."


def test_ranks_leave_notices_on_the_config_to_their_launcher(model_folder, tmp_path, monkeypatch, caplog):
    config = write_config(tmp_path, model_folder, flash_attention=True)
    monkeypatch.setenv(MESSAGE_FOLDER, str(tmp_path))
    _load_config(config, [])
    assert not caplog.text
    monkeypatch.delenv(MESSAGE_FOLDER)
    _load_config(config, [])
    assert "flash_attention: is now called" in caplog.text
