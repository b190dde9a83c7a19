"""From config to prepared rows: mixtures, splits, order, limits, errors, and the cache between runs."""

import dataclasses
import datetime

import datasets
import pytest

from made_tokenizers import byte_tokenizer
from upweight.data import workers as chunks_module
from upweight.data.prepare import require_both_labels, shown_rows
from upweight.errors import UserError
from upweight.methods import DPO, KTO

TOKENIZER = byte_tokenizer()


def pair(number, prompt="p", **more):
    return {"prompt": f"{prompt}{number}", "chosen": f"good {number}", "rejected": "bad", **more}


def asked(run, prepared, **options):
    """The prompts in the order of training, without the template's marks."""
    shown = shown_rows(run.config, prepared, len(prepared.train), tokens=False, **options)
    return [row["prompt"].split("user\n")[1].split("<|im_end|>")[0] for row in shown]


def decoded(rows, key="prompt_ids"):
    return [TOKENIZER.decode(ids) for ids in rows[key]]


def test_rows_become_columns_of_tokens(run):
    prepared = run([pair(number) for number in range(5)], shuffle_merged_datasets=False)
    assert prepared.train.column_names == ["prompt_ids", "chosen_ids", "rejected_ids"]
    assert decoded(prepared.train, "chosen_ids") == [f"good {number}<|im_end|>" for number in range(5)]
    assert prepared.evaluation is None
    assert (prepared.report.train_rows, prepared.report.eval_rows) == (5, 0)


def test_a_second_run_reads_the_cache(run):
    first = run([pair(number) for number in range(30)], val_set_size=4)
    second = run(val_set_size=4)
    assert (first.report.cached, second.report.cached) == (False, True)
    assert second.train[:] == first.train[:]
    assert second.evaluation[:] == first.evaluation[:]
    assert dataclasses.replace(second.report, cached=False) == first.report


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7},
        {"rl": "ipo"},
        {"sequence_len": 100},
        {"max_prompt_length": 50},
        {"excess_length_strategy": "truncate"},
        {"dataset_exact_deduplication": True},
        {"val_set_size": 2},
        {"default_system_message": "Be brief."},
        {"datasets": [{"path": "rows.jsonl", "type": "chatml.prompt_pairs", "split": "train[:3]"}]},
        {"datasets": [{"path": "rows.jsonl", "type": "llama3.prompt_pairs"}]},
        {"chat_template_kwargs": {"thinking": True}},
        {"tokenizer": byte_tokenizer("llama3")},
        {"tokenizer": byte_tokenizer(template="{{ messages }}")},
    ],
    ids=str,
)
def test_what_shapes_the_rows_makes_a_new_cache(run, change):
    run([pair(number) for number in range(5)])
    assert not run(**change).report.cached


@pytest.mark.parametrize("change", [{"learning_rate": 1e-3}, {"output_dir": "there"}, {"dataset_num_proc": 2}], ids=str)
def test_what_does_not_shape_the_rows_keeps_the_cache(run, change):
    run([pair(number) for number in range(5)])
    assert run(**change).report.cached


def test_changed_rows_are_noticed(run):
    run([pair(1)])
    prepared = run([pair(2)])
    assert not prepared.report.cached
    assert decoded(prepared.train, "chosen_ids") == ["good 2<|im_end|>"]


def test_skipping_the_cache_prepares_anew(run):
    run([pair(1)])
    assert not run(skip_prepare_dataset=True).report.cached
    assert run().report.cached


def test_a_damaged_cache_is_prepared_again(run, caplog):
    prepared = run([pair(number) for number in range(5)])
    rows = decoded(prepared.train)
    arrow = prepared.folder / "train.arrow"
    arrow.write_bytes(arrow.read_bytes()[:-40])
    again = run()
    assert not again.report.cached
    assert "is incomplete or damaged" in caplog.text
    assert decoded(again.train) == rows


def test_a_changed_transform_is_noticed(run, tmp_path):
    source = "def transform(cfg):\n    return lambda row: {**row, 'prompt': row['prompt'] + MARK}\nMARK = '?'\n"
    (tmp_path / "my_changing_transform.py").write_text(source)
    keys = {"datasets": [{"path": "rows.jsonl", "type": "my_changing_transform.transform"}]}
    assert decoded(run([pair(1)], **keys).train) == ["p1?"]
    assert run(**keys).report.cached
    (tmp_path / "my_changing_transform.py").write_text(source.replace("'?'", "'!'"))
    import sys

    del sys.modules["my_changing_transform"]  # as a new process would find it
    prepared = run(**keys)
    assert not prepared.report.cached
    assert decoded(prepared.train) == ["p1!"]


def test_a_transform_sees_keys_that_then_count(run, tmp_path):
    (tmp_path / "my_looking_transform.py").write_text(
        "def transform(cfg):\n    return lambda row: {**row, 'prompt': str(cfg.learning_rate)}\n"
    )
    keys = {"datasets": [{"path": "rows.jsonl", "type": "my_looking_transform.transform"}]}
    assert decoded(run([pair(1)], learning_rate=0.5, **keys).train) == ["0.5"]
    assert decoded(run(learning_rate=0.25, **keys).train) == ["0.25"]
    assert run(learning_rate=0.25, output_dir="elsewhere", **keys).report.cached


def test_shuffling_is_seeded_and_can_be_left_out(run):
    rows = [pair(number) for number in range(50)]
    in_order = [row["prompt"] for row in rows]
    assert asked(run, run(rows, shuffle_merged_datasets=False)) == in_order
    assert asked(run, run(curriculum_sampling=True)) == in_order
    first = asked(run, run(seed=1))
    assert first != in_order
    assert sorted(first) == sorted(in_order)
    assert asked(run, run(seed=1, skip_prepare_dataset=True)) == first
    assert asked(run, run(seed=2)) != first
    assert asked(run, run(seed=2, data_seed=1)) == first


def test_mixtures_keep_or_mix_their_parts(run):
    run.write([pair(number, "a") for number in range(30)], "a.jsonl")
    run.write([pair(number, "b") for number in range(30)], "b.jsonl")
    mixture = [{"path": f"{name}.jsonl", "type": "chatml.prompt_pairs"} for name in "ab"]
    each = asked(run, run(datasets=mixture, shuffle_before_merging_datasets=True, shuffle_merged_datasets=False))
    assert [prompt[0] for prompt in each] == ["a"] * 30 + ["b"] * 30
    assert each[:30] != [f"a{number}" for number in range(30)]
    mixed = asked(run, run(datasets=mixture))
    assert "b" in [prompt[0] for prompt in mixed[:30]]
    assert [part.kept for part in run(datasets=mixture).report.parts] == [30, 30]


def test_shards_of_a_mixture_part_the_rows(run):
    run.write([pair(number, "a") for number in range(10)], "a.jsonl")
    run.write([pair(number, "b") for number in range(7)], "b.jsonl")
    mixture = [{"path": f"{name}.jsonl", "type": "chatml.prompt_pairs"} for name in "ab"]
    shards = [asked(run, run(datasets=mixture, dataset_shard_num=3, dataset_shard_idx=index)) for index in range(3)]
    assert sorted(len(shard) for shard in shards) == [5, 6, 6]
    assert len({prompt for shard in shards for prompt in shard}) == 17


@pytest.mark.parametrize(("size", "held"), [(0.2, 10), (7, 7), (0.001, 1)])
def test_rows_held_out_do_not_overlap(run, size, held):
    prepared = run([pair(number) for number in range(50)], val_set_size=size)
    train, evaluation = set(decoded(prepared.train)), set(decoded(prepared.evaluation))
    assert (len(train), len(evaluation)) == (50 - held, held)
    assert not train & evaluation
    again = run(val_set_size=size, skip_prepare_dataset=True)
    assert set(decoded(again.evaluation)) == evaluation
    assert set(decoded(run(val_set_size=size, seed=5).evaluation)) != evaluation


def test_holding_out_everything_is_refused(run):
    with pytest.raises(UserError, match=r"val_set_size: 5 of 5 rows would be held out.* Set it lower"):
        run([pair(number) for number in range(5)], val_set_size=5)


def test_both_sides_of_a_pair_are_held_out_together(run):
    prepared = run([pair(number) for number in range(20)], rl="kto", val_set_size=5)
    assert (len(prepared.train), len(prepared.evaluation)) == (30, 10)
    assert not set(decoded(prepared.train)) & set(decoded(prepared.evaluation))


def test_test_datasets_have_their_own_settings(run):
    run.write([{"question": "q", "chosen": "yes " * 30, "rejected": "no"}] * 3, "test.jsonl")
    tests = [{"path": "test.jsonl", "type": "chatml.intel", "split": "train[:2]"}]
    prepared = run([pair(1)], test_datasets=tests, sequence_len=40, eval_sequence_len=400)
    assert (len(prepared.train), len(prepared.evaluation)) == (1, 2)
    assert "q" in decoded(prepared.evaluation)[0]
    assert prepared.report.parts[1].where == "test_datasets[0] (test.jsonl)"


def test_repeated_rows_are_dropped_and_never_evaluated_on(run):
    run.write([pair(1), pair(9)], "test.jsonl")
    tests = [{"path": "test.jsonl", "type": "chatml.prompt_pairs"}]
    rows = [pair(1), pair(2), pair(1, unused="column"), pair(3), pair(2)]
    kept = run(rows, test_datasets=tests)
    assert (len(kept.train), len(kept.evaluation)) == (5, 2)
    prepared = run(test_datasets=tests, dataset_exact_deduplication=True, shuffle_merged_datasets=False)
    assert asked(run, prepared) == ["p1", "p2", "p3"]
    assert decoded(prepared.evaluation, "chosen_ids") == ["good 9<|im_end|>"]
    assert [sum(part.dropped.values()) for part in prepared.report.parts] == [2, 1]


def test_long_rows_are_dropped_counted_and_measured(run):
    rows = [pair(number) for number in range(8)] + [pair(9, "long " * 200)]
    prepared = run(rows, sequence_len=64)
    assert prepared.report.parts[0].dropped == {"longer than sequence_len": 1}
    assert prepared.report.lengths["prompt"]["max"] > 200
    assert prepared.report.suggested["sequence_len"]["100%"] > 200
    assert len(prepared.train) == 8


def test_nothing_left_to_train_on_says_why(run):
    with pytest.raises(
        UserError,
        match=r"2 dropped: longer than sequence_len\n(.*\n)*no rows are left to train on\. `sequence_len: \d+` keeps",
    ):
        run([pair(number, "long " * 200) for number in range(2)], sequence_len=64)


def test_nothing_left_to_evaluate_on_says_so(run):
    run.write([pair(1, "long " * 200)], "test.jsonl")
    tests = [{"path": "test.jsonl", "type": "chatml.prompt_pairs"}]
    with pytest.raises(UserError, match="no rows are left to evaluate on"):
        run([pair(1)], sequence_len=64, test_datasets=tests)


def test_nothing_held_out_that_can_be_read_names_the_key(run):
    rows = [pair(number, "long " * 200 if number % 2 else "so") for number in range(4)]

    def hold_one_out():
        for seed in range(20):  # until it is a long one
            run(rows, sequence_len=64, val_set_size=1, seed=seed)

    with pytest.raises(UserError, match=r"no rows are left to evaluate on.*`val_set_size: 0` .* trains without"):
        hold_one_out()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_row_is_named(run, processes, monkeypatch):
    monkeypatch.setattr(chunks_module, "CHUNK_ROWS", 4)
    rows = [pair(number) for number in range(17)] + [{**pair(17), "chosen": 5}, {"prompt": "no answers"}]
    with pytest.raises(
        UserError, match=r"datasets\[0\] \(rows.jsonl\), row 17 \(rows.jsonl:18\), 'chosen': expected text"
    ):
        run(rows, dataset_num_proc=processes)


def test_several_processes_prepare_the_same(run, monkeypatch):
    monkeypatch.setattr(chunks_module, "CHUNK_ROWS", 3)
    one = run([pair(number) for number in range(20)], dataset_num_proc=1, val_set_size=3)
    rows, evaluation = one.train[:], one.evaluation[:]
    two = run(dataset_num_proc=2, val_set_size=3, skip_prepare_dataset=True)
    assert (two.train[:], two.evaluation[:]) == (rows, evaluation)


def test_tables_and_mixed_files_are_prepared_alike(run, tmp_path):
    rows = [pair(number) for number in range(4)]
    in_lines = run(rows, shuffle_merged_datasets=False).train[:]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).to_csv(tmp_path / "rows.csv")
    for name in ("rows.parquet", "rows.csv"):
        entry = {"path": name, "type": "chatml.prompt_pairs"}
        assert run(datasets=[entry], shuffle_merged_datasets=False).train[:] == in_lines


def test_empty_answers_are_counted_and_the_first_ones_named(run, tmp_path, caplog):
    rows = [pair(1), {**pair(2), "rejected": ""}, {**pair(3), "chosen": " "}]
    datasets.Dataset.from_list(rows).to_csv(tmp_path / "rows.csv")
    keys = {"datasets": [{"path": "rows.csv", "as_messages": True}], "chat_template": "chatml"}
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        assert "2 left with an empty answer" in run(**keys).report.lines()[0]
        named = "row 1: the answer is empty; so are those of 2 rows in all, next row 2, and they are kept"
        assert f"datasets[0] (rows.csv), {named}" in caplog.text


def test_pairs_of_one_answer_twice_are_counted_and_the_first_ones_named(run, caplog):
    rows = [pair(1), {**pair(2), "rejected": "good 2"}, pair(3), {**pair(4), "chosen": "bad"}]
    assert "2 whose two answers are the same" in run(rows).report.lines()[0]
    assert "row 1 (rows.jsonl:2): the chosen and the rejected answer are the same" in caplog.text
    assert "so are those of 2 rows in all, next row 3 (rows.jsonl:4), and they are kept" in caplog.text


def test_pairs_that_are_all_one_answer_twice_are_refused_with_the_first(run):
    same = [{**pair(n), "rejected": f"good {n}"} for n in range(3)]
    for _ in range(2):  # the second time from the cache
        with pytest.raises(UserError, match=r"row 0 \(rows.jsonl:1\): the chosen .* of all rows \(3\)\. See"):
            run(same, val_set_size=0)
    repeated = [same[0], same[0], same[0], pair(4)]
    assert len(run(repeated, dataset_exact_deduplication=True).train) == 2


def test_one_empty_answer_is_counted_as_one(run, tmp_path, caplog):
    datasets.Dataset.from_list([pair(1), {**pair(2), "rejected": ""}]).to_csv(tmp_path / "rows.csv")
    run(datasets=[{"path": "rows.csv", "as_messages": True}], chat_template="chatml")
    assert "row 1: the answer is empty; the row is kept" in caplog.text


@pytest.mark.parametrize(
    ("rows", "keys", "empty"),
    [([{"prompt": "", "completion": "a"}, {"prompt": "q", "completion": "a"}], {"as_messages": True}, ["prompt"]),
     ([{"prompt": " ", "completion": "a"}, {"prompt": "q", "completion": " "}], {}, ["prompt", "answer"]),
     ([{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": " "}]}], {},
      ["prompt", "answer"]),
     ([{"q": "", "a": "b"}], {"type": {"field_instruction": "q", "field_output": "a"}, "as_messages": True},
      ["prompt"])],
)  # fmt: skip
def test_empty_prompts_and_answers_of_sft_are_named(rows, keys, empty, run, caplog):
    lines = run(rows, rl=None, datasets=[{"path": "rows.jsonl", **keys}], chat_template="chatml").report.lines()
    for part in ("prompt", "answer"):
        assert (f"1 left with an empty {part}" in lines[0]) == (part in empty)
        line = f"the {part} is empty; the row is kept. `filter` in the entry leaves rows out"
        assert (line in caplog.text) == (part in empty)


def test_rows_whose_words_say_nothing_are_left_out_and_counted(run, caplog):
    rows = [{"p": f"Why {n}?", "a": "So.", "b": " ", "w": word} for n, word in enumerate(["tie", "A", "B", "", "A"])]
    form = {"field_prompt": "p", "field_winner": "w", "winner_values": {"A": "a", "B": "b", "tie": None, "": None}}
    prepared = run(rows, datasets=[{"path": "rows.jsonl", "type": form}])
    assert len(prepared.train) == 3
    assert "2 dropped: left out by the winner_values" in "\n".join(prepared.report.lines())
    assert "row 1" in caplog.text  # the first one with an empty answer
    with pytest.raises(UserError, match=r"row 1 .*'w': expected 'A', 'C', got 'B'; `winner_values`"):
        run(rows[1:], datasets=[{"path": "rows.jsonl", "type": {**form, "winner_values": {"A": "a", "C": "b"}}}])


def test_a_template_that_leaves_the_answers_out_is_named(run):
    turns = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match=r"'chosen' is not empty: `chat_template` writes nothing of it"):
        run(
            [{"prompt": [{"role": "user", "content": "q"}], **turns}],
            datasets=[{"path": "rows.jsonl"}],
            chat_template_jinja=template,
        )


def test_a_template_that_writes_nothing_is_named(run):
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    keys = {"rl": None, "chat_template_jinja": "{% for m in messages %}{{ m.text }}{% endfor %}"}
    with pytest.raises(UserError, match="The row has messages: they are empty, or `chat_template` writes none"):
        run(rows, datasets=[{"path": "rows.jsonl", "type": "chat_template"}], **keys)


def test_a_bad_row_of_a_table_is_named(run, tmp_path):
    datasets.Dataset.from_list([pair(1), {**pair(2), "chosen": None}]).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"datasets\[0\] \(rows.parquet\), row 1, 'chosen': expected text"):
        run(datasets=[{"path": "rows.parquet", "type": "chatml.prompt_pairs"}])


def test_classes_that_the_head_does_not_have_are_refused(run):
    rows = [{"prompt": "p", "completions": ["a", "b"], "labels": [0, 2]}]
    keys = {"rl": None, "process_reward_model": True}
    keys["datasets"] = [{"path": "rows.jsonl", "type": "stepwise_supervised"}]
    assert len(run(rows, **keys, num_labels=3).train) == 1
    with pytest.raises(UserError, match=r"row 0 .*'labels\[1\]': expected .* below 2 \(num_labels\), got the number 2"):
        run(**keys)


def test_margins_are_kept_where_there_are_any(run):
    prepared = run([pair(1), pair(2, margin=0.5)], reward_model=True, rl=None, shuffle_merged_datasets=False)
    assert prepared.train["margin"][:] == [None, 0.5]


def test_rows_of_an_online_method_carry_their_columns(run):
    rows = [
        {"prompt": "p1", "answer": "42", "tests": {"a": [1]}, "note": None},
        {"prompt": [{"role": "user", "content": "p2"}], "answer": 42, "tests": {"b": "x"}, "extra": [True]},
    ]
    prepared = run(
        rows,
        rl="grpo",
        trl={"reward_funcs": ["rewards.one"]},
        datasets=[{"path": "rows.jsonl"}],
        chat_template="chatml",
        shuffle_merged_datasets=False,
    )
    first, second = prepared.train[0], prepared.train[1]
    assert (first["prompt"], first["answer"], first["tests"], first["extra"]) == ("p1", "42", {"a": [1]}, None)
    assert (second["prompt"], second["answer"], second["extra"]) == (rows[1]["prompt"], 42, [True])
    assert TOKENIZER.decode(second["prompt_ids"]).endswith("p2<|im_end|>\n<|im_start|>assistant\n")
    assert prepared.train[:]["answer"] == ["42", 42]


def test_columns_that_are_no_json_are_shown_as_text(run, tmp_path):
    day = datetime.datetime(2026, 1, 2)
    datasets.Dataset.from_dict({"prompt": ["p"], "day": [day]}).to_parquet(tmp_path / "rows.parquet")
    keys = {"rl": "grpo", "trl": {"reward_funcs": ["rewards.one"]}, "datasets": [{"path": "rows.parquet"}]}
    prepared = run(**keys)
    (shown,) = shown_rows(run.config, prepared, 1, tokens=False)
    assert shown == {"prompt": "p", "day": prepared.train[0]["day"]} == {"prompt": "p", "day": str(day)}


def test_kept_in_memory(run):
    rows = [pair(number) for number in range(3)]
    assert run(rows, dataset_keep_in_memory=True).train.cache_files == []
    assert run(rows, dataset_keep_in_memory=False).train.cache_files != []


LABELLED = {"prompt": "p", "completion": "c", "label": True}
PROCESS = {"process_reward_model": True}
STEPWISE = {"prompt": "p", "completions": ["a", "b"], "labels": [1, 0]}


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        ([LABELLED, LABELLED], {"rl": "kto"}, r"row 0 \(rows.jsonl:1\), 'label': it and all other rows \(2\)"),
        ([LABELLED, {**LABELLED, "completion": ""}], {"rl": "kto"}, r"row 1 \(rows.jsonl:2\), 'completion': expected"),
        ([pair(0), pair(1, rejected=None)], {"rl": "dpo"}, r"row 1 .*'rejected': expected text or a list"),
        ([pair(0), pair(1, rejected="")], {"rl": "orpo"}, r"row 1 \(rows.jsonl:2\), 'rejected': expected text"),
        ([STEPWISE, {**STEPWISE, "labels": [1]}], PROCESS, r"row 1 .*'labels': expected one label"),
        ([STEPWISE, {**STEPWISE, "completions": ["a", ""]}], PROCESS, r"row 1 .*'completions\[1\]'"),
    ],
)  # fmt: skip
def test_what_a_method_cannot_learn_from_stops_before_training_with_its_row(run, rows, keys, message):
    kind = {"type": "stepwise_supervised"} if "process_reward_model" in keys else {}
    with pytest.raises(UserError, match=rf"datasets\[0\] \(rows.jsonl\), {message}"):
        run(rows, **{"rl": None, **keys}, datasets=[{"path": "rows.jsonl", **kind}])


def test_a_column_of_a_prompt_may_have_any_name(run):
    columns = {"others": "x", "input_ids": 3, "loss_mask": [1.5], "completion_ids": "y", "labels": None}
    prepared = run(
        [{"prompt": "Why?", **columns}], rl="grpo", trl={"reward_funcs": ["r.f"]}, datasets=[{"path": "rows.jsonl"}]
    )
    assert {name: prepared.train[0][name] for name in columns} == columns


def labelled(*labels: bool) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"label": label} for label in labels])


@pytest.mark.parametrize("label", [True, False])
def test_rows_of_one_kind_are_refused_with_a_row(label):
    other = "kto_undesirable_weight" if label else "kto_desirable_weight"
    with pytest.raises(
        UserError, match=rf"datasets\[0\], row 3, 'label'.*\(2\) are labelled {str(label).lower()}.*{other}: 0"
    ):
        require_both_labels(labelled(label, label), KTO(), lambda: "datasets[0], row 3")


def test_a_kind_that_counts_for_nothing_may_be_missing():
    require_both_labels(labelled(True, True), KTO(undesirable_weight=0.0), lambda: "")
    with pytest.raises(UserError):
        require_both_labels(labelled(True, True), KTO(desirable_weight=0.0), lambda: "")


def test_both_kinds_and_other_methods_pass():
    require_both_labels(labelled(True, False), KTO(), lambda: "")
    require_both_labels(labelled(True, True), DPO(), lambda: "")


@pytest.mark.parametrize("rl", ["dpo", None])
def test_evaluation_rows_with_a_prompt_that_is_trained_on_are_counted(run, rl):
    rows = [{**pair(number), "prompt": f"question {number % 3}"} for number in range(12)]
    if rl is None:
        rows = [{"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": f"a{n}"}]}
                for n, row in enumerate(rows)]  # fmt: skip
    kind = "chatml.prompt_pairs" if rl else "chat_template"
    keys = {"rl": rl, "val_set_size": 4, "datasets": [{"path": "rows.jsonl", "type": kind}], "chat_template": "chatml"}
    shared = "datasets[0] (rows.jsonl), for evaluation: 4 rows read, 4 kept; 4 with a prompt that is trained on too"
    assert shared in run(rows, **keys).report.lines()
    distinct = run([pair(number) for number in range(12)], val_set_size=4)
    assert not any("trained on too" in line for line in distinct.report.lines())
