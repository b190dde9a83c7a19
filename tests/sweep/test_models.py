"""No model type of transformers gives other numbers than its own forward, or a traceback: it is right, or refused."""

import pytest

from sweep.judge import CLASSES, judge, types_of

HANDFUL = {"bert", "blt", "gemma2", "llama4_text", "mamba", "nemotron", "perceiver"}  # the others take minutes
CASES = [
    pytest.param(
        task,
        config,
        id=f"{task}-{config.model_type}",
        marks=() if config.model_type in HANDFUL else pytest.mark.models,
    )
    for task in CLASSES
    for config in types_of(task)
]


@pytest.mark.parametrize(("task", "config"), CASES)
def test_a_model_type_is_right_or_refused(task, config):
    verdict = judge(task, config)
    if verdict.outcome == "not built":
        pytest.skip(verdict.remark)
    assert verdict.outcome != "wrong", verdict.remark
