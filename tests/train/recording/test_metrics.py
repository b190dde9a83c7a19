"""Metrics add up exactly and are read once."""

import torch
from accelerate import Accelerator

from upweight.train.recording.metrics import Meters, sum_dtype
from upweight.types import Extreme, Mean


def mean(total, weight):
    return Mean(torch.tensor(float(total)), torch.tensor(float(weight)))


def test_means_are_weighted_and_forgotten_once_read():
    meters, accelerator = Meters(), Accelerator(cpu=True)
    meters.add({"a": mean(2, 1), "b": mean(0, 0)})
    meters.add({"a": mean(10, 3), "c": mean(1, 2)})
    assert meters.drain(accelerator) == {"a": 3.0, "c": 0.5}
    assert meters.drain(accelerator) == {}


def test_rewards_of_both_sides_have_a_margin_where_there_are_no_pairs():
    meters, accelerator = Meters(), Accelerator(cpu=True)
    meters.add({"rewards/chosen": mean(3, 2), "rewards/rejected": mean(0, 0)})
    assert "rewards/margins" not in meters.drain(accelerator)  # no bad answer yet
    for side, total in (("chosen", 3), ("rejected", 1), ("rejected", 2)):  # each in a batch of its own
        meters.add({f"rewards/{side}": mean(total, 2)})
    assert meters.drain(accelerator)["rewards/margins"] == 1.5 - 0.75
    meters.add({"rewards/chosen": mean(3, 2), "rewards/rejected": mean(1, 2), "rewards/margins": mean(2, 1)})
    assert meters.drain(accelerator)["rewards/margins"] == 2.0


def test_sums_do_not_lose_small_parts():
    meters = Meters()
    meters.add({"a": mean(2.0**24, 1)})
    for _ in range(8):
        meters.add({"a": mean(1.0, 0)})
    assert meters.drain(Accelerator(cpu=True)) == {"a": 2.0**24 + 8}


def test_numbers_of_other_dtypes_keep_their_precision():
    meters, large = Meters(), 2**24 + 1
    for _ in range(2):
        whole = Mean(torch.tensor(large), torch.tensor(1))
        meters.add({"whole": whole, "half": mean(0.5, 1), "most": Extreme(torch.tensor(3.0)), "double": whole})
    right = {"whole": large, "half": 0.5, "most": 3.0, "double": large}
    assert meters.drain(Accelerator(cpu=True)) == right


def test_only_apples_gpu_sums_in_float32():
    assert sum_dtype(torch.device("mps")) == torch.float32
    assert {sum_dtype(torch.device(kind)) for kind in ("cpu", "cuda")} == {torch.float64}


def test_gradients_are_not_kept():
    meters, weight = Meters(), torch.ones((), requires_grad=True)
    meters.add({"a": Mean(2 * weight, torch.ones(()))})
    assert not meters._pairs["a", 0].requires_grad


def test_extremes_are_of_all_batches_and_left_out_where_there_is_nothing():
    meters, accelerator = Meters(), Accelerator(cpu=True)
    for values in ([1.0, -2.0], [3.0, 0.5], []):
        batch = torch.tensor(values)
        none = Extreme.over(batch, torch.zeros(len(batch), dtype=torch.bool))
        meters.add({"low": Extreme.over(batch, sign=-1), "high": Extreme.over(batch), "none": none})
    assert meters.drain(accelerator) == {"low": -2.0, "high": 3.0}
    assert meters.drain(accelerator) == {}
