import base64
import io
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from datasets import Dataset

from tiny_vision import KINDS, config, drawn_image, processor
from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.config.view import ConfigView
from upweight.data.encode import build_encoder
from upweight.data.images.row_images import undecoded
from upweight.data.raw_row import RowError
from upweight.data.units import units_of
from upweight.data.workers import bad_row
from upweight.engine.images import image_positions
from upweight.methods import DPO, KTO, ORM, ORPO, SFT
from upweight.models.processor import attach_processor
from upweight.row_rules import apply_length_rules


def png(seed=0, *size) -> bytes:
    buffer = io.BytesIO()
    drawn_image(seed, *size).save(buffer, "PNG")
    return buffer.getvalue()


def encoder(folder, method=None, kind="llava", hosts=(), **entry):
    tokenizer = attach_processor(processor(kind), config(kind))
    data = DataSection(prepared_path=str(folder / "prepared"), image_hosts=list(hosts))
    return build_encoder(data, method or SFT(), DatasetSpec(**entry), 0, tokenizer, ConfigView({}), folder)


@pytest.fixture
def image_server():
    """A server on this machine with a picture, a page, and an address that leads to another host."""
    asked_for = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked_for.append(self.path)
            if self.path == "/away.png":
                self.send_response(302)
                self.send_header("Location", "https://elsewhere.invalid/a.png")
                self.end_headers()
                return
            content = {"/a.png": png(0), "/page.html": b"<html>"}.get(self.path)
            self.send_response(200 if content else 404)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", asked=asked_for)
    server.shutdown()
    server.server_close()


def asked(*parts):
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": [text("a cat")]}]


def text(words):
    return {"type": "text", "text": words}


IMAGE = {"type": "image"}
SHAPES = {
    "apart": [[text("What "), IMAGE, text(" and "), IMAGE, text("?")], [text("a cat")]],
    "side by side": [[IMAGE, IMAGE, text("?")], [text("a cat")]],
    "at the end": [[IMAGE, text("or "), IMAGE], [text("a cat")]],
    "in an answer": [[IMAGE, text("?")], [text("a "), IMAGE, text("cat")]],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ids_are_those_of_the_processor(kind, shape, tmp_path):
    asked_for, answered = SHAPES[shape]
    messages = [{"role": "user", "content": asked_for}, {"role": "assistant", "content": answered}]
    images = [drawn_image(0), drawn_image(1, 64, 40)]
    (record,) = encoder(tmp_path, kind=kind)({"messages": messages, "images": images})
    of_kind = processor(kind)
    rendered = of_kind.tokenizer.apply_chat_template(messages, tokenize=False)
    right = of_kind(text=[rendered], images=[images], add_special_tokens=False)["input_ids"][0]
    assert record.columns["input_ids"] == list(right)
    trained = [
        token for token, kept in zip(record.columns["input_ids"], record.columns["loss_mask"], strict=True) if kept
    ]
    assert of_kind.tokenizer.decode(trained) == "a cat<eos>"  # not a mark of an image in it
    refs = record.columns["images"]
    assert [ref["tokens"] for ref in refs] == [
        len(at) for at in image_positions(units_of([record.columns], SFT())[0].samples[0])
    ]
    assert "tokens" in record.text["images"]


def sources(folder):
    """The same image in every form that a part or a column may have."""
    (folder / "one.png").write_bytes(png())
    in_base64 = base64.b64encode(png()).decode()
    return {
        "file": {"image": "one.png"},
        "absolute path": {"path": str(folder / "one.png")},
        "bytes": {"image": {"bytes": png(), "path": None}},
        "base64": {"base64": in_base64},
        "data URI": {"url": f"data:image/png;base64,{in_base64}"},
        "OpenAI": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{in_base64}"}},
        "Pillow": {"image": drawn_image(0)},
    }


@pytest.mark.parametrize("form", ["file", "absolute path", "bytes", "base64", "data URI", "OpenAI", "Pillow"])
def test_forms_of_an_image(form, tmp_path):
    part = {"type": "image", **sources(tmp_path)[form]}
    (record,) = encoder(tmp_path)({"messages": asked(part, text("what?"))})
    (ref,) = record.columns["images"]
    assert Path(ref["path"]).read_bytes() == png()
    assert record.columns["input_ids"].count(259) == 16


def test_images_of_a_column_stand_before_the_text_or_after_it_for_types_of_axolotl(tmp_path):
    row = {"messages": asked(text("what?")), "images": [drawn_image(0), drawn_image(1)]}
    (first,) = encoder(tmp_path)(row)
    assert first.text["text"].startswith("<user><image><image>what?")
    (last,) = encoder(tmp_path, type="chat_template")(row)
    assert last.text["text"].startswith("<user>what?<image><image>")
    (single,) = encoder(tmp_path)({"messages": asked(text("what?")), "image": drawn_image(0)})
    assert len(single.columns["images"]) == 1


def test_placeholders_in_texts_name_the_places(tmp_path):
    talk = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "a cat"}]
    (chat,) = encoder(tmp_path, type="chat_template", field_messages="conversations")(
        {"conversations": talk, "images": [drawn_image(0)]}
    )
    assert chat.text["text"].startswith("<user><image>\nwhat is it?")
    row = {"prompt": "look: <image> what?", "completion": " a cat", "images": [drawn_image(0)]}
    (plain,) = encoder(tmp_path)(row)
    assert plain.columns["input_ids"].count(259) == 16
    assert not any(np.array(plain.columns["loss_mask"])[: -len(" a cat") - 1])


def test_pairs_and_labelled_rows_share_the_images_of_their_prompt(tmp_path):
    prompt = [{"role": "user", "content": [IMAGE, text("what?")]}]
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected", "completion")}
    pair = {"prompt": prompt, "chosen": answers["chosen"], "rejected": answers["rejected"], "images": [drawn_image(0)]}
    (record,) = encoder(tmp_path, DPO())(pair)
    (unit,) = units_of([record.columns], DPO())
    assert [len(sample.images) for sample in unit.samples] == [1, 1]
    whole = {name: [*prompt, *answers[name]] for name in ("chosen", "rejected")}
    (implicit,) = encoder(tmp_path, DPO())({**whole, "images": [drawn_image(0)]})
    assert implicit.columns == record.columns
    (orpo,) = units_of([record.columns], ORPO())
    assert 259 not in orpo.samples[0].ids[orpo.samples[0].loss_mask]
    label = {"prompt": prompt, "completion": answers["completion"], "label": True, "images": [drawn_image(0)]}
    other = {**label, "label": False, "images": [drawn_image(1)]}
    records = [one for row in (label, other) for one in encoder(tmp_path, KTO())(row)]
    matched = units_of([one.columns for one in records], KTO(), compare=True)
    assert len(matched[0].samples) == 1  # the prompts differ in their image
    (scored,) = encoder(tmp_path, ORM())(pair)
    (unit,) = units_of([scored.columns], ORM())
    assert [len(sample.images) for sample in unit.samples] == [1, 1]
    assert [int(sample.loss_mask.sum()) for sample in unit.samples] == [1, 1]
    pair |= {"prompt": "<image>?", "chosen": " yes <image>", "rejected": " no"}
    with pytest.raises(RowError, match="images in the prompt, before the completion begins"):
        encoder(tmp_path, DPO())(pair)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": asked(IMAGE), "images": []}, r"messages\[0\].content\[0\]': expected an image; .* hold 0"),
        ({"messages": asked(IMAGE), "images": ["no.png"]}, r"images\[0\]': expected an image file; there is no no.png"),
        ({"messages": asked(IMAGE, IMAGE), "images": [b"\x89PNG broken"] * 2}, r"images\[0\].*cannot be read as one"),
        ({"messages": asked(IMAGE), "images": [png(0), png(1)]}, "an image for each of the 1 image parts, got 2"),
        ({"messages": asked({**IMAGE, "url": "https://a.b/c.png"})}, r"from a.b: .*image_hosts: \[a.b\]"),
        ({"messages": asked({**IMAGE, "base64": "?"})}, "base64 of an image"),
        ({"text": "no place", "images": [png(0)]}, "the placeholder <image> in its text"),
        ({"messages": asked(text("<image>"), IMAGE), "images": [png(0)]}, "expected texts without <image>"),
        ({"messages": asked(text("<image>?"))}, "^'messages': expected an image for each <image>, .* got none"),
        ({"text": "<image>?"}, "^'images': expected an image for each <image>, .* got none"),
        ({"input_ids": [1, 259, 3], "labels": [-100, -100, 3]}, "^'images': expected an image for each <image>"),
        ({"messages": asked({"type": "video", "path": "a.mp4"})}, "'video' is not read"),
        ({"messages": asked({**IMAGE, "path": "x-" * 2500})}, r"there is no (x-){100} in "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_images_is_named(row, message, tmp_path):
    with pytest.raises(RowError, match=message):
        encoder(tmp_path)(row)


@pytest.mark.parametrize(
    "row",
    [{"prompt": "<image>", "chosen": "a", "rejected": "b"}, {"prompt": "?", "chosen": "<image>", "rejected": "b"}],
)
def test_pairs_without_images_have_none_of_the_models_tokens_for_them(row, tmp_path):
    with pytest.raises(RowError, match="an image for each <image>"):
        encoder(tmp_path, DPO())(row)


def test_an_error_about_images_of_messages_advises_no_other_names_of_columns(tmp_path):
    row = {"prompt": asked(text("?"))[:1], "chosen": asked(IMAGE)[1:], "rejected": asked(IMAGE)[1:]}
    rows = SimpleNamespace(location=lambda number: f"row {number}", sources=[])
    job: Any = SimpleNamespace(where="datasets[0]", rows=rows, encoder=encoder(tmp_path, DPO()))
    error = bad_row(job, 3, RowError("images", "images in the prompt, before the completion begins"), row)
    assert str(error) == "datasets[0], row 3, 'images': expected images in the prompt, before the completion begins"


def test_base64_alone_is_an_image(tmp_path):
    coded = base64.b64encode(png(0, 90, 60)).decode()
    expected = encoder(tmp_path)({"messages": asked(text("?")), "images": [png(0, 90, 60)]})
    assert encoder(tmp_path)({"messages": asked(text("?")), "images": [coded]}) == expected


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"videos": ["a.mp4"]}, "column 'videos': only images are read"),
        ({"picture": {"bytes": png(0), "path": None}}, "column 'picture' looks like images and is not read"),
    ],
)
def test_what_looks_like_images_and_is_not_read_is_warned_of(columns, message, tmp_path, caplog):
    encoder(tmp_path)({"messages": asked(text("?")), **columns})
    assert message in caplog.text


def test_a_general_placeholder_without_images_is_warned_of(tmp_path, caplog):
    made = encoder(tmp_path)
    made.setup.images.reader.placeholder = "<|image_pad|>"  # as in models whose token is another
    made.setup.images.reader.token_id = 299
    messages = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a cat"}]
    made({"messages": messages})
    assert "texts in 'messages' have <image> in rows without images" in caplog.text


def test_images_of_allowed_hosts_are_downloaded_once(tmp_path, image_server):
    row = {"messages": asked({**IMAGE, "url": f"{image_server.url}/a.png"})}
    (record,) = encoder(tmp_path, hosts=["127.0.0.1"])(row)
    (again,) = encoder(tmp_path, hosts=["127.0.0.1"])(row)
    (local,) = encoder(tmp_path)({"messages": asked(IMAGE), "images": [png(0)]})
    assert image_server.asked == ["/a.png"]
    assert record.columns["input_ids"] == again.columns["input_ids"] == local.columns["input_ids"]
    (kept,) = (tmp_path / "prepared" / "images").glob("url-*")
    assert kept.read_bytes() == png(0)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/missing.png", "answers with status 404"),
        ("/page.html", "cannot be read as one"),
        ("/away.png", "nothing is downloaded from elsewhere.invalid"),
    ],
)
def test_what_is_wrong_with_addresses_of_images_is_named(path, message, tmp_path, image_server):
    row = {"messages": asked({**IMAGE, "url": f"{image_server.url}{path}"})}
    with pytest.raises(RowError, match=message):
        encoder(tmp_path, hosts=["127.0.0.1"])(row)


def test_rows_are_never_cut_through_an_image(tmp_path):
    row = {"messages": [*asked(text("what?")), *asked(IMAGE)], "images": [png(0)]}
    (record,) = encoder(tmp_path)(row)
    size = len(record.columns["input_ids"])
    rules = DataSection(too_long="truncate", sequence_len=size - 3)
    cut, _ = apply_length_rules(record.columns, rules, SFT())
    assert len(cut["input_ids"]) == size - 3
    rules = DataSection(too_long="truncate", sequence_len=size - 10)
    assert apply_length_rules(record.columns, rules, SFT())[0] is None


def test_a_dataset_gives_stored_bytes_and_not_pixels():
    rows = Dataset.from_list([{"images": [drawn_image(0)], "text": "a"}])
    assert undecoded(rows)[0]["images"][0]["bytes"].startswith(b"\x89PNG")
    plain = Dataset.from_list([{"text": "a"}])
    assert undecoded(plain) is plain


def test_a_template_of_texts_gets_placeholders_inside_them(tmp_path):
    (record,) = encoder(tmp_path, type="chat_template", chat_template="chatml")(
        {"messages": asked(IMAGE, text("what?")), "image": png(0)}
    )
    assert "<|im_start|>user\n<image>what?" in record.text["text"]
    assert record.columns["input_ids"].count(259) == 16


def test_a_text_models_rows_are_refused_as_before(tmp_path):
    tokenizer = processor("llava").tokenizer
    plain = build_encoder(DataSection(), SFT(), DatasetSpec(), 0, tokenizer, ConfigView({}), tmp_path)
    with pytest.raises(RowError, match="a part of type text"):
        plain({"messages": asked(IMAGE)})
