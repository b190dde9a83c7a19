"""Small agreements between ranks."""

import json
import os
import time

from accelerate import PartialState

from made_runs import on_ranks
from upweight.train.distributed.ranks import (
    all_gather_objects,
    broadcast_from_rank0,
    join_ranks,
    rank0_first,
)


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
        "first": rank0_first(lambda: work(folder)),
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
    assert rank0_first(lambda: 4) == 4
