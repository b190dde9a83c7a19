"""No model type of transformers gives other numbers than its own forward, or a traceback: it is right, or refused."""

import pytest

from sweep.sweep import MAPPINGS, judge, quiet, types_of

CASES = [(kind, config) for kind in MAPPINGS for config in types_of(kind)]


@pytest.mark.models
@pytest.mark.parametrize(("kind", "config"), CASES, ids=[f"{kind}-{config.model_type}" for kind, config in CASES])
def test_a_model_type_is_right_or_refused(kind, config):
    with quiet():
        verdict = judge(kind, config)
    if verdict.outcome == "not built":
        pytest.skip(verdict.remark)
    assert verdict.outcome != "wrong", verdict.remark
