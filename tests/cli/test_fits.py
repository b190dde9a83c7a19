import pytest
import torch

from made_runs import write_config, write_model
from upweight.cli.fits import run
from upweight.errors import UserError


def test_a_table_that_marks_the_configs_own_way(tmp_path, capsys):
    config = write_config(tmp_path, write_model(tmp_path / "model"), adapter="lora", gradient_checkpointing=True)
    run(config, [], memory=24)
    about, headings, *rows = capsys.readouterr().out.splitlines()
    assert "dpo, 512 tokens, 2 in a row; GiB of 24" in about
    assert headings.split()[:2] == ["trained", "recompute"]
    assert len(rows) == 6
    assert [row.split()[1:3] for row in rows if "*" in row] == [["lora", "yes"]]
    run(config, [], memory=1)
    assert all(row.split()[-2] == "no" for row in capsys.readouterr().out.splitlines()[2:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU says by itself how much memory it has")
def test_without_a_gpu_the_memory_has_to_be_said(tmp_path):
    with pytest.raises(UserError, match="--memory 24"):
        run(write_config(tmp_path, tmp_path), [], memory=None)
