"""Numbers and switches of a script that come as text, as from a YAML file or the environment."""

import pytest

from upweight import DPOConfig, GRPOConfig
from upweight.errors import UserError


@pytest.mark.parametrize("kind", [DPOConfig, GRPOConfig])
def test_texts_are_read_as_the_numbers_that_they_stand_for(kind):
    given = {"learning_rate": "5e-6", "per_device_train_batch_size": "8", "beta": "0.1", "max_steps": 10.0}
    given |= {"warmup_steps": "0.1", "save_total_limit": "2", "gradient_checkpointing": "False", "bf16": "true"}
    args = kind(output_dir="unused", report_to="none", **given)
    assert [getattr(args, name) for name in given] == [5e-6, 8, 0.1, 10, 0.1, 2, False, True]
    assert isinstance(args.max_steps, int)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"learning_rate": "fast"}, r"^learning_rate: expected a number, got 'fast'\.$"),
        ({"max_steps": 2.5}, r"^max_steps: expected a whole number, got 2\.5\.$"),
        (
            {"bf16": "perhaps", "seed": [1]},
            r"bf16: expected true or false, got 'perhaps'\.\nseed: .*, got \[1\]",
        ),
        ({"max_length": {"tokens": 1}}, "max_length: expected a whole number"),
    ],
)
def test_what_stands_for_no_number_is_named_by_its_argument(given, problem):
    with pytest.raises(UserError, match=problem) as caught:
        DPOConfig(output_dir="unused", report_to="none", **given)
    assert isinstance(caught.value, TypeError)
