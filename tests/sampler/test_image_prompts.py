"""Completions after images: a prompt is read once for its group, and tokens are those of the model's own forward."""

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from tiny_vision import KINDS, drawn_image, processor, vision_model
from upweight.engine import Engine
from upweight.models.modules import dropout_off
from upweight.models.processor import attach_processor, image_reader
from upweight.models.vision import image_features
from upweight.sampler.collect import CompletionCollector
from upweight.sampler.cuda_graphs import EagerSteps
from upweight.sampler.draw import draw
from upweight.sampler.forward import CachedForward
from upweight.sampler.in_process import InProcess
from upweight.sampler.slot_sampler import SlotSampler
from upweight.sampler.slots import Slots
from upweight.types import Sampling

SHARING = [kind for kind in KINDS if kind != "gemma3"]
COUNT = 3


def prepared(kind, folder):
    """A model, its engine, and prompts with images: two share one, two differ in theirs alone, one has none."""
    model = vision_model(kind)
    reader = image_reader(attach_processor(processor(kind), model.config))
    assert reader is not None
    engine = Engine(model, images=reader)

    def image(seed, size=(48, 32)):
        path = folder / f"{seed}-{size[0]}-{size[1]}.png"
        drawn_image(seed, *size).save(path)
        return reader.refer(path.read_bytes(), str(path))

    first, second, other = image(0), image(1, (32, 64)), image(2)
    parts = [("look ", first, " and ", second, " what?"), ("look ", first, " so"), ("look ", other, " so"), ("hello",)]
    encode = reader.processor.tokenizer.encode
    texts = ["".join(one if isinstance(one, str) else one[1].text for one in several) for several in parts]
    prompts = [encode(text, add_special_tokens=False) for text in texts]
    images = tuple(tuple(one[0] for one in several if not isinstance(one, str)) for several in parts)
    return model, reader, engine, prompts, images


def one_by_one(model, reader, prompt, images, sampling, uniform_N):  # noqa: PLR0917
    """Tokens drawn from whole forwards of the sequence so far, one at a time."""
    ids = list(prompt)
    for uniform in uniform_N:
        ids_1N = torch.tensor([ids])
        inputs = reader.plain_inputs([images], ids_1N) if images else {}
        logits = model(input_ids=ids_1N, attention_mask=torch.ones_like(ids_1N), use_cache=False, **inputs).logits
        token, _ = draw(logits[:, -1], uniform[None], sampling)
        ids.append(int(token))
    return ids[len(prompt) :]


def runs_of_the_tower(model, monkeypatch):
    """The number of images in each run of the vision tower from here on."""
    from upweight.engine import image_rows

    runs = []

    def counted(base, inputs):
        features = image_features(base, inputs)
        runs.append(len(inputs["pixel_values"]))
        return features

    monkeypatch.setattr(image_rows, "image_features", counted)
    return runs


@pytest.mark.parametrize("kind", SHARING)
def test_greedy_tokens_are_those_of_generate(kind, tmp_path, monkeypatch):
    model, reader, engine, prompts, images = prepared(kind, tmp_path)
    sampler = InProcess(model, engine=engine, end_ids=())
    greedy = Sampling(max_new_tokens=10, temperature=0.0, images=images)
    sampler.check_sampling(prompts, greedy)
    runs = runs_of_the_tower(model, monkeypatch)
    out = sampler.generate(prompts, 2, greedy)
    assert sampler.shares_prefixes
    assert len(runs) == 1, "all prompts are prefilled together, and their images once for the group"
    for prompt, refs, group in zip(prompts, images, out, strict=True):
        ids = torch.tensor([prompt])
        inputs = reader.plain_inputs([refs], ids) if refs else {}
        never = {"suppress_tokens": [reader.token_id]}
        written = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, max_new_tokens=10, min_new_tokens=10,
            do_sample=False, eos_token_id=299, **never,
        )  # fmt: skip
        assert [one.ids for one in group] == [written[0, len(prompt) :].tolist()] * 2


@pytest.mark.parametrize("kind", SHARING)
def test_seeded_tokens_are_those_of_whole_forwards(kind, tmp_path):
    model, reader, engine, prompts, images = prepared(kind, tmp_path)
    sampling = Sampling(max_new_tokens=8, seed=3, images=images)
    out = InProcess(model, engine=engine, end_ids=()).generate(prompts, COUNT, sampling)
    numbers = torch.rand((len(prompts), COUNT, 8), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    never = Sampling(max_new_tokens=8, suppress_ids=(reader.token_id,))
    with torch.no_grad():
        for prompt, refs, group, uniform_SN in zip(prompts, images, out, numbers, strict=True):
            for one, uniform_N in zip(group, uniform_SN, strict=True):
                assert one.ids == one_by_one(model, reader, prompt, refs, never, uniform_N)


@pytest.mark.parametrize("kind", ["llava", "idefics3", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("most_slots", [64, 2])
def test_slots_draw_what_grids_draw_and_keep_images_over_calls(kind, most_slots, tmp_path, monkeypatch):
    model, reader, engine, prompts, images = prepared(kind, tmp_path)
    sampling = Sampling(max_new_tokens=12, seed=0, repetition_penalty=1.2, images=images)
    grid = InProcess(model, engine=engine, end_ids=())
    expected = grid.generate(prompts, COUNT, sampling)
    forward = CachedForward(model, model.device, reader)
    slots = SlotSampler(EagerSteps(Slots(forward)), 8192, most_slots)
    shape = (len(prompts), COUNT, 12)
    uniform_SN = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).flatten(0, 1)
    never = Sampling(max_new_tokens=12, repetition_penalty=1.2, suppress_ids=(reader.token_id,))
    runs = runs_of_the_tower(model, monkeypatch)
    for _ in range(2):
        rows = CompletionCollector(len(prompts), COUNT, 12)
        with torch.no_grad(), dropout_off(model):
            keys = forward.images.keys(prompts, images)
            slots.sample(keys, never, uniform_SN, rows, 1 << 30)
        for number, group in enumerate(expected):
            for one, other in zip(rows.completions(number), group, strict=True):
                assert one.ids == other.ids
                assert np.allclose(one.logps, other.logps, atol=1e-4)
    # The second call finds all prompts in its pages. With two slots the prompts come after each other.
    assert len(runs) <= (1 if most_slots == 64 else 3)


def test_a_placeholder_is_never_drawn(tmp_path):
    model, reader, engine, prompts, images = prepared("llava", tmp_path)
    with torch.no_grad():
        model.lm_head.weight[reader.token_id] = 30 * model.lm_head.weight[5]  # now the likeliest token, or the last
    sampler = InProcess(model, engine=engine, end_ids=())
    for sampling in (Sampling(16, seed=0, images=images), Sampling(16, temperature=0.0, images=images), Sampling(16)):
        out = sampler.generate(prompts, 4, sampling)
        assert all(reader.token_id not in one.ids for group in out for one in group)


def test_prompts_that_end_in_an_image_are_sampled_by_generate(tmp_path):
    model, reader, engine, prompts, images = prepared("llava", tmp_path)
    at = max(place for place, token in enumerate(prompts[1]) if token == reader.token_id)
    cut = [prompts[1][: at + 1]]
    sampling = Sampling(max_new_tokens=4, temperature=0.0, images=(images[1],))
    ((one,),) = InProcess(model, engine=engine, end_ids=()).generate(cut, 1, sampling)
    assert one.ids == one_by_one(
        model, reader, cut[0], images[1], Sampling(4, temperature=0.0, suppress_ids=(reader.token_id,)),
        torch.zeros(4, dtype=torch.float64),
    )  # fmt: skip
