"""Small agreements between ranks."""

import json
import os
import time

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState

from made_runs import metrics_of, on_ranks, write_config
from upweight.config import load_config
from upweight.errors import UserError
from upweight.train.distributed.ranks import (
    all_gather_objects,
    broadcast_from_rank0,
    join_ranks,
    leave_ranks,
    local_rank0_first,
    mps_chosen,
)
from upweight.train.run import train


def work(folder):
    """What the first to come makes, and later ones find."""
    file = f"{folder}/made"
    if os.path.exists(file):
        return "found"
    time.sleep(0.5)
    open(file, "x").close()
    return "made"


def agree(folder):
    state, device = join_ranks(60)
    rank = state.process_index
    found = {
        "device": device.type,
        "zero": broadcast_from_rank0(f"of {rank}"),
        "all": all_gather_objects(rank),
        "first": local_rank0_first(lambda: work(folder)),
    }
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)


def test_two_ranks_agree(tmp_path):
    on_ranks(agree, 2, str(tmp_path))
    shared = {"device": "cpu", "zero": "of 0", "all": [0, 1]}
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [{**shared, "first": "made"}, {**shared, "first": "found"}]


def test_alone_everything_is_as_it_is():
    assert PartialState().num_processes == 1
    assert broadcast_from_rank0("a") == "a"
    assert all_gather_objects("a") == ["a"]
    assert local_rank0_first(lambda: 4) == 4


def wait_for_a_slow_rank():
    """Rank 0 waits for rank 1 once as for work and once as for a collective; each ends by its limit."""
    state, _ = join_ranks(2, 1)
    all_gather_objects("both are here")
    if state.process_index == 1:
        time.sleep(5)
        return
    with pytest.raises(UserError, match="ddp_wait_timeout: another rank did not come to this point within 1 seconds"):
        all_gather_objects("alone")
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        dist.all_reduce(torch.ones(1))


def test_a_rank_waits_for_others_as_long_as_the_keys_say():
    on_ranks(wait_for_a_slow_rank, 2)


def train_both(files):
    for file in files:
        train(load_config(file))
    assert dist.is_initialized()
    leave_ranks()


@pytest.mark.slow
def test_runs_follow_each_other_in_the_same_ranks(model_folder, tmp_path):
    """A second joining of the same processes would wait for ever, so they stay joined."""
    folders = [tmp_path / name for name in ("first", "second")]
    files = []
    for folder in folders:
        folder.mkdir()
        files.append(write_config(folder, model_folder, micro_batch_size=1, max_steps=2, ddp_timeout=60))
    on_ranks(train_both, 2, files)
    first, second = (metrics_of(folder / "out") for folder in folders)
    assert [line["loss"] for line in first] == [line["loss"] for line in second]


def test_apples_gpu_is_taken_only_where_it_is_asked_for_and_there(monkeypatch):
    monkeypatch.delenv("UPWEIGHT_DEVICE", raising=False)
    assert not mps_chosen()
    monkeypatch.setenv("UPWEIGHT_DEVICE", "mps")
    for there in (True, False):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=there: there)
        if there:
            assert mps_chosen()
        else:
            with pytest.raises(UserError, match="no MPS device"):
                mps_chosen()
    monkeypatch.setenv("UPWEIGHT_DEVICE", "tpu")
    with pytest.raises(UserError, match="'tpu' is no choice"):
        mps_chosen()
