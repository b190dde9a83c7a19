import pytest


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Scripts keep prepared rows in the folder that they are run from."""
    monkeypatch.chdir(tmp_path)
