"""Episodes and whole runs against real OpenEnv servers on loopback."""

import asyncio
import json
import subprocess
import sys
import time

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from made_runs import write_model
from upweight.environments.episode import ToolCall, Turn
from upweight.environments.openenv import OpenEnv, OpenEnvFault
from with_openenv.real_server import running

pytestmark = [pytest.mark.openenv, pytest.mark.timeout(600)]

CALL = '<tool_call>\n{"name": "submit", "arguments": {"answer": %d}}\n</tool_call>'


@pytest.fixture(scope="module")
def guess(tmp_path_factory):
    with running("guess", tmp_path_factory.mktemp("guess")) as server:
        yield server


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    with running("sums", tmp_path_factory.mktemp("sums")) as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def said(text, *calls):
    return Turn(text, text, calls, finished=True)


def played(url, row, *turns, **options):
    async def play():
        environment = OpenEnv(url, **options)
        await environment.start()
        episode = environment.episode()
        try:
            opening = await episode.open(row)
            replies = [await episode.reply(turn) for turn in turns]
            return opening, replies, await episode.outcome()
        finally:
            await episode.close()

    return asyncio.run(play())


def test_a_typed_environment_is_played(guess):
    row = {"prompt": "Play.", "target": 3, "unknown": [1]}
    opening, replies, outcome = played(guess.url, row, said("five"), said("5"), said(" 3 "))
    assert opening.messages[0]["content"] == 'Play.\n\n{"hint": "guess a number in [0,9]", "remaining": 3}'
    assert "guess: Input should be a valid integer" in replies[0].messages[0]["content"]
    assert replies[1].messages[0]["content"] == '{"hint": "lower", "remaining": 2}'
    assert not replies[2].messages
    assert outcome.details["step_rewards"] == [0.0, 1.0]


def test_tools_of_an_mcp_environment_earn_rewards(sums):
    add, bad, submit = ToolCall("add", {"a": 4, "b": 5}), ToolCall("add", {"a": "x"}), ToolCall("submit", {"answer": 9})
    opening, replies, outcome = played(sums.url, {"prompt": "", "a": 4, "b": 5}, said("", add, bad), said("", submit))
    assert opening.messages[0]["content"] == "what is 4+5?"
    assert [tool["function"]["name"] for tool in opening.tools] == ["add", "look", "submit"]
    assert replies[0].messages[0]["content"] == "9"
    assert replies[0].failed == 1
    assert outcome.rewards == {"openenv": 1.0}


def test_a_failing_and_a_slow_step_are_the_environments_fault(guess):
    with pytest.raises(OpenEnvFault, match="EXECUTION_ERROR: env bug"):
        played(guess.url, {"prompt": "Play."}, said("13"))
    with pytest.raises(OpenEnvFault, match=r"within 0\.2 seconds"):
        played(guess.url, {"prompt": "Play.", "delay": 1.0}, said("1"), timeout=0.2)


def write_run(folder, model, url, rows, **keys):
    """A GRPO config that plays an environment."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {"type": "openenv", "url": url, **keys.pop("environment", {})}
    content = {
        "base_model": str(model), "rl": "grpo", "datasets": [{"path": str(folder / "rows.jsonl")}],
        "chat_template": "chatml", "learning_rate": 1e-3, "micro_batch_size": 8, "max_steps": 3, "logging_steps": 1,
        "trl": {"num_generations": 4, "max_completion_length": 64}, "environment": environment,
        "output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared"), **keys,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def begun(config):
    command = [sys.executable, "-m", "upweight", "train", str(config)]
    with (config.parent / "train.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def lines_of(config):
    file = config.parent / "out" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if "loss" in line]


def trained(config):
    """What a run logs, step by step."""
    code = begun(config).wait(300)
    assert code == 0, (config.parent / "train.log").read_text()[-3000:]
    return lines_of(config)


def asked(word="go", **columns):
    return {"prompt": [{"role": "user", "content": f"say {word}"}], **columns}


def test_a_run_learns_from_the_text_of_several_turns(model, tmp_path):
    with running("echo", tmp_path) as server:
        lines = trained(write_run(tmp_path, model, server.url, [asked(word) for word in "abcd"]))
    assert len(lines) == 3
    assert all(0 < line["reward"] < 2 for line in lines)
    assert all(line["environment/masked"] == 0 for line in lines)
    assert max(line["environment/turns_max"] for line in lines) == 2
    assert all(line["grad_norm"] > 0 for line in lines)


def taught_to_submit(folder, steps=120):
    """A tiny model that calls `submit` with a digit of its own choice."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    prompts = [f"<|im_start|>user\nsay go\n\nwhat is {a}+2?<|im_end|>\n<|im_start|>assistant\n" for a in (1, 2)]
    batch = [tokenizer.encode(prompts[n % 2] + CALL % (n // 2 + 1) + "<|im_end|>") for n in range(8)]
    begins = [len(tokenizer.encode(prompts[n % 2])) for n in range(8)]
    for _ in range(steps):
        loss = torch.zeros(())
        for ids, begin in zip(batch, begins, strict=True):
            logits = model(input_ids=torch.tensor([ids])).logits[0, begin - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(ids[begin:]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def test_a_run_learns_from_calls_of_mcp_tools(sums, tmp_path):
    model = taught_to_submit(write_model(tmp_path / "model"))
    rows = [asked(a=1, b=2), asked(a=2, b=2)]
    lines = trained(
        write_run(tmp_path, model, sums.url, rows, trl={"num_generations": 8, "max_completion_length": 96},
                  micro_batch_size=16, tool_format="hermes")
    )  # fmt: skip
    assert sum(line["tools/call_frequency"] for line in lines) / len(lines) > 0.5
    assert max(line["reward"] for line in lines) > 0
    assert max(line["grad_norm"] for line in lines) > 0


def test_slow_steps_are_masked_and_counted_and_the_run_goes_on(model, tmp_path):
    rows = [asked("a", delay=0.0), asked("b", delay=3.0)]
    with running("echo", tmp_path) as server:
        lines = trained(write_run(tmp_path, model, server.url, rows, environment={"timeout": 1.0}))
    assert len(lines) == 3
    assert all(line["environment/masked"] == 4 for line in lines)  # one of the two groups of each step
    assert all(line["reward"] > 0 for line in lines)


def test_a_server_that_is_killed_and_comes_back_costs_only_what_was_open(model, tmp_path):
    with running("echo", tmp_path) as server:
        rows = [asked(word, delay=0.5) for word in "abcd"]
        config = write_run(tmp_path, model, server.url, rows, max_steps=5)
        run = begun(config)
        stop = time.monotonic() + 200
        while not lines_of(config):
            assert run.poll() is None, (tmp_path / "train.log").read_text()[-3000:]
            assert time.monotonic() < stop
            time.sleep(0.1)
        seen = server.log.read_text().count("a step")
        while server.log.read_text().count("a step") == seen:
            assert run.poll() is None, (tmp_path / "train.log").read_text()[-3000:]
            time.sleep(0.02)
        server.kill()
        time.sleep(1.0)
        server.start()
        assert run.wait(300) == 0, (tmp_path / "train.log").read_text()[-3000:]
    lines = lines_of(config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    # Where it took all episodes of a rollout with it, they were played again.
    assert sum(line["environment/masked"] + line.get("rollout/played_again", 0) for line in lines) > 0
    assert lines[-1]["environment/masked"] == 0
    assert "connection was lost" in (tmp_path / "train.log").read_text()
