"""Vision-language models train from a config and by a script, save their processor, and learn what images show."""

import json

import pytest
import torch

pytest.importorskip("PIL")

from datasets import Dataset
from PIL import Image
from torch.nn.functional import normalize
from transformers import AutoModelForImageTextToText, AutoProcessor

from made_runs import metrics_of, write_config, write_model
from tiny_vision import drawn_image, processor, vision_model
from upweight import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from upweight.config import load_config
from upweight.config.sections.model import ModelSection
from upweight.data.raw_row import RowError
from upweight.errors import UserError
from upweight.inference.generate import load_text_generator
from upweight.models.adapters.merge import AdapterFolder, merge_adapter
from upweight.train.run import train
from upweight.types import Sampling

COLOURS = {"red": (220, 20, 20), "blue": (20, 20, 220)}


def write_vision_model(folder, kind="llava"):
    vision_model(kind).save_pretrained(folder)
    processor(kind).save_pretrained(folder)
    return folder


def write_rows(folder, kind="sft", count=8):
    """Questions about the colour of an image, which the answer depends on alone."""
    rows = []
    for number in range(count):
        colour = list(COLOURS)[number % 2]
        other = list(COLOURS)[1 - number % 2]
        Image.new("RGB", (40, 40), COLOURS[colour]).save(folder / f"{colour}.png")
        prompt = [
            {"role": "user", "content": [{"type": "image", "path": f"{colour}.png"}, {"type": "text", "text": "?"}]}
        ]
        sides = [{"role": "assistant", "content": one} for one in (colour, other)]
        row = {"messages": [*prompt, sides[0]]} if kind in ("sft", "ebft") else {"prompt": prompt}
        row |= {"chosen": sides[:1], "rejected": sides[1:]} if kind == "dpo" else {}
        row |= (
            {"completion": sides[:1] if number % 4 < 2 else sides[1:], "label": number % 4 < 2} if kind == "kto" else {}
        )
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def config_of(folder, kind="sft", model=None, **keys):
    rows = write_rows(folder, kind)
    model = model or write_vision_model(folder / "model")
    keys = {"rl": None if kind == "sft" else kind, "datasets": [{"path": str(rows)}], "num_epochs": 25, **keys}
    keys = {"sequence_len": 256, "learning_rate": 3e-3, "micro_batch_size": 4, "gradient_accumulation_steps": 1, **keys}
    return load_config(write_config(folder, model, **keys))


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
def test_answers_are_learned_that_depend_on_the_image_alone(kind, tmp_path):
    train(config_of(tmp_path, kind))
    losses = [line["loss"] for line in metrics_of(tmp_path / "out") if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    saved = AutoProcessor.from_pretrained(tmp_path / "out")  # the processor is saved with the model
    assert type(saved).__name__ == "LlavaProcessor"
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before = vision_model("llava")
    moved = {name: not torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items()}
    assert any(changed for name, changed in moved.items() if "vision" in name)
    if kind == "sft":
        generator = load_text_generator(ModelSection(base_model=str(tmp_path / "out")), new_tokens=6)
        ids, refs = generator.encode_with_images({"prompt": "?", "images": [str(tmp_path / "blue.png")]})
        assert len(refs) == 1
        with pytest.raises(RowError, match="an image for each <image>"):
            generator.encode_with_images({"prompt": "<image>?"}, raw=True)
        ((answer,),) = generator([ids], Sampling(1, temperature=0, images=(refs,)))
        assert answer.text == "blue"
        for colour, rgb in COLOURS.items():
            asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
            text = saved.apply_chat_template(asked, add_generation_prompt=True)
            inputs = saved(text=[text], images=[Image.new("RGB", (40, 40), rgb)], return_tensors="pt")
            written = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
            assert saved.tokenizer.decode(written, skip_special_tokens=True) == colour


def test_an_adapter_leaves_the_vision_tower_alone_unless_asked(tmp_path):
    config = config_of(tmp_path, adapter="lora", lora_target_linear=True, lora_r=4, num_epochs=1)
    train(config)
    names = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert names["exclude_modules"]
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert weights
    assert all("language_model" in name for name in weights)
    merged = tmp_path / "merged"
    merge_adapter(AdapterFolder(config.model, tmp_path / "out"), merged)
    assert type(AutoProcessor.from_pretrained(merged)).__name__ == "LlavaProcessor"
    asked = tmp_path / "asked"
    asked.mkdir()
    train(
        config_of(
            asked, model=tmp_path / "model", adapter="lora", lora_target_linear=True, freeze_vision=False, num_epochs=1
        )
    )
    assert any("vision_tower" in name for name in load_file(asked / "out" / "adapter_model.safetensors"))


def test_freeze_mm_modules_trains_the_language_model_alone(tmp_path):
    train(config_of(tmp_path, freeze_mm_modules=True, num_epochs=1))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    before = vision_model("llava").state_dict()
    for name, value in model.items():
        frozen = "vision_tower" in name or "projector" in name
        assert not frozen or torch.equal(value, before[name])
    assert not torch.equal(model["lm_head.weight"], before["lm_head.weight"])


def test_a_run_resumes_with_its_images(tmp_path):
    config = config_of(tmp_path, num_epochs=2, save_steps=1, save_total_limit=4)
    train(config)
    kept = sorted((tmp_path / "out").glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    assert (kept[0] / "processor_config.json").is_file()
    whole = metrics_of(tmp_path / "out")
    other = tmp_path / "other"
    other.mkdir()
    again = config_of(
        other,
        model=tmp_path / "model",
        datasets=[{"path": str(tmp_path / "rows.jsonl")}],
        num_epochs=2,
        save_steps=1,
        resume_from_checkpoint=str(kept[0]),
    )
    train(again)
    assert metrics_of(other / "out")[-1]["loss"] == pytest.approx(whole[-1]["loss"])


REWARD = """
def right(completions, images, **columns):
    scores = []
    for completion, (image,) in zip(completions, images, strict=True):
        letter = "r" if image.getpixel((0, 0))[0] > 100 else "b"
        scores.append(float(completion[0]["content"].startswith(letter)))
    return scores
"""


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "idefics3", "gemma3"])
def test_grpo_samples_after_images_and_rewards_get_them(kind, tmp_path, monkeypatch):
    from upweight.models import processor as reading

    write_vision_model(tmp_path / "model", kind)
    monkeypatch.setattr(reading, "_load_processor", lambda section, folder: processor(kind))  # without torchvision
    (tmp_path / f"rewards_{kind}.py").write_text(REWARD)
    trl = {"num_generations": 4, "max_completion_length": 4, "reward_funcs": [f"rewards_{kind}.right"]}
    train(config_of(tmp_path, "grpo", tmp_path / "model", micro_batch_size=8, num_epochs=None, max_steps=2, trl=trl))
    logged = metrics_of(tmp_path / "out")
    assert any("reward" in line for line in logged)
    ratios = [value for line in logged for name, value in line.items() if "ratio" in name and "mean" in name]
    assert all(abs(value - 1) < 1e-3 for value in ratios)
    files = list((tmp_path / "out" / "completions").glob("*.jsonl"))
    assert files
    assert all("token_id" not in json.loads(line).get("completion", "") for line in files[0].read_text().splitlines())


STRUCTURED = {"trl": {"num_generations": 2, "max_completion_length": 6}, "ebft": {"ce_coef": 0.1}}
BLOCKS = {"mode": "strided", "generate_max_len": 2, "stride": 2, "context_length": 1, "n_samples_per_prompt": 2}
STRIDED = {"ebft": {**BLOCKS, "ce_coef": 0.1}}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llava", STRUCTURED),
        ("qwen2_5_vl", STRUCTURED),
        ("gemma3", STRUCTURED),
        ("qwen2_5_vl", STRIDED),
        ("gemma3", STRIDED),
    ],
)
def test_ebft_matches_features_of_answers_about_images(kind, keys, tmp_path, monkeypatch):
    from upweight.models import processor as reading
    from upweight.train.online import feature_matching

    write_vision_model(tmp_path / "model", kind)
    monkeypatch.setattr(reading, "_load_processor", lambda section, folder: processor(kind))  # without torchvision
    embedded, stock = [], feature_matching.FeatureMatching._forward

    def kept(self, units, runner, network):
        found = stock(self, units, runner, network)
        embedded.extend(one.unit.samples[0] for one in units)
        for one, feature in zip(units, found, strict=True):
            torch.testing.assert_close(feature, plain_feature(one.unit.samples[0], runner.engine.images, network))
        return found

    monkeypatch.setattr(feature_matching.FeatureMatching, "_forward", kept)
    keys = {**keys, "ebft": {"embed_method": "mean_pooling", **keys["ebft"]}}
    train(config_of(tmp_path, "ebft", tmp_path / "model", micro_batch_size=4, num_epochs=None, max_steps=2, **keys))
    logged = metrics_of(tmp_path / "out")
    assert any("ebft/reward" in line for line in logged)
    assert all(len(sample.images) == 1 for sample in embedded)
    image = processor(kind).tokenizer.convert_tokens_to_ids("<image>")
    assert not any(image in sample.ids[sample.loss_mask] for sample in embedded if keys["ebft"].get("mode"))
    if "mode" not in keys["ebft"]:
        assert len(embedded) == 2 * 2 * 3  # in two steps, two samples and the true answer of two prompts


@torch.no_grad()
def plain_feature(sample, reader, network):
    """The mean of normed hidden states of a plain forward of a sequence alone."""
    ids = torch.from_numpy(sample.ids)[None]
    inputs = reader.plain_inputs([sample.images], ids)
    states = network(input_ids=ids, **inputs, output_hidden_states=True, use_cache=False).hidden_states
    layers = [states[int(depth * (len(states) - 1))][0] for depth in (0.25, 0.5, 0.75)]
    pooled = torch.cat(layers, -1).float()[torch.from_numpy(sample.loss_mask)]
    return normalize(normalize(pooled, dim=-1).mean(0), dim=0)


def test_grpo_refuses_backends_of_users_with_images(tmp_path):
    trl = {
        "num_generations": 4,
        "max_completion_length": 4,
        "reward_funcs": ["length(maximum=20)"],
        "rollout_backend": "mine.f",
    }
    with pytest.raises(UserError, match=r"trl.rollout_backend: a backend of yours gets no images"):
        train(config_of(tmp_path, "grpo", micro_batch_size=8, num_epochs=None, max_steps=2, trl=trl))


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"neftune_noise_alpha": 5}, "neftune_noise_alpha"), ({"image_size": 512}, "processor_kwargs")],
)
def test_what_images_do_not_work_with_is_refused(keys, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(config_of(tmp_path, **keys))


COMMON = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "max_steps": 2}


def test_scripts_pass_a_processor_and_columns_of_images(tmp_path):
    answer = [{"role": "assistant", "content": "red"}]
    prompt = [{"role": "user", "content": "which colour?"}]
    rows = Dataset.from_list([{"images": [drawn_image(n)], "messages": prompt + answer} for n in range(4)])
    args = SFTConfig(output_dir=str(tmp_path / "sft"), **COMMON)
    trainer = SFTTrainer(vision_model("qwen2_5_vl"), args, train_dataset=rows, processing_class=processor("qwen2_5_vl"))
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
    pairs = [
        {
            "image": drawn_image(n),
            "prompt": prompt,
            "chosen": answer,
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for n in range(4)
    ]
    args = DPOConfig(output_dir=str(tmp_path / "dpo"), **COMMON)
    DPOTrainer(
        vision_model("gemma3"), args=args, train_dataset=Dataset.from_list(pairs), processing_class=processor("gemma3")
    ).train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "processor_config.json").is_file()


def test_a_text_model_refuses_columns_of_images(tmp_path):
    from tiny_models import tiny

    rows = [{"images": [drawn_image(0)], "text": "<image>"}]
    with pytest.raises(UserError, match="the column 'images' holds images"):
        SFTTrainer(
            tiny("llama"),
            SFTConfig(output_dir=str(tmp_path)),
            train_dataset=rows,
            processing_class=processor("llava").tokenizer,
        )


@pytest.mark.parametrize(
    "keys", [{"freeze_vision": True}, {"processor_type": "AutoProcessor"}, {"processor_kwargs": {"a": 1}}]
)
def test_keys_of_images_are_refused_for_text_models(keys, tmp_path):
    with pytest.raises(UserError, match=f"{next(iter(keys))}: the model reads no images"):
        train(load_config(write_config(tmp_path, write_model(tmp_path / "model"), **keys)))


def test_a_vision_model_trains_on_texts_alone(tmp_path):
    model = tmp_path / "model"
    vision_model("qwen3_vl").save_pretrained(model)
    processor("qwen3_vl").tokenizer.save_pretrained(model)  # without a processor, which is said
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "the quick brown fox"}) + "\n")
    file = write_config(tmp_path, model, rl=None, datasets=[{"path": str(tmp_path / "rows.jsonl")}], num_epochs=2)
    train(load_config(file))
    assert metrics_of(tmp_path / "out")


def by_generate(model, processing_class, prompts, generation_config=None):
    """Completions of prompts with images by the model's own `generate`, as a user might write them."""
    texts = []
    for prompt in prompts:
        (image,) = prompt["images"]
        text = processing_class.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
        inputs = processing_class(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)
        written = model.generate(**inputs, generation_config=generation_config)[0, inputs["input_ids"].shape[1] :]
        texts.append(processing_class.tokenizer.decode(written, skip_special_tokens=True) + "<image>")
    return texts


def by_tokens(prompts, trainer):
    """The same with tokens; prompts hold their images."""
    both, ids, completions = processor("llava"), [], []
    for prompt in prompts:
        image = prompt[0]["content"][0]["image"]
        text = both.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        inputs = both(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)
        ids.append(inputs["input_ids"][0].tolist())
        written = trainer.model.generate(**inputs, max_new_tokens=4, suppress_tokens=[259])[0, len(ids[-1]) :]
        completions.append(written.tolist())
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def too_few(prompts, trainer):
    return {"prompt_ids": [[1, 2]] * len(prompts), "completion_ids": [[3]] * len(prompts), "logprobs": None}


@pytest.mark.parametrize("function", [by_generate, by_tokens, too_few])
def test_rollout_functions_of_scripts_get_images(function, tmp_path):
    prompt, seen = [{"role": "user", "content": "which colour?"}], []
    rows = Dataset.from_list([{"images": [drawn_image(n)], "prompt": prompt} for n in range(4)])

    def right(completions, images, **columns):
        seen.extend(image.size for (image,) in images)
        return [float(len(one) if isinstance(one, str) else len(one[0]["content"])) for one in completions]

    args = GRPOConfig(
        output_dir=str(tmp_path), num_generations=2, max_completion_length=4, per_device_train_batch_size=4, **COMMON
    )
    given = {"train_dataset": rows, "processing_class": processor("llava"), "rollout_func": function}
    trainer = GRPOTrainer(vision_model("llava"), right, args=args, **given)
    if function is too_few:
        with pytest.raises(UserError, match="0 tokens stand for images, and the row's take 16"):
            trainer.train()
        return
    trainer.train()
    assert set(seen) == {(48, 32)}


class Look:
    """Shows a colour after the first turn."""

    def reset(self, images, **row):
        self.shown = False
        return "Wait for the second picture."

    def step(self, text):
        if self.shown:
            return None
        self.shown = True
        return ["This one:", drawn_image(50)]


def test_grpo_trains_on_episodes_with_images(tmp_path):
    prompt, seen = [{"role": "user", "content": "which colour?"}], []
    rows = Dataset.from_list([{"images": [drawn_image(n)], "prompt": prompt} for n in range(4)])

    def right(completions, images, **columns):
        seen.extend(len(several) for several in images)
        return [float(len(str(one))) for one in completions]

    args = GRPOConfig(
        output_dir=str(tmp_path), num_generations=2, max_completion_length=80, per_device_train_batch_size=4, **COMMON
    )
    given = {"train_dataset": rows, "processing_class": processor("qwen2_5_vl"), "environment_factory": Look}
    trainer = GRPOTrainer(vision_model("qwen2_5_vl"), right, args=args, **given)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items() if "visual" in name}
    trainer.train()
    assert 2 in seen
    assert any(not torch.equal(trainer.model.state_dict()[name], value) for name, value in before.items())
