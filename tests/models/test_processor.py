"""Options of a processor act as AutoProcessor's do, also after it is saved; those that fail are named."""

import pytest

pytest.importorskip("PIL")

from transformers import AutoProcessor

from tiny_vision import config, drawn_image, processor
from upweight.config.sections.model import ModelSection
from upweight.errors import UserError
from upweight.models.processor import image_reader, save_processor
from upweight.models.tokenizer import load_tokenizer

CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def saved(kind, folder):
    config(kind).save_pretrained(folder)
    processor(kind).save_pretrained(folder)
    return str(folder)


def test_options_that_a_class_has_defaults_of_take_effect_and_are_saved(tmp_path):
    section = ModelSection(base_model=saved("gemma3", tmp_path / "model"), processor_options=CROPS)
    tokenizer = load_tokenizer(section)
    image = drawn_image(0, 150, 40)
    theirs = AutoProcessor.from_pretrained(section.base_model, **CROPS)
    asked = {"text": ["<boi>"], "images": [[image]], "return_tensors": "pt", "add_special_tokens": False}
    expected = theirs(**asked)
    reader = image_reader(tokenizer)
    assert len(expected["pixel_values"]) == 4
    assert reader.expansion(*image.size).ids == tuple(expected["input_ids"][0].tolist())
    save_processor(tokenizer, str(tmp_path / "trained"))
    for options in ({}, CROPS):
        again = image_reader(load_tokenizer(ModelSection(base_model=section.base_model, processor_options=options)))
        assert again.expansion(*image.size).tokens == (16 if options else 4)
    config("gemma3").save_pretrained(tmp_path / "trained")
    trained = image_reader(load_tokenizer(ModelSection(base_model=str(tmp_path / "trained"))))
    assert trained.expansion(*image.size).tokens == 16


def test_options_that_the_processor_cannot_work_with_are_named(tmp_path):
    section = ModelSection(base_model=saved("llava_next", tmp_path), processor_options={"size": {"longest_edge": 512}})
    with pytest.raises(UserError, match=r"processor_kwargs: \{'size': .* fail: .* takes no image of 64 x 64"):
        load_tokenizer(section)


def test_options_that_the_processor_does_not_name_are_warned_of(tmp_path, caplog):
    base = saved("idefics3", tmp_path)
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "image_seq_len": 4}
    load_tokenizer(ModelSection(base_model=base, processor_options={**sizes, "do_image_splitting": False}))
    assert not caplog.records
    load_tokenizer(ModelSection(base_model=base, processor_options={"do_image_spliting": False}))
    assert "names no option 'do_image_spliting': it may do nothing. Did you mean 'do_image_splitting'?" in caplog.text
