import random

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from tiny_vision import KINDS, drawn_image, processor, vision_model
from upweight.engine import Engine
from upweight.engine.check import check_first_batch, check_first_gradients
from upweight.engine.images import grid_positions
from upweight.engine.packing import build_batch, plan_rows, row_tokens
from upweight.models.processor import attach_processor, image_reader
from upweight.types import Sample, Unit

SIZES = [(48, 32), (32, 64), (64, 48)]


def reader_of(kind, model):
    return image_reader(attach_processor(processor(kind), model.config))


class Written:
    """Images in files, and samples that hold them."""

    def __init__(self, reader, folder):
        self.reader, self.folder = reader, folder

    def image(self, seed, size=None):
        width, height = size or SIZES[seed % len(SIZES)]
        path = self.folder / f"{seed}-{width}-{height}.png"
        drawn_image(seed, width, height).save(path)
        return self.reader.refer(path.read_bytes(), str(path))

    def sample(self, *parts, completion="answer"):
        """A sample of texts and (numbers of) images, which scores what follows the last."""
        made = [self.image(*(part if isinstance(part, tuple) else (part,))) if not isinstance(part, str) else part
                for part in parts]  # fmt: skip
        prompt = "".join(part if isinstance(part, str) else part[1].text for part in made)
        encode = self.reader.processor.tokenizer.encode
        ids, tail = encode(prompt, add_special_tokens=False), encode(completion, add_special_tokens=False)
        refs = tuple(part[0] for part in made if not isinstance(part, str))
        mask = np.arange(len(ids) + len(tail)) >= len(ids)
        return Sample(np.array([*ids, *tail]), mask, images=refs)


def shared_and_unshared(made):
    """Units whose sequences share images, texts before images, or neither; and two that differ in an image alone."""
    group = [
        Unit((made.sample("look ", 0, " and ", 1, " what?", completion=text),), 0) for text in ("red", "reddish", "b")
    ]
    pair = [Unit((made.sample("look ", 2, "x", completion="yes"), made.sample("look ", 2, "x", completion="no")), 1)]
    alike = [Unit((made.sample("look ", (seed, (48, 32)), "x", completion="yes"),), 2) for seed in (7, 8)]
    again = [Unit((made.sample("other ", 0, " what?", completion="red"),), 3), Unit((made.sample("no image"),), 4)]
    return group + pair + alike + again


def random_units(made, kind, seed):
    """Units of random texts and images: at the start or the end of a prompt, side by side, twice, and cut anywhere."""
    rng = random.Random(seed)
    sizes = [(48, 32), (17, 90), (33, 33), (120, 40), (5, 7), (100, 3), (40, 40), (40, 40), (40, 40)]
    pool = list(enumerate(sizes, start=20))
    beside = "qwen" not in kind  # whose plain forward needs tokens between two images

    def word():
        return "".join(rng.choice("ab ") for _ in range(rng.randint(1, 4)))

    units = []
    for group in range(5):
        prompt = []
        for _ in range(rng.randint(1, 5)):
            after_image = bool(prompt) and not isinstance(prompt[-1], str)
            prompt.append(rng.choice(pool) if rng.random() < 0.5 and (beside or not after_image) else word())
        start = "x" if isinstance(prompt[0], str) else ""  # a first token has no log-prob
        prompt = [start, *prompt] if start else prompt
        completions = [word() + "c" for _ in range(rng.randint(1, 3))]
        units += [Unit(tuple(made.sample(*prompt, completion=text) for text in completions), group)]
        units += [Unit((made.sample(*prompt[: rng.randint(1, len(prompt))], "y", completion=word()),), group)]
    return units + [Unit((made.sample("x", one, "y", pool[-1], "z", completion="yes"),), 9) for one in pool[-3:]]


def plain_logps(model, reader, sample):
    """Log-probs of a plain forward of a sequence alone, with what its processor returned."""
    ids = torch.from_numpy(sample.ids)[None]
    inputs = {}
    if sample.images:
        pixels = reader.inputs(sample.images)
        inputs = {**pixels}
        if reader.family.token_types:
            inputs[reader.family.token_types] = (ids == reader.token_id).long()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, :-1].log_softmax(-1)
    logps = logits.gather(1, ids[0, 1:, None])[:, 0]
    return logps[torch.from_numpy(sample.loss_mask[1:])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", [shared_and_unshared, random_units])
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(kind, made, tmp_path):
    model = vision_model(kind)
    reader = reader_of(kind, model)
    written = Written(reader, tmp_path)
    units = random_units(written, kind, 0) if made is random_units else shared_and_unshared(written)
    samples = [sample for unit in units for sample in unit.samples]
    plain = torch.cat([plain_logps(model, reader, sample) for sample in samples])
    weights = dict(model.named_parameters())
    by_hand = torch.autograd.grad(plain.sum(), list(weights.values()), allow_unused=True)
    engine = Engine(model, images=reader)
    assert engine.layout == ("padded" if kind == "gemma3" else "tree")
    for budget in (10_000, 320 if made is random_units else 150):
        logps, rows = {}, plan_rows(units, budget, layout=engine.layout)[0]
        model.zero_grad()
        for row in rows:
            batch = build_batch([units[number] for number in row], engine.layout)
            out = engine(model, batch)
            out.logps_T.sum().backward()
            parts = out.logps_T.detach().split(torch.bincount(batch.sequence_T).tolist())
            order = [(number, k) for number in row for k in range(len(units[number].samples))]
            logps |= dict(zip(order, parts, strict=True))
        ours = torch.cat([logps[number, k] for number, unit in enumerate(units) for k in range(len(unit.samples))])
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=0)
        for (name, weight), grad in zip(weights.items(), by_hand, strict=True):
            if grad is not None:
                torch.testing.assert_close(weight.grad, grad, atol=1e-4, rtol=1e-3, msg=name)
    seen = [name for name, grad in zip(weights, by_hand, strict=True) if grad is not None and grad.any()]
    assert any("vis" in name for name in seen)
    batch = build_batch(units, engine.layout)
    check_first_batch(engine, model, batch).require()
    check_first_gradients(engine, model, build_batch(units[3:4], engine.layout), torch.float32).require()


def test_sequences_fold_by_images_too(tmp_path):
    model = vision_model("llava")
    made = Written(reader_of("llava", model), tmp_path)
    same, same_too = made.sample("look ", 0, "x"), made.sample("look ", 0, "x", completion="another")
    other = made.sample("look ", 1, "x")
    assert same.ids.tolist() == other.ids.tolist()
    assert len(np.intersect1d(same.ids, other.ids)) > 0
    shared = row_tokens([Unit((same, same_too))])
    assert shared < len(same.ids) + len("another")
    apart = row_tokens([Unit((same, other))])
    assert apart == 2 * len(same.ids) - len("look ")
    batch = build_batch([Unit((same, other)), Unit((same_too,))])
    assert len(batch.images.refs) == 2


def test_each_distinct_image_is_encoded_once(tmp_path, monkeypatch):
    model = vision_model("qwen2_5_vl")
    made = Written(reader_of("qwen2_5_vl", model), tmp_path)
    engine, encoded = Engine(model, images=made.reader), []
    body = type(model.model)
    stock = body.get_image_features

    def counted(self, pixel_values, image_grid_thw, **options):
        encoded.append(len(image_grid_thw))
        return stock(self, pixel_values, image_grid_thw, **options)

    monkeypatch.setattr(body, "get_image_features", counted)
    engine(model, build_batch(shared_and_unshared(made)))
    assert encoded == [5]  # images 0, 1 and 2, and the two that look alike


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_the_model(kind, tmp_path):
    model = vision_model(kind)
    made = Written(reader_of(kind, model), tmp_path)
    for sample in (made.sample("a", 0, "bc", 1, "d"), made.sample(2, "x", 2), made.sample("text alone")):
        ids = torch.from_numpy(sample.ids)[None]
        grids = torch.tensor([image.grid for image in sample.images]) if sample.images else None
        types = (ids == made.reader.token_id).int()
        right, _ = model.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids)
        assert grid_positions(sample).tolist() == right[:, 0].tolist()
