import pytest

from upweight.data.sources.lookup import similar_to


@pytest.mark.parametrize(
    ("path", "near"), [("chat.jsonl", ""), ("ktoo.jsonl", "kto.jsonl"), ("preference.jsonl", "preferences.jsonl")]
)
def test_a_file_is_not_near_by_its_ending_alone(path, near, tmp_path):
    for name in ("kto.jsonl", "preferences.jsonl"):
        (tmp_path / name).touch()
    assert similar_to(path, tmp_path) == (f" Did you mean '{near}'?" if near else "")
