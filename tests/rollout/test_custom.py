"""Rollout functions that users write."""

import logging

import pytest
import torch

from light_rewards import unlike_texts
from made_rollouts import chat_model, logged, online_trainer
from made_tokenizers import byte_tokenizer
from upweight.errors import UserError
from upweight.methods import GRPO
from upweight.rollout.custom import CustomRollout
from upweight.types import Group, Sampling


def text_rollout(model, processing_class, prompts, generation_config=None):
    texts = []
    for prompt in prompts:
        text = processing_class.apply_chat_template(
            prompt.get("messages", []), processing_class=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        inputs = processing_class(text, return_tensors="pt").to(model.device)
        outputs = model.generate(**inputs, max_new_tokens=3, generation_config=generation_config)
        texts.append("so " + processing_class.decode(outputs[0][inputs.input_ids.shape[1] :], skip_special_tokens=True))
    return texts


def token_rollout(prompts, trainer):
    ids = [[10 + n % 3, 11, 12] for n, _ in enumerate(prompts)]
    return {
        "prompt_ids": [[1, 2]] * len(prompts),
        "completion_ids": ids,
        "logprobs": [[-1.0] * 3 for _ in ids],
        "env_mask": [[1, 0, 1] for _ in ids],
        "seen": [trainer is not None] * len(prompts),
    }


def test_a_text_function_writes_what_rewards_read_and_training_learns(tmp_path):
    method = GRPO(**{"num_generations": 4, "max_completion_length": 16})
    trainer = online_trainer(tmp_path, method=method, rollout_func=text_rollout, rewards=[unlike_texts], max_steps=2)
    trainer.processing_class.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    trainer.train()
    (group, *_) = trainer.rollouts.current.groups
    assert len(group.completions) == 4
    assert len({one.text for one in group.completions}) > 1
    end = trainer.processing_class.eos_token_id
    assert all(one.ids[-1] == end and one.finished for one in group.completions)


def rolled(function, limit):
    tokenizer = byte_tokenizer("chatml")
    groups = [Group(0, {"prompt": [{"role": "user", "content": "hi"}]}, [1, 2])]
    completion_source = CustomRollout(function, "mine.roll", chat_model(tokenizer), tokenizer)
    completion_source(groups, 2, Sampling(limit), None)
    return tokenizer, groups[0].completions


def test_a_text_above_the_limit_is_cut_and_not_counted_as_finished(caplog):
    logging.getLogger("upweight").propagate = True
    tokenizer, (short, long) = rolled(lambda model, processing_class, prompts: ["abc", "abcdefgh"], 4)
    assert (short.ids[-1], short.finished, short.text) == (tokenizer.eos_token_id, True, "abc")
    assert (len(long.ids), long.finished, long.text) == (4, False, "abcd")
    assert "wrote a completion of 8 tokens, above trl.max_completion_length (4): it is cut there" in caplog.text


def test_a_text_that_leaves_no_room_for_its_end_has_none():
    _, (one, _) = rolled(lambda model, processing_class, prompts: ["abcd", "ab"], 4)
    assert (len(one.ids), one.finished, one.text) == (4, False, "abcd")


@pytest.mark.parametrize(("mask", "finished"), [([1, 1, 1], [False, True]), ([1, 0, 1], [True, True])])
def test_tokens_of_the_policy_above_the_limit_are_kept_and_not_counted_as_finished(caplog, mask, finished):
    logging.getLogger("upweight").propagate = True
    end = byte_tokenizer("chatml").eos_token_id

    def function(prompts, trainer):
        ids = [[10, 11, end], [10, end]]
        return {"prompt_ids": [[1, 2]] * 2, "completion_ids": ids, "logprobs": None, "env_mask": [mask, [1, 1]]}

    _, found = rolled(function, 2)
    assert [one.finished for one in found] == finished
    assert [len(one.ids) for one in found] == [3, 2]
    assert ("it is kept whole" in caplog.text) != finished[0]


def test_a_token_function_says_what_is_trained_on(tmp_path):
    def extra(completion_ids, seen, **_):
        assert all(seen)
        return [float(ids[0]) for ids in completion_ids]

    trainer = online_trainer(tmp_path, rollout_func=token_rollout, rewards=[extra], max_steps=1)
    trainer.rollouts.producer.completion_source.trainer = trainer
    trainer.train()
    sample = trainer.rollouts.units[0].samples[0]
    assert sample.ids.tolist() == [1, 2, 10, 11, 12]
    assert sample.loss_mask.tolist() == [False, False, True, False, True]


def test_prompts_of_a_token_function_that_differ_are_each_kept(tmp_path):
    def one_prompt_each(prompts, trainer):
        numbers = range(len(prompts))
        return {
            "prompt_ids": [[1, 2, 20 + number, 30] for number in numbers],
            "completion_ids": [[40 + number, 41] for number in numbers],
            "logprobs": [[-1.0, -2.0] for _ in numbers],
        }

    read = []

    def reads(completion_ids, completions, **_):
        read.extend(zip(completion_ids, completions, strict=True))
        return [float(ids[0]) for ids in completion_ids]

    method = GRPO(**{"num_generations": 4, "max_completion_length": 6, "off_policy_mask_threshold": 0.1})
    trainer = online_trainer(tmp_path, method=method, rollout_func=one_prompt_each, rewards=[reads], max_steps=1)
    trainer.train()
    samples = [unit.samples[0] for unit in trainer.rollouts.units]
    assert [one.ids.tolist() for one in samples] == [[1, 2, 20 + n, 30, 40 + n, 41] for n in range(8)]
    assert all(one.loss_mask.tolist() == [False] * 4 + [True] * 2 for one in samples)
    assert all(one.sampler_logps.tolist() == [-1.0, -2.0] for one in samples)
    decode = trainer.processing_class.decode
    assert read == [([40 + n, 41], decode([40 + n, 41])) for n in range(8)]
    assert logged(trainer)[0]["completions/max_length"] == 2


@pytest.mark.parametrize(("threshold", "kept"), [(None, None), (0.1, [-1.0, -1.0])])
def test_log_probs_of_a_token_function_say_how_far_a_sequence_drifted(tmp_path, threshold, kept):
    method = GRPO(**{"num_generations": 4, "max_completion_length": 6, "off_policy_mask_threshold": threshold})
    trainer = online_trainer(tmp_path, method=method, rollout_func=token_rollout, max_steps=1)
    trainer.train()
    sampler_logps = trainer.rollouts.units[0].samples[0].sampler_logps
    assert (sampler_logps if kept is None else sampler_logps.tolist()) == kept


def test_a_run_with_a_rollout_function_resumes(tmp_path):
    options = {"rollout_func": token_rollout, "wanted": 16, "save_strategy": "steps", "save_steps": 1}
    trainer = online_trainer(tmp_path, max_steps=1, **options)
    trainer.train()
    later = online_trainer(tmp_path, max_steps=2, **options)
    later.rollouts.restore(tmp_path / "checkpoint-1")
    assert [unit.samples[0].ids.tolist() for unit in later.rollouts.units] == [
        unit.samples[0].ids.tolist() for unit in trainer.rollouts.units
    ]


def ran(folder, function):
    online_trainer(folder, rollout_func=function, max_steps=1).train()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("text", "must return a list of strings, got str"),
        ([1, 2], "must return a list of strings"),
        (["one"], "returned 1 texts for 8 prompts"),
    ],
)
def test_wrong_texts_are_named(tmp_path, answer, says):
    with pytest.raises(UserError, match=says):
        ran(tmp_path, lambda model, processing_class, prompts: answer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: ["text"], "must return a dict with prompt_ids, completion_ids, logprobs, got list"),
        (lambda found: {"completion_ids": []}, "got keys"),
        (lambda found: {**found, "completion_ids": [[1]]}, "returned 1 'completion_ids' for 8 prompts"),
        (lambda found: {**found, "env_mask": [[1]] * 8}, "completion 0: 1 'env_mask' for 3 tokens"),
        (lambda found: {**found, "logprobs": [[-1.0]] * 8}, "completion 0: 1 'logprobs' for 3 tokens"),
    ],
)
def test_wrong_tokens_are_named(tmp_path, change, says):
    with pytest.raises(UserError, match=says):
        ran(tmp_path, lambda prompts, trainer: change(token_rollout(prompts, trainer)))


def test_errors_and_other_signatures_are_named(tmp_path):
    def failing(prompts, trainer):
        raise RuntimeError("no server")

    with pytest.raises(UserError, match="'failing' failed: RuntimeError: no server"):
        ran(tmp_path, failing)
    with pytest.raises(UserError, match=r"takes \(a\)\. Write it as"):
        CustomRollout(lambda a: a, "mine", torch.nn.Linear(1, 1), None)


@pytest.mark.parametrize(("temperature", "sampled"), [(0.0, False), (0.7, True)])
def test_a_text_function_is_told_to_sample_unless_the_temperature_is_zero(temperature: float, sampled: bool):
    given = []

    def write(model, processing_class, prompts, generation_config=None):
        given.append(generation_config)
        return [""] * len(prompts)

    tokenizer = byte_tokenizer()
    group = Group(0, {"prompt": "a"}, [5])
    CustomRollout(write, "write", chat_model(tokenizer), tokenizer)([group], 2, Sampling(3, temperature), None)
    (config,) = given
    assert (config.do_sample, config.max_new_tokens) == (sampled, 3)
    assert config.temperature == (0.7 if sampled else None)
