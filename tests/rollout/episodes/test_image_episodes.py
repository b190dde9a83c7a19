"""Episodes with images: those of the prompt, of tools and of environments; trained on as they were sampled."""

import json

import pytest
import torch

pytest.importorskip("PIL")


from tiny_vision import drawn_image, processor, vision_model
from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.data.encode import row_images
from upweight.data.images.records import image_column, image_refs
from upweight.data.tokenize.templates import ChatTemplate
from upweight.engine import Engine
from upweight.engine.packing import build_batch
from upweight.environments.python_class import PythonEnvironment
from upweight.errors import UserError
from upweight.models.processor import attach_processor, image_reader
from upweight.rollout.episodes.loop import EpisodeLimits, EpisodeSetup
from upweight.rollout.episodes.runner import EpisodeRunner
from upweight.rollout.rollout import Rollout, group_from_plain, group_to_plain, readable
from upweight.rollout.scoring import reward_call
from upweight.rollout.units import units_of_groups
from upweight.sampler.in_process import InProcess
from upweight.types import Completion, Group, Sampling

CALL = '<tool_call>{"name": "camera", "arguments": {"number": 5}}</tool_call>'


def camera(number: int):
    """Take a photo.

    Args:
        number: Of the camera.
    """
    return ["the photo:", drawn_image(number, 32, 32)]


class Walk:
    """Shows an image before the first turn and one after each of two."""

    def reset(self, images, **row):
        self.number, self.images = 20, images
        return drawn_image(20)

    def step(self, text):
        self.number += 1
        return None if self.number == 23 else [f"now {self.number}", drawn_image(self.number)]

    def get_reward(self):
        return len(self.images)


class CallsFirst:
    """A backend that writes a call in the first turn, and samples from a model in the others."""

    reads_images = True

    def __init__(self, sampler, tokenizer, opening):
        self.sampler, self.opening, self.seen = sampler, opening, []
        self.call = [*tokenizer.encode(CALL, add_special_tokens=False), tokenizer.eos_token_id]

    def generate(self, prompts, count, sampling, done=None):
        self.seen += [len(refs) for refs in sampling.images or [()] * len(prompts)]
        if all(len(prompt) <= self.opening for prompt in prompts):
            ids = self.call
            return [[Completion(ids, [0.0] * len(ids), [0] * len(ids), True)] * count for _ in prompts]
        return self.sampler.generate(prompts, count, sampling)

    def require_room(self, prompt, new):
        pass


def setting(kind, folder, environment, **options):
    """A model, its tokenizer, and how its episodes run."""
    model = vision_model(kind)
    tokenizer = attach_processor(processor(kind), model.config)
    images = row_images(DataSection(prepared_path=str(folder)), DatasetSpec(), tokenizer, folder)
    template = ChatTemplate(tokenizer, None, {})
    ends = frozenset([tokenizer.eos_token_id])
    setup = EpisodeSetup(environment, template, ends, EpisodeLimits(max_turns=4), images=images, **options)
    engine = Engine(model, images=image_reader(tokenizer))
    return model, tokenizer, engine, setup


def row_of(setup, tokenizer):
    """A prompt with an image, as data are prepared."""
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    marked, loaded = setup.images({"prompt": asked, "images": [drawn_image(0)]})
    ids = tokenizer.encode(f"<user>{loaded[0][1].text}what?<bot>", add_special_tokens=False)
    assert marked
    return {"prompt": asked, "prompt_ids": ids, "images": image_column([loaded[0][0]])}


def play(runner, groups, count, sampling):
    try:
        runner(groups, count, sampling, None)
    finally:
        runner.close()


def trained_logps(model, engine, groups):
    """Log-probs of the training forward at sampled tokens, and those of the sampler."""
    for group in groups:
        group.advantage_S = torch.ones(len(group.completions))
    units = units_of_groups(groups, mask_truncated=False, sampler_logps=True)
    batch = build_batch(units, engine.layout)
    with torch.no_grad():
        return engine(model, batch).logps_T, batch.sampler_logps_T, units


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "gemma3"])
def test_images_of_an_environment_are_sampled_after_and_trained_on(kind, tmp_path):
    model, tokenizer, engine, setup = setting(kind, tmp_path, PythonEnvironment(Walk))
    sampler = InProcess(model, tokenizer, engine=engine)
    row = row_of(setup, tokenizer)
    groups = [Group(0, row, list(row["prompt_ids"]))]
    play(EpisodeRunner(setup, sampler), groups, 2, Sampling(400, seed=1))
    (group,) = groups
    assert [one.failure for one in group.completions] == [None, None]
    turns = [info["turns"] for info in group.extras["episode"]]
    for completion, count in zip(group.completions, turns, strict=True):
        assert (
            len(completion.images) == 1 + count
        )  # the row's, that of the opening, and one after each turn but the last
    ours, sampled, units = trained_logps(model, engine, groups)
    assert all(len(unit.samples[0].images) == 1 + count for unit, count in zip(units, turns, strict=True))
    torch.testing.assert_close(ours, sampled, atol=1e-4, rtol=0)
    call = reward_call(groups, tokenizer.decode)
    assert [len(several) for several in call.columns["images"]] == [1 + count for count in turns]
    assert json.dumps(call.completions)  # messages hold no pixels
    assert [info["rewards"] for info in group.extras["episode"]] == [{"reward": 1}] * 2  # it got the row's image
    group.rewards_SR = torch.ones(2, 1)
    written = list(readable(Rollout(0, 0, groups), ["r"], tokenizer.decode))
    assert [len(one["images"]) for one in written] == [1, 1]
    assert [len(one["observed_images"]) for one in written] == turns  # for the page: without the row's
    plain = json.loads(json.dumps(group_to_plain(group)))
    again = group_from_plain(plain, [row])
    assert [one.images for one in again.completions] == [one.images for one in group.completions]


def test_tools_return_images(tmp_path):
    model, tokenizer, engine, setup = setting("llava", tmp_path, PythonEnvironment(functions=[camera]))
    row = {"prompt": [{"role": "user", "content": "look"}], "prompt_ids": [1]}
    backend = CallsFirst(InProcess(model, tokenizer, engine=engine), tokenizer, 30)
    groups = [Group(0, row, [1])]
    play(EpisodeRunner(setup, backend), groups, 2, Sampling(200, seed=1))
    (group,) = groups
    assert [one.failure for one in group.completions] == [None, None]
    assert backend.seen[0] == 0
    assert backend.seen[-1] == 1
    assert group.completions[0].messages[1]["content"] == [{"type": "text", "text": "the photo:"}, {"type": "image"}]
    assert image_refs({"images": image_column(group.completions[0].images)}) == group.completions[0].images
    ours, sampled, _ = trained_logps(model, engine, groups)
    calls = 2 * [True] * len(backend.call)
    written = torch.ones(len(ours), dtype=torch.bool)
    written[: len(calls) // 2] = False  # log-probs of a written call are not the model's
    second = len(group.completions[0].ids) - group.completions[0].sampled.count(False)
    written[second : second + len(calls) // 2] = False
    torch.testing.assert_close(ours[written], sampled[written], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"images": None}, "which this model does not read"), ({"image_problem": "fsdp: no"}, "fsdp: no")],
)
def test_images_that_cannot_be_trained_on_stop_the_run(options, message, tmp_path):
    model, tokenizer, engine, setup = setting("llava", tmp_path, PythonEnvironment(functions=[camera]))
    for name, value in options.items():
        setattr(setup, name, value)
    row = {"prompt": [{"role": "user", "content": "look"}], "prompt_ids": [1]}
    backend = CallsFirst(InProcess(model, tokenizer, engine=engine), tokenizer, 30)
    with pytest.raises(UserError, match=message):
        play(EpisodeRunner(setup, backend), [Group(0, row, [1])], 2, Sampling(200, seed=1))
    backend.reads_images = False
    if "images" not in options:
        setup.image_problem = None
        with pytest.raises(UserError, match="images are read by sampling in this process"):
            play(EpisodeRunner(setup, backend), [Group(0, row, [1])], 2, Sampling(200, seed=1))
