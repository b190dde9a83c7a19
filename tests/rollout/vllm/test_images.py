"""Prompts with images on their way to a vLLM server: what is sent, what comes back, and what is refused."""

import asyncio
import base64
import io

import pytest
import torch

pytest.importorskip("PIL")

from peft import LoraConfig, get_peft_model
from PIL import Image

from made_vllm import FakeVllm
from tiny_vision import drawn_image, processor, vision_model
from upweight.errors import UserError
from upweight.image_files import open_image
from upweight.models.processor import attach_processor, image_reader
from upweight.models.vision import freeze_vision
from upweight.rollout.vllm.file_transfer import AdapterTransport, WeightTransport, transport_for
from upweight.rollout.vllm.images import ImagePrompts, data_uri
from upweight.rollout.vllm.server import VllmServer
from upweight.rollout.vllm.servers import VllmServers
from upweight.rollout.vllm.token_route import GENERATE
from upweight.types import Sampling

IMAGE = 259  # the token


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    vision_model("idefics3").save_pretrained(place)
    return place


def served(kind="idefics3", folder=None):
    model = vision_model(kind)
    if folder is not None:
        model.config.name_or_path = str(folder)
    tokenizer = attach_processor(processor(kind), model.config)
    return model, tokenizer, image_reader(tokenizer)


def written(reader, tmp_path, *sizes):
    """References to drawn images of some sizes, and the tokens that stand for each."""
    refs, ids = [], []
    for number, size in enumerate(sizes):
        file = tmp_path / f"{number}.png"
        drawn_image(number, *size).save(file)
        ref, expansion = reader.refer(file.read_bytes(), str(file))
        refs.append(ref)
        ids.append(list(expansion.ids))
    return refs, ids


@pytest.mark.parametrize("kind", ["llava", "idefics3", "qwen2_5_vl", "mistral3"])
def test_a_request_has_one_placeholder_and_the_file_of_each_image(kind, tmp_path):
    _, _, reader = served(kind)
    refs, (one, two) = written(reader, tmp_path, (48, 32), (64, 64))
    prompts = ImagePrompts(reader)
    fields = prompts.without_image_token({"n": 3, "max_tokens": 4, "logit_bias": {"7": 1.0}, "return_token_ids": True})
    body = asyncio.run(prompts.body([65, *one, 66, *two, 67], refs, fields))
    assert body["token_ids"] == [65, IMAGE, 66, IMAGE, 67]
    assert [part["uuid"] for part in body["content_parts"]] == [ref.digest for ref in refs]
    assert [base64.b64decode(part["url"].partition(",")[2]) for part in body["content_parts"]] == [
        (tmp_path / f"{number}.png").read_bytes() for number in range(2)
    ]
    bias = {"7": 1.0, str(IMAGE): -100.0}
    assert body["sampling_params"] == {"n": 3, "max_tokens": 4, "logit_bias": bias}
    assert body["return_token_ids"] is True


def test_what_vllm_would_decode_in_another_way_is_sent_as_training_reads_it():
    grey = drawn_image(1).convert("LA")
    turned = Image.Exif()
    turned[0x0112] = 6
    holed = {"transparency": drawn_image(2).getpixel((0, 0))}
    for image, options in ((grey, {}), (drawn_image(2), {"exif": turned}), (drawn_image(2), holed)):
        buffer = io.BytesIO()
        image.save(buffer, "PNG", **options)
        sent = base64.b64decode(data_uri(buffer.getvalue()).partition(",")[2])
        with Image.open(io.BytesIO(sent)) as plain:
            assert plain.mode == "RGB"
            assert not plain.getexif()
            assert plain.tobytes() == open_image(buffer.getvalue()).tobytes()
            assert plain.size == open_image(buffer.getvalue()).size


def test_tokens_that_the_processor_does_not_write_are_refused(tmp_path):
    _, _, reader = served()
    refs, (one,) = written(reader, tmp_path, (48, 32))
    with pytest.raises(UserError, match=r"0\.png: its tokens in the prompt are not those"):
        asyncio.run(ImagePrompts(reader).body([65, *one[1:]], refs, {}))
    (tmp_path / "0.png").write_bytes(b"other")
    with pytest.raises(UserError, match="changed since the rows were prepared"):
        asyncio.run(ImagePrompts(reader).body([65, *one], refs, {}))


def test_marks_of_an_image_that_are_one_token_with_the_text_are_parted_from_it(tmp_path):
    _, tokenizer, reader = served(
        "gemma3"
    )  # which has tokens of one to four empty lines, and writes two beside an image
    refs, (one, two) = written(reader, tmp_path, (48, 32), (64, 64))
    texts = [tokenizer.decode(ids) for ids in (one, two)]
    contents = [(tmp_path / f"{number}.png").read_bytes() for number in range(2)]
    prompt = tokenizer.encode(f"ab\n{texts[0]}{texts[1]}\n\nc", add_special_tokens=False)
    assert not any(tuple(prompt[at : at + len(one)]) == tuple(one) for at in range(len(prompt)))
    (begin,) = tokenizer.encode(reader.placeholder, add_special_tokens=False)
    lines = [tokenizer.convert_tokens_to_ids("\n" * number) for number in (1, 2)]
    sent = ImagePrompts(reader).folded(prompt, refs, contents)
    assert sent == [*tokenizer.encode("ab"), lines[0], begin, begin, lines[1], *tokenizer.encode("c")]
    for other in ([65, *one[1:]], tokenizer.encode(f"{texts[0]}\nc", add_special_tokens=False)):
        with pytest.raises(UserError, match=r"0\.png: its tokens in the prompt are not those"):
            ImagePrompts(reader).folded(other, refs[:1], contents[:1])


def test_a_server_that_writes_other_tokens_is_refused_with_both_counts(tmp_path):
    _, _, reader = served()
    _, (one,) = written(reader, tmp_path, (48, 32))
    prompts = ImagePrompts(reader)
    count = one.count(IMAGE)
    with pytest.raises(UserError, match=f"writes {count - 4} tokens for the images .* training has {count}"):
        prompts.choices({"prompt_token_ids": one[6:], "choices": []}, one)
    with pytest.raises(UserError, match=r"other tokens around the images"):
        prompts.choices({"prompt_token_ids": [*one, 65], "choices": []}, one)
    with pytest.raises(UserError, match=r"use vLLM 0\.32 or later"):
        prompts.choices({"choices": []}, one)


@torch.no_grad()
def largest_difference(model, reader, prompts, images, groups) -> float:
    worst = 0.0
    for prompt, refs, group in zip(prompts, images, groups, strict=True):
        for one in group:
            assert IMAGE not in one.ids
            ids = torch.tensor([[*prompt, *one.ids]])
            inputs = reader.plain_inputs([refs], ids) if refs else {}
            logits = model(input_ids=ids, **inputs).logits[0, len(prompt) - 1 : -1]
            logits[:, IMAGE] = -torch.inf
            logps = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            worst = max(worst, float((logps - torch.tensor(one.logps)).abs().max()))
    return worst


def move(model) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn_like(weight))


@pytest.mark.parametrize("kind", ["all weights", "adapter", "two servers"])
def test_completions_follow_the_policy_through_syncs(kind, folder, tmp_path):
    model, tokenizer, reader = served(folder=folder)
    if kind == "adapter":
        excluded = freeze_vision(model)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", exclude_modules=excluded))
    refs, (one, two, three) = written(reader, tmp_path, (48, 32), (64, 64), (32, 40))
    prompts = [[65, *one, 66], [67, *two, 68, *three, 69], [70, 71]]
    images = ((refs[0],), (refs[1], refs[2]), ())
    fakes = [FakeVllm(folder, reader=reader) for _ in range(2 if kind == "two servers" else 1)]

    def connect(url, number, on_model):
        options = {"dtype": torch.float32, "folder": tmp_path / f"w{number}", "timeout": 5.0, "probes_images": True}
        return VllmServer(url, model, tokenizer, on_model=on_model, **options)

    try:
        server = (
            VllmServers([fake.url for fake in fakes], connect) if len(fakes) > 1 else connect(fakes[0].url, 0, None)
        )
        assert server.reads_images
        for version in range(2):
            server.sync(version)
            groups = server.generate(prompts, 2, Sampling(5, images=images))
            assert largest_difference(model, reader, prompts, images, groups) < 1e-4
            move(model)
        asked = [body for fake in fakes for body in fake.asked(GENERATE) if body["sampling_params"]["n"] == 2]
        assert len(asked) == 2 * 2  # the images of a prompt travel once for all its completions
        assert all(fake.asked("/reset_encoder_cache") for fake in fakes) == (kind != "adapter")
        server.close()
    finally:
        for fake in fakes:
            fake.close()


def test_a_server_with_another_vision_tower_is_refused(folder, tmp_path):
    model, tokenizer, reader = served(folder=folder)
    excluded = freeze_vision(model)
    with torch.no_grad():
        for weight in model.model.vision_model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", exclude_modules=excluded))
    fake = FakeVllm(folder, reader=reader)
    options = {"dtype": torch.float32, "folder": tmp_path / "w", "timeout": 5.0}
    try:
        VllmServer(fake.url, model, tokenizer, **options)  # tokens alone do not show it
        with pytest.raises(UserError, match="computes with other weights"):
            VllmServer(fake.url, model, tokenizer, **options, probes_images=True)
        fake.reader = None  # as without --enable-scale-out
        with pytest.raises(UserError, match=r"takes no prompts with images .*vllm\.enable_scale_out: true"):
            VllmServer(fake.url, model, tokenizer, **options, probes_images=True)
    finally:
        fake.close()


def test_an_adapter_of_the_vision_tower_is_sent_merged():
    for excluded, wanted in ((freeze_vision(vision_model("idefics3")), AdapterTransport), (None, WeightTransport)):
        model = get_peft_model(
            vision_model("idefics3"), LoraConfig(r=4, target_modules="all-linear", exclude_modules=excluded)
        )
        assert isinstance(transport_for(model, None, torch.float32, "base"), wanted)
    with pytest.raises(UserError, match="freeze_vision: vLLM cannot load such an adapter"):
        transport_for(model, True, torch.float32, "base")
