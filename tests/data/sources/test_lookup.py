import pytest

from upweight.config.sections.data import DatasetSpec
from upweight.data.sources.lookup import missing_files, similar_to


@pytest.mark.parametrize(
    ("path", "near"), [("chat.jsonl", ""), ("ktoo.jsonl", "kto.jsonl"), ("preference.jsonl", "preferences.jsonl")]
)
def test_a_file_is_not_near_by_its_ending_alone(path, near, tmp_path):
    for name in ("kto.jsonl", "preferences.jsonl"):
        (tmp_path / name).touch()
    assert similar_to(path, tmp_path) == (f" Did you mean '{near}'?" if near else "")


@pytest.mark.parametrize(("path", "missing"), [("kto.jsn", True), ("kto", False), ("owner/kto.jsn", False)])
def test_a_name_with_an_ending_like_a_file_beside_it_is_not_taken_for_one_of_the_hub(path, missing, tmp_path):
    (tmp_path / "kto.jsonl").touch()
    problems = list(missing_files(DatasetSpec(path=path), tmp_path))
    assert [problem.rpartition(". ")[2] for problem in problems] == ["Did you mean 'kto.jsonl'?"] * missing
