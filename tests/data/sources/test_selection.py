"""Which rows a config with a Gym reads."""

import json

from upweight.config import parse_config
from upweight.data.sources.open import open_entry, selected_datasets


def config(folder, **keys):
    whole = {"base_model": "tiny", "rl": "grpo", "nemo_gym_enabled": True, "nemo_gym_auto_start": False, **keys}
    return parse_config(whole, folder=folder)


def rows_file(folder, name, count=10):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"responses_create_params": {"input": str(n)}}) + "\n" for n in range(count)))
    return file


def test_a_file_that_both_keys_name_is_read_once(tmp_path):
    file = rows_file(tmp_path / "Gym", "data/rows.jsonl")
    other = rows_file(tmp_path, "other.jsonl")
    made = config(
        tmp_path,
        nemo_gym_dir=str(tmp_path / "Gym"),
        nemo_gym_datasets=[{"path": "data/rows.jsonl", "server_name": "sums"}],
        datasets=[{"path": str(file), "type": "chat_template"}, {"path": str(other), "type": "chat_template"}],
    )
    found = [(key, number, row.path, row.type, row.server_name) for key, number, row in selected_datasets(made)]
    assert found == [
        ("datasets", 1, str(other), "chat_template", None),
        ("nemo_gym_datasets", 0, str(file), "nemo_gym", "sums"),
    ]


def test_paths_begin_at_the_gym_its_environment_or_here(tmp_path):
    inside = rows_file(tmp_path / "env" / "lib" / "python3.12" / "site-packages", "resources_servers/a.jsonl")
    here = rows_file(tmp_path, "b.jsonl")
    made = config(
        tmp_path,
        nemo_gym_dir=str(tmp_path / "env"),
        nemo_gym_datasets=[{"path": "resources_servers/a.jsonl"}, {"path": str(here)}, {"path": "b.jsonl"}],
    )
    rows = [row for _, _, row in selected_datasets(made)]
    assert [row.path for row in rows] == [str(inside), str(here), "b.jsonl"]
    assert all(len(open_entry(row, "x", tmp_path).rows()) == 10 for row in rows)


def test_samples_are_drawn_by_the_seed(tmp_path):
    rows_file(tmp_path, "rows.jsonl", 50)
    made = config(tmp_path, nemo_gym_datasets=[{"path": "rows.jsonl", "max_samples": 5}])
    ((_, _, row),) = selected_datasets(made)

    def drawn(seed):
        return open_entry(row, "x", tmp_path, seed=seed).rows().index_R.tolist()

    assert len(drawn(1)) == 5
    assert drawn(1) == drawn(1) != drawn(2)
