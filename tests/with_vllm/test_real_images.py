"""Prompts with images against a real vLLM server on the CPU: tokens, log-probs, and new weights of every part."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml

pytest.importorskip("PIL")

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from made_runs import write_online
from tiny_vision import drawn_image, published_processor, save_published
from upweight import log
from upweight.models.processor import attach_processor, image_reader
from upweight.models.vision import freeze_vision
from upweight.rollout.vllm.server import VllmServer
from upweight.types import Sampling
from with_vllm.real_server import ON_CPU, PYTHON, ROOT, running, with_torchvision

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

RESIZED = [(48, 32), (64, 64), (32, 80)]
# The sizes of images; where vLLM needs torchvision, which mostly resizes in another way, they need no resizing.
SIZES = {
    "idefics3": RESIZED,
    "smolvlm": [(64, 32), (64, 64), (64, 128)],  # which are resized by halves
    "mistral3": [(48, 32), (64, 64), (32, 48)],
    "qwen2_vl": [(56, 28), (56, 56), (28, 84)],
    "qwen2_5_vl": [(56, 28), (56, 56), (28, 84)],
    "qwen3_vl": [(64, 32), (64, 64), (32, 96)],
    **{kind: [(32, 32)] * 3 for kind in ("gemma3", "internvl", "llava", "llava_next")},
}
WITHOUT_TORCHVISION = ("idefics3",)
CAUSAL_ON_CPUS = "gemma3"  # vLLM's attention on CPUs lets tokens of an image see only those before them
OTHER_WAY = "prepares images in another way"
LORA = {"adapter": "lora", "lora_r": 4, "lora_target_linear": True}


@pytest.fixture(scope="module", params=SIZES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def served_model(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_published(kind, folder)
    return folder


@pytest.fixture(scope="module")
def environment(kind):
    return None if kind in WITHOUT_TORCHVISION else with_torchvision()


@pytest.fixture(scope="module")
def server(served_model, environment, tmp_path_factory):
    config = write_online(tmp_path_factory.mktemp("lora"), served_model, **LORA)
    options = ("vllm.enable_scale_out=true", "vllm.max_model_len=512")
    with running(config, *options, env=environment) as started:
        yield started


def policy(kind, folder):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model, attach_processor(published_processor(kind), model.config)


def prompts_in(folder, kind, reader):
    """Two prompts with one and two images and one without, and the images of each."""
    refs, texts = [], []
    for number, size in enumerate(SIZES[kind]):
        file = folder / f"{number}.png"
        drawn_image(number, *size).save(file)
        ref, expansion = reader.refer(file.read_bytes(), str(file))
        refs.append(ref)
        texts.append(expansion.text)
    # Gemma 3 has one token for the lines that end a text and the empty ones before an image.
    prompts = [f"ab\n{texts[0]}c", f"f\n\n{texts[1]}gh{texts[2]}\n\ni", "abc"]
    encode = reader.processor.tokenizer.encode
    return [encode(prompt, add_special_tokens=False) for prompt in prompts], ((refs[0],), (refs[1], refs[2]), ())


def lora(model):
    """A model with an adapter of its language model that is not zero."""
    options = {"target_modules": "all-linear", "exclude_modules": freeze_vision(model), "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(r=4, **options))


@torch.no_grad()
def largest_difference(model, reader, prompts, images, groups) -> float:
    worst = 0.0
    for prompt, refs, group in zip(prompts, images, groups, strict=True):
        for one in group:
            assert reader.token_id not in one.ids
            ids = torch.tensor([[*prompt, *one.ids]])
            inputs = reader.plain_inputs([refs], ids) if refs else {}
            inputs.pop("token_type_ids", None)  # of CAUSAL_ON_CPUS, whose tokens then see only earlier ones
            logits = model(input_ids=ids, **inputs).logits[0, len(prompt) - 1 : -1]
            logits[:, reader.token_id] = -torch.inf
            logps = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            worst = max(worst, float((logps - torch.tensor(one.logps)).abs().max()))
    return worst


@pytest.fixture
def warns_anew(monkeypatch):
    monkeypatch.setattr(log, "_warned", set())


@pytest.mark.usefixtures("warns_anew")
def test_a_server_that_resizes_in_another_way_is_warned_of(kind, server, served_model, tmp_path, caplog):
    model, tokenizer = policy(kind, served_model)  # which resizes with Pillow
    options = {"dtype": torch.float32, "folder": tmp_path / "vllm", "timeout": 300.0, "probes_images": True}
    VllmServer(server.url, lora(model), tokenizer, **options).close()
    assert (OTHER_WAY in caplog.text) == (kind not in WITHOUT_TORCHVISION)


@pytest.mark.parametrize("trained", ["adapter", "vision tower", "all"])  # the adapter first: later ones move the base
def test_completions_after_images_follow_the_policy(trained, kind, server, served_model, tmp_path):
    model, tokenizer = policy(kind, served_model)
    reader = image_reader(tokenizer)
    if trained == "adapter":
        model = lora(model)
    else:
        vision_parts = ("vision_", "visual", "connector", "projector")
        for name, weight in model.named_parameters():
            weight.requires_grad_(trained == "all" or any(part in name for part in vision_parts))
    prompts, images = prompts_in(tmp_path, kind, reader)
    options = {"dtype": torch.float32, "folder": tmp_path / "vllm", "timeout": 300.0, "probes_images": True}
    backend = VllmServer(server.url, model, tokenizer, **options)
    before = None
    for version in range(3):
        backend.sync(version)
        groups = backend.generate(prompts, 4, Sampling(12, images=images))
        assert [len(group) for group in groups] == [4, 4, 4]
        assert largest_difference(model, reader, prompts, images, groups) < 1e-4
        assert before is None or largest_difference(model, reader, prompts, images, before) > 1e-2
        before = groups
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.add_(0.02 * torch.randn_like(weight))
    backend.close()


def test_steps_of_grpo_with_images(kind, server, served_model, environment, tmp_path):
    file = write_online(tmp_path, served_model, max_steps=3, bf16=False, chat_template=None)
    rows = []
    for number, size in enumerate(RESIZED):
        drawn_image(number, *size).save(tmp_path / f"{number}.png")
        content = [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": "say a"}]
        rows.append({"prompt": [{"role": "user", "content": content}], "answer": "a"})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    content = yaml.safe_load(file.read_text())
    # Long enough that some completions have a vowel: a step whose rewards are equal compares nothing.
    content["trl"] |= {"use_vllm": True, "vllm_server_port": server.port, "max_completion_length": 32}
    file.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "upweight", "train", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    name = "sampling/sampling_logp_difference/mean"
    apart = [line[name] for line in lines if name in line]
    assert apart
    # The sampler leaves the image token out of its distribution.
    assert max(apart) < (0.2 if kind == CAUSAL_ON_CPUS else 0.02)
    assert (OTHER_WAY in done.stderr) == (kind == CAUSAL_ON_CPUS)  # both sides have torchvision, or neither
    assert not (tmp_path / "out" / "vllm").exists()


@pytest.mark.parametrize("trained", ["lora", "tower", "full"])
def test_an_engine_beside_the_trainer_reads_images(trained, tmp_path):
    (tmp_path / "model").mkdir()
    save_published("idefics3", tmp_path / "model")
    # vLLM's environment lacks what the project has: that is put after its own.
    site = next(path for path in sys.path if path.endswith("site-packages"))
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    env = {**os.environ, **ON_CPU, "UPWEIGHT_SITE": site, "PYTHONPATH": paths}
    script = ROOT / "tests" / "with_vllm" / "colocated_images.py"
    command = [PYTHON, str(script), str(tmp_path / "model"), str(tmp_path), trained]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rounds = json.loads(ended.stdout.splitlines()[-1])
    assert [one["version"] for one in rounds] == [0, 3, 4]
    assert all(one["difference"] < 1e-4 and one["drawn"] == 0 for one in rounds)
    assert all(one["former"] > 1e-2 for one in rounds[1:])
    assert all(one["completions"] == [3, 3, 3] for one in rounds)
    assert not (tmp_path / "vllm").exists()
