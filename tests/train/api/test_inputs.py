"""What scripts written for TRL hand to their trainers, in its order and forms."""

import inspect
import logging
import math
import traceback

import pytest
import torch
from datasets import Dataset, DatasetDict
from huggingface_hub import constants
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments

import upweight
from parity_script import ROWS, TEMPLATE, made_tokenizer, said, write_model
from upweight import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTTrainer
from upweight.errors import UserError
from upweight.log import _warned
from upweight.models.first_look import TOKENIZER_REMEDY
from upweight.train.api.as_config import error_translator
from upweight.train.api.inputs import as_dataset

COMMON = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4,
          "save_strategy": "no", "learning_rate": 1e-2, "max_steps": 2}  # fmt: skip
# Positional arguments of TRL 1.16; of PRMTrainer, which it no longer has, those of 0.20.
SFT_ORDER = """model args data_collator train_dataset eval_dataset processing_class compute_loss_func compute_metrics
callbacks optimizers optimizer_cls_and_kwargs preprocess_logits_for_metrics quantization_config peft_config
formatting_func"""
DPO_ORDER = """model ref_model args data_collator train_dataset eval_dataset processing_class compute_metrics callbacks
optimizers quantization_config peft_config"""
CPO_ORDER = """model args data_collator train_dataset eval_dataset processing_class model_init callbacks optimizers
preprocess_logits_for_metrics peft_config compute_metrics"""
ORDERS = {
    "SFT": SFT_ORDER,
    "DPO": DPO_ORDER,
    "KTO": DPO_ORDER,
    "CPO": CPO_ORDER,
    "ORPO": CPO_ORDER,
    "Reward": SFT_ORDER.replace("compute_loss_func", "").replace("formatting_func", ""),
    "PRM": """model args data_collator train_dataset eval_dataset processing_class model_init compute_metrics callbacks
    optimizers preprocess_logits_for_metrics peft_config""",
    "GRPO": """model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks
    optimizers quantization_config peft_config tools rollout_func environment_factory""",
}


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model", made_tokenizer(TEMPLATE, bos=False), trainer="DPO")
    return tmp_path


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def dpo(folder, model=None, *, ref_model=None, peft_config=None, rows=None, **config):
    args = DPOConfig(output_dir=str(folder / "out"), **{**COMMON, **config})
    rows = ROWS["pairs"] if rows is None else rows
    return DPOTrainer(model or str(folder / "model"), ref_model, args, None, rows,
                      processing_class=made_tokenizer(TEMPLATE, bos=False), peft_config=peft_config)  # fmt: skip


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", ORDERS)
def test_arguments_stand_in_the_order_that_scripts_know(kind):
    ours = list(inspect.signature(getattr(upweight, f"{kind}Trainer")).parameters)
    assert ours[: len(ORDERS[kind].split())] == ORDERS[kind].split()


def test_what_is_none_was_not_asked_for(folder):
    args = TrainingArguments(output_dir=str(folder / "out"), **COMMON)
    trainer = SFTTrainer(
        str(folder / "model"), args, None, ROWS["text"], None, made_tokenizer(TEMPLATE, bos=False), None, None,
        quantization_config=None, optimizer_cls_and_kwargs=None,
    )  # fmt: skip
    assert isinstance(trainer.args, upweight.SFTConfig)
    assert (trainer.args.learning_rate, trainer.args.max_steps, trainer.args.per_device_train_batch_size) == (
        1e-2,
        2,
        4,
    )
    trainer.train()
    assert len(losses(trainer)) == 2


def test_a_quantisation_needs_an_adapter_and_is_bitsandbytes(folder):
    packed = BitsAndBytesConfig(load_in_4bit=True)
    given = {"args": DPOConfig(output_dir=str(folder / "out"), **COMMON), "train_dataset": ROWS["pairs"]}
    with pytest.raises(
        UserError, match=r"quantization_config: quantised weights cannot be trained\. Add a `peft_config`"
    ):
        DPOTrainer(str(folder / "model"), quantization_config=packed, **given)
    with pytest.raises(UserError, match="quantization_config: expected a BitsAndBytesConfig, got dict"):
        DPOTrainer(str(folder / "model"), quantization_config={"load_in_4bit": True}, **given)


@pytest.mark.parametrize(
    ("loading", "says"),
    [
        ({"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}, r"cannot be trained\. Add a `peft_config`"),
        ({"load_in_4bit": True}, r"'load_in_4bit' is .*'quantization_config=BitsAndBytesConfig\(load_in_4bit=True\)'"),
    ],
)
def test_a_quantisation_among_the_arguments_of_loading_is_that_of_the_trainer(loading, says, folder):
    args = DPOConfig(output_dir=str(folder / "out"), **COMMON, model_init_kwargs=loading)
    with pytest.raises(UserError, match=says):
        DPOTrainer(str(folder / "model"), args=args, train_dataset=ROWS["pairs"])


def test_precomputed_rows_can_be_evaluated_that_come_later(folder):
    adapted = dpo(folder, precompute_ref_log_probs=True, peft_config=lora())
    kept = dpo(folder, peft_config=lora())
    for trainer in (adapted, kept):
        trainer.train()
    found, right = (trainer.evaluate(ROWS["pairs"][:3])["eval_loss"] for trainer in (adapted, kept))
    assert found == pytest.approx(right, abs=1e-6)
    assert abs(found - math.log(2)) > 1e-6
    whole = dpo(folder, precompute_ref_log_probs=True)
    assert whole.evaluate(ROWS["pairs"][:3])["eval_loss"] == pytest.approx(math.log(2))
    whole.train()
    with pytest.raises(UserError, match="precompute_ref_log_probs: the reference is the policy as it was"):
        whole.evaluate(ROWS["pairs"][:3])


def test_log_probs_of_another_reference_can_be_precomputed(folder):
    def curve(**config):
        reference = AutoModelForCausalLM.from_pretrained(folder / "model")
        with torch.no_grad():
            reference.lm_head.weight.mul_(0.5)
        trainer = dpo(folder, ref_model=reference, **config)
        trainer.train()
        return losses(trainer)

    found, right = curve(precompute_ref_log_probs=True), curve()
    assert found == pytest.approx(right, abs=1e-6)
    assert abs(found[0] - math.log(2)) > 1e-2


@pytest.mark.parametrize(
    ("kind", "rows", "config"),
    [("DPO", "pairs", {}), ("KTO", "labelled", {"loss_type": "apo_zero_unpaired"}), ("KTO", "message pairs", {
        "loss_type": "apo_zero_unpaired"})],
)  # fmt: skip
def test_sets_that_are_known_at_the_start_are_precomputed_too(kind, rows, config, folder):
    rows = Dataset.from_list(ROWS[rows])
    sets = DatasetDict({"a": rows.select(range(4)), "b": rows.select(range(4, 8))})

    def found(**more):
        args = getattr(upweight, f"{kind}Config")(output_dir=str(folder / "out"), **{**COMMON, **config, **more})
        trainer = getattr(upweight, f"{kind}Trainer")(str(folder / "model"), None, args, None, rows, sets)
        trainer.train()
        evaluated = trainer.evaluate()
        return [evaluated["eval_a_loss"], evaluated["eval_b_loss"], *losses(trainer)]

    assert found(precompute_ref_log_probs=True) == pytest.approx(found(), abs=1e-6)


def test_a_second_stage_goes_on_with_the_adapter_of_the_first(folder, caplog):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    first = dpo(folder, model, peft_config=lora())
    first.train()
    dpo(folder, model)
    assert "earlier trainer" not in caplog.text
    trained = {name: weight.clone() for name, weight in first.model.named_parameters() if weight.requires_grad}
    second = dpo(folder, model, peft_config=lora())
    assert second.model is first.model
    assert "going on with the adapter that an earlier trainer gave it; for a fresh one, load" in caplog.text
    assert all(
        torch.equal(weight, trained[name]) for name, weight in second.model.named_parameters() if name in trained
    )
    second.train()
    assert losses(second)[0] == pytest.approx(math.log(2), abs=1e-6)  # its reference is where it began
    with pytest.raises(UserError, match="peft_config: the model has the adapter of an earlier trainer"):
        dpo(folder, model, peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    third = dpo(folder, model)
    third.save_model(str(folder / "adapter"))
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), folder / "adapter")
    ids = torch.tensor([[40, 41, 42]])
    torch.testing.assert_close(again(ids).logits, third.model(ids).logits)
    merged = third.model.merge_and_unload()
    assert dpo(folder, merged, peft_config=lora()).model is not first.model


def test_layers_of_an_adapter_without_its_model_are_refused(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    get_peft_model(model, lora())
    with pytest.raises(UserError, match="model: has the layers of an adapter"):
        dpo(folder, model)


def test_what_is_no_dataset_is_refused_with_what_makes_one(folder):
    with pytest.raises(UserError, match=r"got DataFrame\. `Dataset\.from_pandas` makes a Dataset of it"):
        dpo(folder, rows=Dataset.from_list(ROWS["pairs"]).to_pandas())
    with pytest.raises(UserError, match=r"got zip\. `Dataset\.from_generator` makes one"):
        dpo(folder, rows=zip(ROWS["pairs"], strict=True))


def test_mistakes_that_the_loop_or_peft_would_find_late_are_one_error(folder):
    with pytest.raises(UserError, match="eval_strategy: 'steps' needs rows to evaluate on"):
        dpo(folder, eval_strategy="steps", eval_steps=1)
    targets = LoraConfig(target_modules=["query"], task_type="CAUSAL_LM")
    with pytest.raises(UserError, match=r"^peft_config: Target modules .* Linear layers of the model: .*q_proj"):
        dpo(folder, peft_config=targets)
    with pytest.raises(UserError, match="callbacks: expected objects or classes of TrainerCallback, got"):
        DPOTrainer(str(folder / "model"), train_dataset=ROWS["pairs"], callbacks=[print])


def test_rows_of_a_list_have_all_columns_and_those_that_differ_are_named():
    rows = as_dataset([{"prompt": "a"}, {"prompt": "b", "answer": 1}, {"prompt": "c", "answer": 1.5}], "rows")
    assert rows["answer"][:] == [None, 1.0, 1.5]
    mixed = [{"prompt": "a"}, {"prompt": None}, {"prompt": [{"role": "user", "content": "b"}]}]
    with pytest.raises(
        UserError, match=r"rows: .*: 'prompt' is text in row 0 and a list in row 2\. Write all rows alike"
    ):
        as_dataset(mixed, "rows")


def test_an_evaluation_without_rows_is_refused(folder):
    with pytest.raises(UserError, match=r"^eval_dataset: there are no rows to evaluate\. Give some to the trainer"):
        dpo(folder).evaluate()


@pytest.mark.parametrize(
    ("kind", "message", "words"),
    [
        (GRPOConfig, "trl.vllm_mode: use a server", "vllm_mode: use a server"),
        (DPOConfig, "optimizer: the optimizer of shards", "optim: the optimizer of shards"),
        (DPOConfig, "batch: set 'micro_batch_size: 2'", "batch: set 'per_device_train_batch_size=2'"),
        (DPOConfig, "try 'learning_rate: 1e-6'", "try 'learning_rate=1e-6'"),
        (DPOConfig, "use 'fsdp: true' instead; drop the key", "use 'fsdp=True' instead; drop the argument"),
        (KTOConfig, "set 'kto_loss_type: apo_zero_unpaired'", "set 'loss_type=\"apo_zero_unpaired\"'"),
        (DPOConfig, "then set `trust_remote_code: true`", "then set `trust_remote_code=True`"),
        (DPOConfig, "datasets: none of the datasets", "train_dataset: none of the datasets"),
        (GRPOConfig, "Name one, for example 'chat_template: chatml'.", "Set its `chat_template`."),
        (GRPOConfig, "Train one with `reward_model: true`.", "Train one with RewardTrainer."),
        (
            GRPOConfig,
            "read the newest file in completions/; stop here",
            "read what `trainer.generate_completions(rows)` shows; stop here",
        ),
        (
            DPOConfig,
            f"base_model: none. {TOKENIZER_REMEDY}.",
            "model: none. Copy the tokenizer's files into it, or pass a tokenizer as `processing_class`.",
        ),
        (
            DPOConfig,
            "check lora_target_modules: `upweight preprocess CONFIG --show 3`",
            "check target_modules: `trainer.train_dataset[0]`",
        ),
    ],
)
def test_messages_about_keys_are_about_arguments(kind, message, words):
    assert error_translator(kind)(message) == words


def test_a_step_of_one_answer_is_warned_of_for_kto(folder, caplog):
    _warned.clear()
    args = KTOConfig(output_dir=str(folder / "out"), **COMMON | {"per_device_train_batch_size": 1})
    with caplog.at_level(logging.WARNING, "upweight"):
        KTOTrainer(str(folder / "model"), args=args, train_dataset=ROWS["labelled"])
    (warning,) = [one for one in caplog.messages if "per_device_train_batch_size: a step of one" in one]
    assert "'per_device_train_batch_size=8'" in warning


def test_stages_of_grpo_share_one_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    rows = [{"prompt": said("user", f"{n}?")} for n in range(4)]

    def short(completions, **kwargs):
        return [-float(len(answer[0]["content"])) for answer in completions]

    for _ in range(2):
        args = GRPOConfig(output_dir=str(folder / "out"), num_generations=4, max_completion_length=4, **COMMON)
        tokenizer = made_tokenizer(TEMPLATE, bos=False)
        trainer = GRPOTrainer(model, short, args, rows, processing_class=tokenizer, peft_config=lora())
        before = [w.clone() for n, w in trainer.model.named_parameters() if "lora_B" in n]
        trainer.train()
    assert any(weight.any() for weight in before)


@pytest.mark.parametrize(("trainer", "change"), [("DPO", {}), ("GRPO", {"reward_funcs": len})])
def test_a_model_that_the_hub_does_not_give_is_one_error_without_its_traces(trainer, change, tmp_path):
    args = getattr(upweight, f"{trainer}Config")(output_dir=str(tmp_path), report_to="none")
    with pytest.raises(UserError, match="model: could not load the tokenizer of 'Qwen/Misspelt'") as caught:
        getattr(upweight, f"{trainer}Trainer")("Qwen/Misspelt", args=args, train_dataset=ROWS["pairs"], **change)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


def test_a_push_without_a_hub_keeps_the_model_and_is_one_error(folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    args = DPOConfig(output_dir=str(folder / "pushed"), **COMMON)
    trainer = DPOTrainer(model=str(folder / "model"), args=args, train_dataset=ROWS["pairs"])
    kept = rf"is set\. The model is saved in {folder}/pushed\. Unset it, then push it: `hf upload pushed "
    with pytest.raises(UserError, match=kept) as caught:
        trainer.push_to_hub()
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in (folder / "pushed").iterdir()
    }


def test_another_model_that_the_hub_does_not_give_is_named_by_its_input(folder):
    given = {"model": str(folder / "model"), "train_dataset": ROWS["pairs"]}
    with pytest.raises(UserError, match=r"^ref_model: could not load the config of"):
        DPOTrainer(**given, ref_model="Qwen/Misspelt", args=DPOConfig(output_dir=str(folder), **COMMON))
    args = upweight.DistillationConfig(output_dir=str(folder), **COMMON)
    with pytest.raises(UserError, match=r"^teacher_model: could not load the tokenizer of"):
        upweight.DistillationTrainer(**given, teacher_model="Qwen/Misspelt", args=args)
