"""Small agreements between ranks."""

import json
import os
import time

from accelerate import PartialState

from made_runs import on_ranks
from upweight.train.distributed.ranks import (
    LargestOverRanks,
    as_rank_zero_says,
    first_here_then_others,
    from_all_ranks,
    join_ranks,
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
    rank, largest = state.process_index, LargestOverRanks()
    found = {
        "device": device.type,
        "largest": [largest(rank), largest(5 - rank)],
        "zero": as_rank_zero_says(f"of {rank}"),
        "all": from_all_ranks(rank),
        "first": first_here_then_others(lambda: work(folder)),
    }
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)


def test_two_ranks_agree(tmp_path):
    on_ranks(agree, 2, str(tmp_path))
    shared = {"device": "cpu", "largest": [1, 5], "zero": "of 0", "all": [0, 1]}
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [{**shared, "first": "made"}, {**shared, "first": "found"}]


def test_alone_everything_is_as_it_is():
    assert PartialState().num_processes == 1
    assert LargestOverRanks()(3) == 3
    assert as_rank_zero_says("a") == "a"
    assert from_all_ranks("a") == ["a"]
    assert first_here_then_others(lambda: 4) == 4
