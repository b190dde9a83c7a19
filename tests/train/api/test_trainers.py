import copy
import math
from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    TrainerCallback,
)

import upweight
from parity_script import GOOD, QUESTIONS, ROWS, TEMPLATE, made_tokenizer, said, write_model
from upweight import (
    DPOConfig,
    DPOTrainer,
    GRPOTrainer,
    ORPOConfig,
    ORPOTrainer,
    PRMConfig,
    PRMTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from upweight.errors import UserError
from upweight.log import _warned
from upweight.models.memory import HEAD_CHUNK

COMMON = {
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
}
IDS = torch.tensor([[40, 41, 42, 43]])
STEPS = [
    {"prompt": question, "completions": ["One.", "Two."], "labels": [True, number % 2 == 0]}
    for number, question in enumerate(QUESTIONS)
]


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model", made_tokenizer(TEMPLATE), trainer="DPO")
    return tmp_path


def dpo(folder, model=None, *, eval_dataset=None, peft_config=None, ref_model=None, **config):
    return DPOTrainer(
        model or str(folder / "model"),
        ref_model=ref_model,
        args=DPOConfig(output_dir=str(folder / "out"), **{**COMMON, **config}),
        train_dataset=ROWS["pairs"],
        eval_dataset=eval_dataset,
        processing_class=made_tokenizer(TEMPLATE),
        peft_config=peft_config,
    )


def lora(**options):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_a_lora_script_from_training_to_merged_weights(folder):
    trainer = dpo(folder, peft_config=lora(), eval_dataset=ROWS["pairs"][:2], eval_strategy="steps", eval_steps=1)
    result = trainer.train()
    assert result.global_step == trainer.state.global_step == 6
    assert {"loss", "grad_norm", "learning_rate", "rewards/margins"} <= trainer.state.log_history[0].keys()
    assert {"eval_loss", "eval_rewards/accuracies"} <= trainer.state.log_history[1].keys()
    assert trainer.args.gradient_accumulation_steps == 1
    trainer.save_model(str(folder / "adapter"))
    merged = trainer.model.merge_and_unload()
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    start = logits(base)
    again = PeftModel.from_pretrained(base, folder / "adapter")
    torch.testing.assert_close(logits(merged), logits(again))
    assert (logits(merged) - start).abs().max() > 1e-3
    merged.save_pretrained(folder / "merged")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder / "merged")), logits(merged))


def test_data_seed_orders_the_rows_and_is_the_seed_where_it_is_left_out(folder):
    def order(**seeds):
        trainer = dpo(folder, per_device_train_batch_size=1, **seeds)
        trainer.get_train_dataloader()
        return [trainer.sampler.rows_of(step) for step in range(len(ROWS["pairs"]))]

    assert order(seed=1, data_seed=5) == order(seed=2, data_seed=5) == order(seed=5)
    assert order(seed=1, data_seed=5) != order(seed=1)


def test_a_saved_model_and_tokenizer_load(folder):
    trainer = dpo(folder, num_train_epochs=1)
    trainer.train()
    trainer.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(folder / "out")
    torch.testing.assert_close(logits(loaded), logits(trainer.model))
    assert AutoTokenizer.from_pretrained(folder / "out").chat_template == TEMPLATE
    assert (
        loaded.generate(IDS, max_new_tokens=2, do_sample=False).tolist()
        == trainer.model.generate(IDS, max_new_tokens=2, do_sample=False).tolist()
    )


def test_accumulation_only_fixes_the_batch(folder):
    whole, cut = dpo(folder), dpo(folder, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    for trainer in (whole, cut):
        trainer.train()
    assert losses(cut) == pytest.approx(losses(whole), abs=1e-6)


def test_models_as_objects_and_the_reference_at_their_start(folder):
    by_name, model = dpo(folder), AutoModelForCausalLM.from_pretrained(folder / "model")
    by_object = dpo(folder, model)
    for trainer in (by_name, by_object):
        trainer.train()
    assert by_object.model is model
    assert losses(by_object) == pytest.approx(losses(by_name), abs=1e-6)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), lora())
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    continued = dpo(folder, adapted)
    continued.train()
    assert losses(continued)[0] == pytest.approx(math.log(2), abs=1e-6)


def test_a_reference_of_its_own(folder):
    reference = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.5)
    trainer = dpo(folder, ref_model=reference)
    trainer.train()
    assert abs(losses(trainer)[0] - math.log(2)) > 1e-2
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with pytest.raises(UserError, match="ref_model"):
        dpo(folder, model, ref_model=model)


def test_in_bfloat16_the_model_is_plain_again_after_training(folder):
    trainer = dpo(folder, bf16=True, num_train_epochs=1)
    trainer.train()
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    assert {weight.dtype for weight in before.values()} == {torch.float32}
    copy.deepcopy(trainer.model)
    assert logits(trainer.model).dtype == torch.float32
    trainer.train()
    assert any((weight != before[name]).any() for name, weight in trainer.model.named_parameters())
    trainer.save_model(str(folder / "half"))
    assert AutoModelForCausalLM.from_pretrained(folder / "half").dtype == torch.bfloat16


def test_an_adapter_keeps_its_dropout(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attention_dropout=0.1)
    dropouts = {name: m.p for name, m in dpo(folder, model, peft_config=lora(lora_dropout=0.3)).model.named_modules()
                if isinstance(m, torch.nn.Dropout)}  # fmt: skip
    assert set(dropouts.values()) == {0.3}
    assert all(layer.self_attn.attention_dropout == 0 for layer in model.model.layers)


def test_evaluate_takes_raw_rows_and_several_sets(folder):
    trainer = dpo(folder, eval_dataset={"a": ROWS["pairs"][:3], "b": Dataset.from_list(ROWS["pairs"][3:])})
    assert {"eval_a_loss", "eval_b_loss"} <= trainer.evaluate().keys()
    assert trainer.evaluate(ROWS["pairs"])["eval_loss"] == pytest.approx(math.log(2))
    assert "test_loss" in trainer.evaluate(ROWS["pairs"], metric_key_prefix="test")


def test_resume_takes_up_a_reference_that_moves(folder):
    moving = {"sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 4, "save_strategy": "steps"}
    whole = dpo(folder, save_steps=2, **moving)
    whole.train()
    resumed = dpo(folder, save_steps=2, **moving)
    resumed.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-6)


def test_callbacks_and_optimizers_are_the_scripts(folder):
    seen = []

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.global_step)

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    start = logits(model)
    args = SFTConfig(output_dir=str(folder / "out"), **COMMON)
    trainer = SFTTrainer(
        model,
        args=args,
        train_dataset=Dataset.from_list(ROWS["text"]),
        processing_class=made_tokenizer(TEMPLATE),
        callbacks=[Count()],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
    )
    trainer.train()
    assert seen == [1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(logits(model), start)


def test_bfloat16_follows_an_optimizer_of_the_script(folder):
    def curve(own):
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if own else None
        args = SFTConfig(
            output_dir=str(folder / "out"),
            bf16=True,
            **{**COMMON, "optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.1},
        )
        trainer = SFTTrainer(
            model,
            args=args,
            train_dataset=ROWS["text"],
            processing_class=made_tokenizer(TEMPLATE),
            optimizers=(optimizer, None),
        )
        trainer.train()
        return losses(trainer)

    assert curve(own=True) == curve(own=False)
    assert curve(own=True)[-1] < curve(own=True)[0]


@pytest.mark.parametrize(("optim", "each"), [("adamw_torch", 12), ("sgd", 4)])
def test_activations_are_kept_beside_what_the_optimizer_takes(folder, optim, each):
    model = dpo(folder, optim=optim, gradient_checkpointing=True).model
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert model.__dict__["_activation_budget"].reserved == each * trained + HEAD_CHUNK


def test_rows_that_were_cut_are_counted_by_the_argument_that_cut_them(folder, caplog):
    dpo(folder, max_length=16)
    assert "train_dataset: 8 rows read, 8 kept; " in caplog.text
    assert "max_length" in caplog.text
    assert "sequence_len" not in caplog.text


def test_formatting_func_writes_the_text(folder):
    def trained(**rows):
        args = SFTConfig(output_dir=str(folder / "out"), **COMMON)
        trainer = SFTTrainer(str(folder / "model"), args=args, **rows)
        trainer.train()
        return losses(trainer)

    columns = [{"q": question, "a": good} for question, good in zip(QUESTIONS, GOOD, strict=True)]
    text = {
        "train_dataset": columns,
        "eval_dataset": columns[:2],
        "formatting_func": lambda row: f"{row['q']} {row['a']}",
    }
    assert trained(**text) == trained(train_dataset=ROWS["text"])
    with pytest.raises(UserError, match=r"formatting_func: gets one row and returns its text, but returned \['a'\]"):
        trained(train_dataset=columns, formatting_func=lambda rows: ["a"])
    with pytest.raises(UserError, match=r"train_dataset: formatting_func failed: KeyError: 'text' \(test_"):
        trained(train_dataset=columns, formatting_func=lambda row: row["text"])


def test_a_row_without_messages_is_named_with_what_leaves_it_out(folder):
    rows = [{"messages": said("user", "a") + said("assistant", "b")}, {"messages": None}]
    with pytest.raises(UserError, match=r"row 1, .*`filter\(lambda row: row\['messages'\]\)` of the dataset"):
        SFTTrainer(str(folder / "model"), args=SFTConfig(output_dir=str(folder / "out")), train_dataset=rows)


def test_the_empty_column_of_a_row_is_named(folder):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}]
    with pytest.raises(
        UserError, match=r"row 1, 'completion'.* Its 'completion' is empty: `filter\(lambda row: row\['com"
    ):
        SFTTrainer(str(folder / "model"), args=SFTConfig(output_dir=str(folder / "out")), train_dataset=rows)


def test_a_rate_that_is_far_off_is_said_once_with_what_is_trained(folder, caplog):
    _warned.clear()
    dpo(folder, learning_rate=0.5, peft_config=lora())
    (said_once,) = [record.message for record in caplog.records if "learning_rate" in record.message]
    assert "with a `peft_config`" in said_once


def test_rows_are_shuffled_only_if_asked(folder):
    def order(**config):
        args = SFTConfig(output_dir=str(folder / "out"), train_sampling_strategy="sequential", **config, **COMMON)
        trainer = SFTTrainer(str(folder / "model"), args=args, train_dataset=ROWS["text"])
        return [row["input_ids"] for batch in trainer.get_train_dataloader().batch_sampler for row in
                [trainer.train_dataset[number] for number in batch]]  # fmt: skip

    rows = order()
    assert order() == rows != order(shuffle_dataset=True)
    assert sorted(order(shuffle_dataset=True)) == sorted(rows)


@pytest.mark.parametrize("trainer_class", [RewardTrainer, PRMTrainer])
def test_a_fresh_head_depends_on_the_seed_alone(trainer_class, folder):
    config, rows = (RewardConfig, ROWS["pairs"]) if trainer_class is RewardTrainer else (PRMConfig, STEPS)

    def head(seed):
        args = config(output_dir=str(folder / "out"), seed=seed, **COMMON)
        trainer = trainer_class(str(folder / "model"), args=args, train_dataset=rows)
        weight = trainer.model.score.weight.detach().clone()
        trainer.train()
        return weight, losses(trainer)

    torch.manual_seed(1)
    first, curve = head(3)
    torch.manual_seed(2)
    again, same_curve = head(3)
    assert torch.equal(first, again)
    assert curve == same_curve
    assert not torch.equal(first, head(4)[0])
    assert curve[-1] < curve[0]


@pytest.mark.parametrize("given", ["name", "object"])
def test_step_labels_have_to_fit_the_head(given, folder):
    rows = [{**row, "labels": [2 for _ in row["labels"]]} for row in STEPS]
    options = {"num_labels": 3} if given == "name" else None
    args = PRMConfig(output_dir=str(folder / "out"), model_init_kwargs=options, **COMMON)
    model = str(folder / "model")
    if given == "object":
        model = AutoModelForTokenClassification.from_pretrained(model, num_labels=3)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = PRMTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    assert trainer.model.score.out_features == 3
    plain = PRMConfig(output_dir=str(folder / "out"), **COMMON)
    with pytest.raises(UserError, match=r"class number below 2 \(num_labels\)"):
        PRMTrainer(str(folder / "model"), args=plain, train_dataset=rows)


def test_a_saved_reward_model_scores_padded_batches_as_it_was_trained(folder):
    args = RewardConfig(output_dir=str(folder / "out"), **COMMON)
    trainer = RewardTrainer(str(folder / "model"), args=args, train_dataset=ROWS["pairs"])
    trainer.save_model()
    model = AutoModelForSequenceClassification.from_pretrained(folder / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    texts = ["Why?<|im_end|>", "How many of them are there?<|im_end|>"]
    padded = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    alone = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
    torch.testing.assert_close(padded, torch.stack(alone))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_dataset": [{"prompt": "a", "chosen": "b"}]}, "train_dataset, row 0, 'rejected'"),
        ({"train_dataset": iter([])}, "train_dataset: expected"),
        ({"train_dataset": ROWS["pairs"], "peft_config": LoraConfig(), "adapted": True}, "peft_config"),
        ({"train_dataset": ROWS["pairs"], "processing_class": "name"}, "processing_class"),
        ({"train_dataset": ROWS["pairs"], "model": 3}, "model: expected a name, .*, got int"),
        ({"train_dataset": ROWS["pairs"], "ref_model": 3}, "ref_model: expected a name, .*, got int"),
        ({"train_dataset": ROWS["pairs"], "peft_config": 3}, "peft_config: expected .* got int"),
        ({"train_dataset": ROWS["pairs"], "callbacks": 3}, "callbacks: expected a list .* got int"),
        ({"train_dataset": ROWS["pairs"], "optimizers": 3}, "optimizers: expected .* got int"),
        ({"train_dataset": ROWS["pairs"], "formatting_func": 3}, "formatting_func: expected a function .* got int"),
    ],
)
def test_wrong_inputs_are_named(change, message, folder):
    model = change.pop("model", str(folder / "model"))
    if change.pop("adapted", False):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora())
    with pytest.raises(UserError, match=message):
        DPOTrainer(model, args=DPOConfig(output_dir=str(folder / "out"), **COMMON), **change)


def test_arguments_of_loading_may_be_fields_of_the_config_and_are_named_where_they_are_neither(folder):
    assert dpo(folder, model_init_kwargs={"use_cache": False}).model.config.use_cache is False
    with pytest.raises(UserError, match=r"model_init_kwargs.*'use_cash' is neither"):
        dpo(folder, model_init_kwargs={"use_cash": False})
    with pytest.raises(UserError, match="model_init_kwargs: expected a dict, got list"):
        dpo(folder, model_init_kwargs=["use_cache"])


def test_a_config_of_another_trainer_is_refused(folder):
    given = {"args": SFTConfig(output_dir=str(folder / "out")), "train_dataset": [{"text": "a"}]}
    for trainer, wanted in ((DPOTrainer, "DPOConfig"), (partial(GRPOTrainer, reward_funcs=len), "GRPOConfig")):
        with pytest.raises(UserError, match=f"args: expected a {wanted} of upweight, got SFTConfig"):
            trainer(str(folder / "model"), **given)


@pytest.mark.parametrize(("name", "says"), [("data_collator", "packed"), ("tokenizer", "processing_class")])
def test_an_unknown_input_is_a_type_error(name, says, folder):
    with pytest.raises(TypeError, match=f"takes no argument '{name}'. .*{says}"):
        DPOTrainer(str(folder / "model"), train_dataset=ROWS["pairs"], **{name: len})  # pyright: ignore


def test_arguments_of_the_config_that_a_trainer_gets_are_all_named_with_their_config(folder):
    given = {"beta": 0.1, "max_seq_length": 9, "reference": 1}
    with pytest.raises(TypeError) as error:
        DPOTrainer(str(folder / "model"), train_dataset=ROWS["pairs"], **given)  # pyright: ignore
    assert str(error.value).splitlines() == [
        "the trainer takes no argument 'beta'. It is one of DPOConfig: 'args=DPOConfig(beta=...)'.",
        "the trainer takes no argument 'max_seq_length'. Of DPOConfig: It is 'max_length' now.",
        "the trainer takes no argument 'reference'. Of DPOConfig: `upweight docs api` has all that are taken.",
    ]


def test_a_reference_that_nothing_is_compared_with_is_refused(folder):
    config = ORPOConfig(output_dir=str(folder / "out"), **COMMON)
    with pytest.raises(UserError, match="ref_model: with these settings nothing is compared"):
        ORPOTrainer(str(folder / "model"), config, train_dataset=ROWS["pairs"], ref_model="other")  # pyright: ignore


def test_what_would_never_be_called_cannot_be_overridden(folder):
    class OwnLoss(DPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return torch.zeros(())

    class OwnLog(DPOTrainer):
        def log(self, *args, **kwargs):
            super().log(*args, **kwargs)

    options = {"args": DPOConfig(output_dir=str(folder / "out"), **COMMON), "train_dataset": ROWS["pairs"]}
    options["processing_class"] = made_tokenizer(TEMPLATE)
    with pytest.raises(UserError, match=r"OwnLoss\.compute_loss: is never called here"):
        OwnLoss(str(folder / "model"), **options)
    trainer = OwnLog(str(folder / "model"), **options)
    with pytest.raises(UserError, match="evaluate"):
        trainer.predict(ROWS["pairs"])


def test_a_folder_that_cannot_be_made_is_named(folder):
    (folder / "file").touch()
    with pytest.raises(UserError, match=r"output_dir: .*/file is a file\. Name another folder"):
        DPOTrainer(
            str(folder / "model"),
            args=DPOConfig(output_dir=str(folder / "file" / "out"), **COMMON),
            train_dataset=ROWS["pairs"],
            processing_class=made_tokenizer(TEMPLATE),
        )


def test_every_exported_trainer_has_its_config():
    names = {name.removesuffix("Trainer") for name in upweight.__all__ if name.endswith("Trainer")}
    configs = {name.removesuffix("Config") for name in upweight.__all__ if name.endswith("Config")}
    assert names == configs - {"Model", "DatasetMixture"}  # which have the arguments of a script's command line


def test_evaluations_and_logs_have_what_scripts_read(folder):
    args = DPOConfig(output_dir=folder / "out", **COMMON | {"logging_steps": 2}, max_steps=3)
    rows = ROWS["pairs"]
    trainer = DPOTrainer(str(folder / "model"), args=args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    *logged, last = trainer.state.log_history
    assert {"train_runtime", "train_loss", "rewards/margins", "epoch"} <= set(last)  # of step 3, which was not logged
    lengths = [len(part) for row in trainer.train_dataset for part in (row["chosen_ids"], row["rejected_ids"])]
    prompts = 2 * sum(len(row["prompt_ids"]) for row in trainer.train_dataset)
    assert logged[-1]["num_tokens"] == sum(lengths) + prompts  # two steps of four pairs, of eight
    found = trainer.evaluate()
    assert {"eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch"} <= set(found)
    assert trainer.evaluate(metric_key_prefix="test")["test_runtime"] > 0


def test_trainers_have_the_attributes_that_scripts_read(folder):
    args = DPOConfig(output_dir=folder / "out", **COMMON)
    trainer = DPOTrainer(str(folder / "model"), args=args, train_dataset=ROWS["pairs"])
    assert (trainer.aux_loss_enabled, trainer.ref_model) == (False, None)
    assert {"upweight", "dpo"} <= set(trainer.model.model_tags)
    trainer.create_model_card(tags="mine")
    card = (folder / "out" / "README.md").read_text()
    assert all(f"- {tag}\n" in card for tag in ("mine", "upweight", "dpo"))
    trainer.create_model_card(model_name="a", dataset_name="me/toy", tags=["mine"])  # TRL's arguments
    card = (folder / "out" / "README.md").read_text()
    assert "# a\n" in card
    assert "- me/toy\n" in card
    other = AutoModelForCausalLM.from_pretrained(folder / "model")
    given = DPOTrainer(str(folder / "model"), other, args, train_dataset=ROWS["pairs"], peft_config=LoraConfig(r=2))
    assert given.ref_model is other
    assert "upweight" in given.model.model_tags


def test_rewards_of_a_trainer_are_listed(folder):
    def longer(completions, **kwargs):
        return [len(text) for text in completions]

    args = upweight.GRPOConfig(output_dir=folder / "out", **COMMON, num_generations=4, max_completion_length=8)
    trainer = GRPOTrainer(str(folder / "model"), [longer, "length(maximum=3)"], args, ROWS["prompts"])
    assert trainer.reward_func_names == ["longer", "length"]
    assert trainer.reward_processing_classes == [None, None]
    assert trainer.reward_funcs[0] is longer


def test_what_is_none_was_not_asked_for(folder):
    given = dict.fromkeys(("data_collator", "compute_metrics", "quantization_config", "optimizer_cls_and_kwargs"))
    args = {"output_dir": folder / "out", **COMMON}
    DPOTrainer(str(folder / "model"), args=DPOConfig(**args), train_dataset=ROWS["pairs"], **given)
    small = {"num_generations": 4, "max_completion_length": 8}
    rewarded = {"reward_funcs": "length(maximum=3)", "train_dataset": ROWS["prompts"]}
    GRPOTrainer(str(folder / "model"), args=upweight.GRPOConfig(**args, **small), **rewarded, **given)
    with pytest.raises(UserError, match=r"'builtins.len' takes 'obj' by position only"):
        SFTTrainer(str(folder / "model"), SFTConfig(**args), train_dataset=ROWS["text"], compute_loss_func=len)
    with pytest.raises(TypeError, match=r"'eval_datasets'.*Did you mean 'eval_dataset'"):
        GRPOTrainer(str(folder / "model"), args=upweight.GRPOConfig(**args, **small), **rewarded, eval_datasets=[])


def test_an_optimizer_of_ones_own_by_its_class(folder):
    given = (torch.optim.SGD, {"lr": 0.25})
    args = SFTConfig(output_dir=folder / "out", **COMMON, max_steps=1, activation_offloading=True)
    trainer = SFTTrainer(str(folder / "model"), args, train_dataset=ROWS["text"], optimizer_cls_and_kwargs=given)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 0.25


def test_a_chat_template_from_a_file_or_a_tokenizer(folder):
    short = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    (folder / "short.jinja").write_text(short)
    args = {"output_dir": folder / "out", **COMMON}
    for place, expected in ((folder / "short.jinja", short), (folder / "model", TEMPLATE)):
        config = SFTConfig(**args, chat_template_path=str(place))
        trainer = SFTTrainer(str(folder / "model"), config, train_dataset=ROWS["messages"])
        assert trainer.processing_class.chat_template == expected
