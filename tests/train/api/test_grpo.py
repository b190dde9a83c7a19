import gc
import json
import logging
import math
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ProgressCallback,
    Trainer,
    TrainerCallback,
)

from parity_script import TEMPLATE, made_tokenizer, said, write_model
from upweight import GRPOConfig, GRPOTrainer
from upweight.errors import UserError
from upweight.heartbeat import VARIABLE

COMMON = {
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
}
OWN = ("reward_processing_classes", "rollout_func", "tools", "environment_factory")
ROWS = [{"prompt": said("user", f"{n} + 1?"), "answer": str(n + 1)} for n in range(6)]


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model", made_tokenizer(TEMPLATE), trainer="GRPO")
    return tmp_path


def vowels():
    """A reward that stays in this process, as a closure does."""

    def vowels(completions, **kwargs):
        return [float(sum(letter in "aeiou" for letter in text_of(answer))) for answer in completions]

    return vowels


def early():
    def early(completions, **kwargs):
        return [sum(character < "a" for character in text_of(answer)) / 6 for answer in completions]

    return early


def text_of(answer):
    return answer if isinstance(answer, str) else answer[0]["content"]


def grpo(folder, model=None, reward_funcs=None, *, rows=None, eval_dataset=None, peft_config=None, **config):
    own = {name: config.pop(name) for name in OWN if name in config}
    return GRPOTrainer(
        model or str(folder / "model"),
        vowels() if reward_funcs is None else reward_funcs,
        args=GRPOConfig(output_dir=str(folder / "out"), **{**COMMON, **config}),
        train_dataset=ROWS if rows is None else rows,
        eval_dataset=eval_dataset,
        processing_class=made_tokenizer(TEMPLATE),
        peft_config=peft_config,
        **own,
    )


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def test_an_interrupt_between_the_calls_of_an_evaluation_leaves_it_and_saves(folder, monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    trainer = grpo(folder, eval_dataset=ROWS, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8)
    calls, sample = [], trainer.rollouts.producer._sample_groups

    def sampled(rows, numbers, count, round_, state):
        calls.append(round_)
        if round_[0] == 2**31:  # of an evaluation
            signal.raise_signal(signal.SIGINT)
        return sample(rows, numbers, count, round_, state)

    monkeypatch.setattr(trainer.rollouts.producer, "_sample_groups", sampled)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 1, which is saved"):
        trainer.train()
    assert [round_ for round_ in calls if round_[0] == 2**31] == [(2**31, 0)]
    assert (folder / "out" / "checkpoint-1" / "whole.json").is_file()


def test_data_seed_orders_the_prompts(folder):
    def order(**seeds):
        return grpo(folder, **seeds).rollouts.producer.order.take(len(ROWS))

    assert order(seed=1, data_seed=5) == order(seed=5) != order(seed=1)


def history(trainer, *names):
    return [tuple(entry[name] for name in names) for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


def test_no_more_of_the_trainer_is_overridden_than_needed():
    ours = {name for name in vars(GRPOTrainer) if hasattr(Trainer, name)}
    assert ours - {"__doc__", "__module__", "__annotations__"} == {"__init__", "train"}


def test_rewards_rise(folder):
    trainer = grpo(folder, reward_funcs=early(), learning_rate=3e-2, max_steps=24, num_generations=8)
    trainer.train()
    rewards = [reward for (reward,) in history(trainer, "reward")]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3


def test_resume_equals_the_uninterrupted_run(folder):
    """Also in the midst of a rollout, with rows of another epoch to come."""
    keys = {"num_iterations": 3, "max_steps": 10, "save_strategy": "steps", "save_steps": 4}
    whole = grpo(folder, **keys)
    whole.train()
    kept = weights(whole)
    (folder / "elsewhere").mkdir()
    for step in (4, 10):
        (folder / "out" / f"checkpoint-{step}").rename(folder / "elsewhere" / f"checkpoint-{step}")
    for checkpoint, start in ((True, 8), (str(folder / "elsewhere" / "checkpoint-4"), 4)):  # which sets 8 aside
        resumed = grpo(folder, **{**keys, "save_strategy": "no"})
        resumed.train(resume_from_checkpoint=checkpoint)
        steps = slice(start, None)
        names = ("loss", "grad_norm", "entropy")
        found, right = (torch.tensor(history(trainer, *names)[steps]) for trainer in (resumed, whole))
        torch.testing.assert_close(found, right)
        torch.testing.assert_close(weights(resumed), kept)
    with pytest.raises(UserError, match="has no rollouts"):
        resumed.train(resume_from_checkpoint=str(folder / "model"))


def test_the_progress_bar_of_a_training_that_fails_is_closed(folder):
    def broken(completions, **kwargs):
        raise ZeroDivisionError

    trainer = grpo(folder, reward_funcs=broken, max_steps=2, disable_tqdm=False)
    bars = []

    class Watcher(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            found = (one for one in trainer.callback_handler.callbacks if isinstance(one, ProgressCallback))
            bars.extend(one.training_bar for one in found)

    trainer.add_callback(Watcher())
    with pytest.raises(UserError):
        trainer.train()
    assert [bar.disable for bar in bars] == [True]  # as a closed bar is


def test_tokens_of_completions_that_are_trained_on_again_count_once(folder):
    trainer = grpo(folder, num_iterations=2, max_steps=4)
    trainer.train()
    tokens = [count for (count,) in history(trainer, "num_tokens")]
    first, again, second, last = tokens
    assert trainer.rollouts.producer.plan.steps_per_pass == 1
    assert 0 < first == again < second == last == trainer.rollouts.producer.tokens


def test_a_prepared_model_is_taken_as_it_is(folder):
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), lora())
    trainer = grpo(folder, adapted, max_steps=2, beta=0.1)
    assert trainer.model is adapted
    frozen = {name: p.clone() for name, p in adapted.named_parameters() if not p.requires_grad}
    trainer.train()
    assert all(torch.equal(p, frozen[name]) for name, p in adapted.named_parameters() if name in frozen)
    assert any(p.any() for name, p in adapted.named_parameters() if "lora_B" in name)
    first, second = (kl for (kl,) in history(trainer, "kl"))
    assert abs(first) < 1e-6 < second
    trainer.save_model(str(folder / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    again = PeftModel.from_pretrained(base, folder / "adapter")
    ids = torch.tensor([[40, 41, 42]])
    torch.testing.assert_close(again(ids).logits, adapted(ids).logits)


def test_a_reference_that_follows_stays_near(folder):
    def last_kl(**config):
        trainer = grpo(folder, beta=0.05, max_steps=4, **config)
        trainer.train()
        return history(trainer, "kl")[-1][0]

    assert last_kl(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0) < 1e-6
    assert last_kl() > 1e-3


def test_reward_models_functions_and_weights_together(folder):
    tokenizer = made_tokenizer(TEMPLATE)
    write_model(folder / "judge", tokenizer, trainer="Reward")
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "judge")
    trainer = grpo(
        folder,
        reward_funcs=[judge, str(folder / "judge"), vowels()],
        reward_processing_classes=[tokenizer, None, None],
        reward_weights=[1.0, 0.0, 0.5],
        max_steps=1,
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["rewards/judge/mean"] == pytest.approx(log["rewards/judge_2/mean"], abs=1e-5)
    assert log["reward"] == pytest.approx(log["rewards/judge/mean"] + 0.5 * log["rewards/vowels/mean"], abs=1e-5)


def test_evaluation_while_training_and_afterwards(folder):
    trainer = grpo(
        folder,
        eval_dataset={"few": ROWS[:2], "one": Dataset.from_list(ROWS[4:5])},
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
        num_generations_eval=2,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_few_reward" in entry]
    assert len(logged) == 2
    assert {"eval_few_rewards/vowels/pass@2", "eval_few_completions/mean_length"} <= logged[0].keys()
    assert trainer.evaluate()["eval_one_reward"] == trainer.evaluate(ROWS[4:5])["eval_reward"]


def test_in_bfloat16_sampling_works_before_between_and_after(folder):
    trainer = grpo(folder, bf16=True, max_steps=2)
    before = trainer.generate_completions(ROWS[:1])
    trainer.train()
    after = trainer.generate_completions(ROWS[:1])
    assert before != after
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    kept = weights(trainer)
    trainer.train()
    assert not torch.equal(weights(trainer), kept)


@pytest.mark.gpu
def test_on_a_gpu_sampling_follows_weights_that_move(folder):
    """Graphs hold the addresses of weights, which change where a training begins and ends."""
    # Heads as wide as trees need on a GPU.
    write_model(folder / "model", made_tokenizer(TEMPLATE), trainer="GRPO", hidden_size=64)
    trainer = grpo(folder, None, early(), bf16=True, max_steps=2, peft_config=lora(), eval_dataset=ROWS[:2])
    for _ in range(2):
        before = trainer.generate_completions(ROWS[:1])
        trainer.train()
        assert trainer.generate_completions(ROWS[:1]) != before
        assert math.isfinite(trainer.evaluate()["eval_reward"])


def test_weights_in_8_bits_follow_the_training_of_a_script(folder):
    trainer = grpo(folder, max_steps=4, sampler_quantization="int8")
    trainer.train()
    gaps, ratios = (history(trainer, f"sampling/{name}") for name in ("logp_gap", "importance_sampling_ratio/max"))
    assert len(gaps) == len(ratios) == 4
    assert all(1e-4 < gap < 0.05 for (gap,) in gaps)
    assert all(ratio > 1 for (ratio,) in ratios)


def test_generate_completions_takes_slices_lists_and_rows(folder, capsys):
    trainer = grpo(folder, reward_funcs=[vowels(), early()], reward_weights=[1.0, 2.0])
    rows = Dataset.from_list(ROWS)
    found = trainer.generate_completions(rows[:2], num_generations=3)
    assert found == trainer.generate_completions(ROWS[:2], num_generations=3)
    assert found == trainer.generate_completions(rows.select([0, 1]), num_generations=3)
    assert [row["prompt"] for row in found] == [ROWS[0]["prompt"]] * 3 + [ROWS[1]["prompt"]] * 3
    assert found[0]["reward"] == pytest.approx(found[0]["rewards"]["vowels"] + 2 * found[0]["rewards"]["early"])
    assert len(trainer.generate_completions(rows[0])) == COMMON["num_generations"]
    assert len(trainer.generate_completions({"prompt": "Why?", "answer": "1"}, num_generations=1)) == 1
    assert "3 + 1?" not in "".join(capsys.readouterr())
    echoed = []
    found._repr_pretty_(SimpleNamespace(text=echoed.append), cycle=False)  # as IPython shows what a cell ends with
    assert echoed == ["6 completions, each with prompt, completion, rewards, finished, reward"]


def test_prompts_are_cut_from_the_left_and_counted(folder, caplog):
    long = [{"prompt": "x" * 30 + "end"}, {"prompt": "short"}]
    with caplog.at_level(logging.WARNING, "upweight"):
        trainer = grpo(folder, rows=long, max_prompt_length=10)
    assert trainer.processing_class.decode(trainer.train_rows[0]["prompt_ids"]) == "x" * 7 + "end"
    assert trainer.train_rows[0]["prompt"] == "x" * 30 + "end"
    assert "train_dataset: 2 rows read, 2 kept; 1 prompt cut to max_prompt_length" in caplog.text


def test_chat_template_kwargs_reach_the_template(folder):
    tokenizer = made_tokenizer("{{ mark }}" + TEMPLATE, bos=False)
    args = GRPOConfig(output_dir=str(folder / "out"), chat_template_kwargs={"mark": "!!"}, **COMMON)
    trainer = GRPOTrainer(str(folder / "model"), vowels(), args, ROWS, processing_class=tokenizer)
    assert tokenizer.decode(trainer.train_rows[0]["prompt_ids"]).startswith("!!")


def test_completions_are_written_only_if_asked(folder):
    grpo(folder, max_steps=1).train()
    assert not (folder / "out" / "completions").exists()
    trainer = grpo(folder, max_steps=3, log_completions=True, num_completions_to_print=1)
    trainer.train()
    files = sorted((folder / "out" / "completions").iterdir())
    assert [file.name for file in files] == ["step_00001.jsonl", "step_00002.jsonl", "step_00003.jsonl"]
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len(rows) == COMMON["per_device_train_batch_size"]
    assert sum(row["rewards"]["vowels"] for row in rows) / 8 == pytest.approx(trainer.state.log_history[0]["reward"])


def test_reward_processes_end_with_training_and_with_the_trainer(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    module = f"rewards_{folder.name}".replace("-", "_")
    (folder / f"{module}.py").write_text(
        "import os\n\n\ndef number(completions, **kwargs):\n    return [float(os.getpid())] * len(completions)\n"
    )
    function = getattr(__import__(module), "number")  # noqa: B009
    trainer = grpo(folder, reward_funcs=function, max_steps=1)
    trainer.train()
    trained_by = int(trainer.state.log_history[0]["reward"])
    shown_by = int(trainer.generate_completions(ROWS[:1])[0]["reward"])
    assert len({os.getpid(), trained_by, shown_by}) == 3
    assert not is_running(trained_by)
    assert is_running(shown_by)
    del trainer
    gc.collect()
    assert not is_running(shown_by)
    sys.modules.pop(module)


def is_running(number):
    for _ in range(50):
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.02)
    return True


def test_rollout_functions_in_both_forms(folder):
    trainers = []

    def with_tokens(prompts, trainer):
        trainers.append(trainer)
        ids = [[65, 66, number % 7 + 60] for number in range(len(prompts))]
        return {"prompt_ids": [[40, 41]] * len(prompts), "completion_ids": ids, "logprobs": None, "extra": ids}

    def with_text(model, processing_class, prompts, generation_config=None):
        return ["ae" * (number % 3) for number in range(len(prompts))]

    seen = []

    def columns(completions, extra, **kwargs):
        seen.append(len(extra))
        return [float(one[-1]) for one in extra]

    trainer = grpo(
        folder, reward_funcs=[columns], rows=[{"prompt": "a", "extra": 0}], rollout_func=with_tokens, max_steps=1
    )
    trainer.train()
    assert trainers == [trainer]
    assert seen == [8]
    trainer = grpo(folder, rollout_func=with_text, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/vowels/mean"] == pytest.approx((2 * 3 + 4 * 2) / 8)


def test_order_and_optimizer_are_the_scripts(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    seen = []

    def note(prompts, completions, **kwargs):
        seen.extend(re.match(r"\d", prompt[0]["content"])[0] for prompt in prompts[:: COMMON["num_generations"]])
        return [float(number) for number in range(len(prompts))]

    args = GRPOConfig(output_dir=str(folder / "out"), shuffle_dataset=False, max_steps=4, **COMMON)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = GRPOTrainer(model, note, args, ROWS, optimizers=(optimizer, schedule))
    trainer.train()
    assert seen == [*"012345", *"01"]
    assert torch.equal(weights(trainer), start)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward_funcs": []}, "reward_funcs: empty"),
        ({"reward_funcs": 3}, "reward_funcs: a int"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights: 2 weights for 1 reward"),
        ({"rows": [{"question": "a"}]}, "train_dataset, row 0, 'prompt'"),
        ({"rows": iter([])}, "train_dataset: expected"),
        ({"reward_funcs": lambda completions, answers_of: [0.0]}, "needs the column 'answers_of'"),
    ],
)
def test_wrong_inputs_are_named_before_the_model_is_loaded(change, words, folder):
    with pytest.raises(UserError, match=words):
        grpo(folder, str(folder / "model"), **change)


class Counting:
    """Lets the policy go on once, and rewards it by the row."""

    def reset(self, answer, **row):
        self.answer, self.turns = answer, 0
        return "think!"

    def step(self, text):
        self.turns += 1
        return "again" if self.turns < 2 else None

    def get_reward(self):
        return float(self.answer)


def shout(text: str) -> str:
    """Say it loudly.

    Args:
        text: what to say.
    """
    return text.upper()


def test_environments_and_tools_take_part_by_the_names_that_scripts_know(folder):
    config = {
        "max_steps": 2,
        "generation_kwargs": {"stop_token_ids": list(range(0, 300, 2))},
        "max_completion_length": 40,
    }
    trainer = grpo(folder, environment_factory=Counting, tools=[shout], max_tool_calling_iterations=4, **config)
    trainer.train()
    (first, *_) = [row for row in trainer.state.log_history if "loss" in row]
    assert first["environment/turns_max"] == 2
    assert first["environment/masked"] == 0
    assert first["rewards/reward_env/mean"] > 0
    assert "rewards/vowels/mean" in first
    shown = trainer.generate_completions(ROWS[:1], 2)
    assert [message["role"] for message in shown[0]["completion"]] == ["assistant", "user", "assistant"]
    trainer.rollouts.close()


def test_an_environment_may_give_the_only_reward(folder):
    trainer = grpo(
        folder, reward_funcs=[], environment_factory={"count": Counting}, rows=[{**ROWS[0], "environment": "count"}]
    )
    assert trainer.rollouts.producer.scorer.names == ["reward_env"]
    with pytest.raises(UserError, match="reward_funcs: empty"):
        grpo(folder, reward_funcs=[], tools=[shout])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tools": [print]}, "tools: 'print' cannot be described to the model"),
        ({"tools": [shout], "rollout_func": lambda prompts, trainer: {}}, "rollout_func: cannot be used with 'tools'"),
        ({"rollout_func": 3}, "rollout_func: 'int' is no Python function. Write it as"),
        ({"tools": 3}, "tools: expected a list of functions, got int"),
        ({"environment_factory": 3}, "environment_factory: expected a class, .* got int"),
        ({"environment_factory": dict}, "environment_factory: dict has no method 'reset"),
    ],
)
def test_tools_and_environments_that_cannot_work_are_named(given, words, folder):
    with pytest.raises(UserError, match=words):
        grpo(folder, **given)


def test_a_reward_that_does_not_apply_is_no_number(folder):
    trainer = grpo(
        folder, reward_funcs=[vowels(), lambda completions, **kwargs: [None] * len(completions)], max_steps=1
    )
    found = trainer.generate_completions(ROWS[:1])
    assert found[0]["rewards"] == {"vowels": found[0]["reward"], "<lambda>": None}
    assert math.isfinite(found[0]["reward"])


def test_the_tokenizer_of_the_model_serves(folder):
    trainer = GRPOTrainer(str(folder / "model"), vowels(), GRPOConfig(output_dir=str(folder / "out"), **COMMON), ROWS)
    assert trainer.processing_class.chat_template == AutoTokenizer.from_pretrained(folder / "model").chat_template


def test_a_script_says_what_it_waits_for(folder, monkeypatch, caplog):
    def sleeps(completions, **kwargs):
        time.sleep(2)
        return [float(len(text_of(answer))) for answer in completions]

    monkeypatch.setenv(VARIABLE, "0.5")
    grpo(folder, reward_funcs=sleeps, max_steps=1).train()
    lines = [record.message for record in caplog.records if record.message.startswith("no progress for")]
    assert any("waiting for a rollout; scoring by sleeps" in line for line in lines)


def test_an_argument_without_its_switch_is_reported(folder, caplog):
    grpo(folder, vllm_tensor_parallel_size=2)
    assert "vllm_tensor_parallel_size: no effect on training without 'use_vllm=True'" in caplog.text
