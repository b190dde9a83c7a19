"""`upweight vllm-serve`."""

import shlex

from typer.testing import CliRunner

from upweight.cli.app import app


def test_the_command_line_can_be_shown_and_overrides_win(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("base_model: some/model\nrl: grpo\nvllm: {port: 8001, tensor_parallel_size: 2}\n")
    done = CliRunner().invoke(app, ["vllm-serve", str(file), "vllm.port=8002", "--python", "there/python", "--show"])
    assert done.exit_code == 0
    words = shlex.split(done.stdout)
    assert words[words.index("--port") + 1] == "8002"
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert "there/python" in words
    assert "VLLM_SERVER_DEV_MODE=1" in words
