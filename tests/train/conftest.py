import pytest

from made_runs import write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))
