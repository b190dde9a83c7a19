"""Reward models of vision-language models: trained on pairs with images, saved, loaded, and used as a reward."""

import json
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from engine.test_image_rows import Written
from made_runs import metrics_of
from tiny_vision import KINDS, config, drawn_image, processor
from train.test_images import COLOURS, config_of, write_vision_model
from upweight import RewardConfig, RewardTrainer
from upweight.cli.inference import run_score
from upweight.config.sections.model import ModelSection
from upweight.engine import Engine
from upweight.engine.packing import build_batch, row_tokens
from upweight.inference.score import ScoreModel, load_score_model
from upweight.models.adapters.merge import AdapterFolder, merge_adapter
from upweight.models.processor import attach_processor, image_reader
from upweight.models.score_heads import add_score_class
from upweight.rewards.load import as_rewards
from upweight.rewards.model import step_scores
from upweight.rewards.reward import RewardCall
from upweight.rewards.scorer import Scorer
from upweight.train.run import train
from upweight.types import Unit


def score_model(kind):
    """A reward model of a kind in float32, whose weights are large enough for images to matter."""
    torch.manual_seed(0)
    settings = config(kind)
    settings.num_labels = 1
    add_score_class(settings)
    model = AutoModelForSequenceClassification.from_config(settings).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
    return model


def plain_score(model, reader, sample):
    """The score of a plain forward of a sequence alone, with what its processor returned."""
    ids = torch.from_numpy(sample.ids)[None]
    inputs = reader.plain_inputs([sample.images], ids) if sample.images else {}
    hidden = model.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
    return model.score(hidden[:, -1])[0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_gradients_are_those_of_each_sequence_alone(kind, tmp_path):
    model = score_model(kind)
    tokenizer = attach_processor(processor(kind), model.config)
    reader = image_reader(tokenizer)
    made = Written(reader, tmp_path)

    def sample(text, *images):
        one = made.sample("look ", *images, completion=text)
        return replace(one, loss_mask=np.arange(len(one.ids)) == len(one.ids) - 1)

    units = [Unit((sample("?red", 0, "x", 1), sample("?a longer blue", 0, "x", 1)), 0), Unit((sample("?red", 2),), 1)]
    units.append(Unit((sample("no image"),), 2))
    plain = torch.stack([plain_score(model, reader, one) for unit in units for one in unit.samples])
    weights = list(model.parameters())
    by_hand = torch.autograd.grad(plain.sum(), weights, allow_unused=True)
    engine = Engine(model, images=reader)
    assert engine.layout == ("padded" if kind == "gemma3" else "tree")
    if engine.layout == "tree":  # chosen and rejected share their images
        pair = units[0].samples
        assert row_tokens(units[:1]) == len(pair[0].ids) + len("a longer blue")
    scores = engine(model, build_batch(units, engine.layout, predict=False)).scores_TC[:, 0]
    torch.testing.assert_close(scores, plain, atol=1e-4, rtol=0)
    assert (scores[0] - scores[2]).abs() > 1e-3  # the image counts
    scores.sum().backward()
    for weight, grad in zip(weights, by_hand, strict=True):
        if grad is not None:
            torch.testing.assert_close(weight.grad, grad, atol=1e-4, rtol=1e-3)


def orm_config(folder, **keys):
    (folder / "pairs").mkdir(exist_ok=True)
    held_out = config_of(folder / "pairs", "dpo").data.datasets[0].path
    return config_of(
        folder,
        "dpo",
        rl=None,
        reward_model=True,
        num_epochs=15,
        test_datasets=[{"path": held_out}],
        eval_steps=10,
        **keys,
    )


def asked(colour, folder):
    image = {"type": "image", "path": str(folder / f"{colour}.png")}
    return [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}]


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_a_reward_model_learns_what_images_show_and_rewards_by_it(adapter, tmp_path, capsys):
    keys = {"adapter": "lora", "lora_r": 8, "lora_target_linear": True, "learning_rate": 1e-2} if adapter else {}
    keys |= {"freeze_vision": False} if adapter else {}
    train(orm_config(tmp_path, **keys))
    logged = metrics_of(tmp_path / "out")
    assert [line["accuracy"] for line in logged if "accuracy" in line][-1] == 1
    assert [line["eval_accuracy"] for line in logged if "eval_accuracy" in line][-1] == 1
    assert (tmp_path / "out" / "processor_config.json").is_file()
    rows = [
        {"prompt": asked(shown, tmp_path), "completion": [{"role": "assistant", "content": said}]}
        for shown in COLOURS
        for said in COLOURS
    ]
    base = ModelSection(base_model=str(tmp_path / ("model" if adapter else "out")))
    scorer = load_score_model(base, tmp_path / "out" if adapter else None)
    scores = [score for (score,) in scorer(rows)]
    assert scores[0] > scores[1]
    assert scores[3] > scores[2]
    if adapter:
        merge_adapter(AdapterFolder(base, tmp_path / "out"), tmp_path / "merged")
        merged = load_score_model(ModelSection(base_model=str(tmp_path / "merged")))
        assert [score for (score,) in merged(rows)] == pytest.approx(scores, abs=1e-4)
    in_one = [{"messages": row["prompt"] + row["completion"]} for row in rows]
    assert [score for (score,) in scorer(in_one)] == pytest.approx(scores, abs=1e-5)
    (tmp_path / "rows").mkdir()
    (tmp_path / "red.png").rename(tmp_path / "rows" / "scarlet.png")
    row = {"prompt": "?", "completion": "red", "images": ["scarlet.png"]}  # beside its file
    (tmp_path / "rows" / "asked.jsonl").write_text(json.dumps(row) + "\n")
    run_score(str(tmp_path / "out"), tmp_path / "rows" / "asked.jsonl", [], output=None, chat=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["score"] == pytest.approx(scores[0], abs=1e-4)
    train(rewarded_by(tmp_path / "out", tmp_path))


def rewarded_by(model, folder):
    (folder / "grpo").mkdir()
    trl = {"num_generations": 4, "max_completion_length": 4, "reward_funcs": [str(model)]}
    keys = {"micro_batch_size": 8, "num_epochs": None, "max_steps": 2, "trl": trl}
    return config_of(folder / "grpo", "grpo", folder / "model", **keys)


def test_a_reward_model_scores_completions_with_the_images_of_their_prompts(tmp_path):
    model, both = score_model("llava"), processor("llava")
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    answers = [[{"role": "assistant", "content": text}] for text in ("red", "blue", "<image>red")]
    images = [[drawn_image(number)] for number in (0, 1, 0)]
    call = RewardCall([prompt] * 3, answers, [[1]] * 3, {"images": images}, [0, 1, 0])
    with Scorer(as_rewards((model, both))) as scorer:
        scores = scorer.score(call).rewards_SR[:, 0].tolist()
    for answer, shown, score in zip(answers[:2], images, scores, strict=False):
        text = both.apply_chat_template(prompt + answer).rstrip()
        inputs = both(text=[text], images=shown, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
            assert model.score(hidden[:, -1]).item() == pytest.approx(score, abs=1e-4)
    assert scores[2] == pytest.approx(scores[0], abs=1e-5)  # the text of a placeholder is no image


def test_a_script_trains_a_reward_model_on_images(tmp_path):
    write_vision_model(tmp_path / "model", "gemma3")
    ask, say = [{"role": "user", "content": "which?"}], [{"role": "assistant", "content": "red"}]
    no = [{"role": "assistant", "content": "no"}]
    rows = [{"images": [drawn_image(n)], "prompt": ask, "chosen": say, "rejected": no} for n in range(4)]
    args = RewardConfig(output_dir=str(tmp_path / "out"), max_steps=2, logging_steps=1, report_to="none")
    trainer = RewardTrainer(str(tmp_path / "model"), args=args, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    scorer = load_score_model(ModelSection(base_model=str(tmp_path / "saved")))
    assert isinstance(scorer, ScoreModel)
    assert scorer([{"prompt": ask, "completion": say, "images": [drawn_image(0)]}]) != scorer(
        [{"prompt": ask, "completion": say, "images": [drawn_image(1)]}]
    )


def step_row(shown, *said, folder):
    """A prompt with an image and steps, of which those are right that name its colour."""
    image = str(folder / f"{shown}.png")
    return {"prompt": "<image>?", "completions": list(said), "labels": [one == shown for one in said], "image": image}


def test_a_process_reward_model_learns_which_steps_fit_the_image_and_rewards_by_it(tmp_path):
    config = config_of(tmp_path, "dpo", rl=None, process_reward_model=True, num_epochs=None, max_steps=60)
    rows = [step_row(shown, *said, folder=tmp_path) for shown in COLOURS for said in permutations(COLOURS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(config)
    logged = metrics_of(tmp_path / "out")
    assert [line["accuracy"] for line in logged if "accuracy" in line][-1] == 1
    scorer = load_score_model(ModelSection(base_model=str(tmp_path / "out")))
    assert type(scorer.model).__name__ == "LlavaForTokenClassification"
    for number, (row, of_row) in enumerate(zip(rows, scorer(rows), strict=True)):
        (sample,) = scorer._unit_of_row(row, number).samples
        assert len(sample.images) == 1
        ids = torch.from_numpy(sample.ids)[None]
        inputs = scorer.engine.images.plain_inputs([sample.images], ids)
        with torch.no_grad():
            plain = scorer.model(input_ids=ids, use_cache=False, **inputs).logits[0, torch.from_numpy(sample.loss_mask)]
        assert of_row == pytest.approx(plain.softmax(-1)[:, -1].tolist(), abs=1e-4)
        assert [score > 0.5 for score in of_row] == row["labels"]
    train(rewarded_by(tmp_path / "out", tmp_path))


def test_steps_are_scored_with_the_images_of_the_last_message(tmp_path):
    torch.manual_seed(0)
    settings = config("llava")
    settings.num_labels = 2
    add_score_class(settings, "step_score")
    model = AutoModelForTokenClassification.from_config(settings).float().eval()
    scorer = ScoreModel(model, attach_processor(processor("llava"), settings), "step_score")
    image, text = {"type": "image"}, {"type": "text", "text": "?"}
    alone = [{"role": "user", "content": [image, text]}]
    longer = [{"role": "user", "content": [image]}, {"role": "assistant", "content": "a"}, *alone]
    shown = [drawn_image(0), drawn_image(1)]
    prompts = [alone, longer, "<image>?", alone]
    answers = ["red\nblue", "red\nblue", "red\nblue", "<image>red\nblue"]
    found = step_scores(scorer, prompts, answers, [shown[1:], shown, shown[1:], shown[1:]])
    scores = [[score for _, score in one["characters"]] for one in found]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert scores[0] == pytest.approx(scores[2], abs=1e-5)
    assert scores[0] == pytest.approx(scores[3], abs=1e-5)  # the text of a placeholder is no image
    (other,) = step_scores(scorer, [alone], answers[:1], [shown[:1]])
    assert [score for _, score in other["characters"]] != pytest.approx(scores[0], abs=1e-5)
