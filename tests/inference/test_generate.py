"""A model asked outside of training: what it reads, when it ends, and its text piece by piece."""

import dataclasses

import pytest
import torch

from made_runs import write_model
from made_tokenizers import byte_tokenizer
from tiny_models import tiny
from upweight.config.sections.data import DataSection, DatasetSpec, UserFormat
from upweight.config.sections.model import ModelSection
from upweight.data.raw_row import RowError
from upweight.errors import UserError
from upweight.inference.generate import NEW_TOKENS, TextGenerator, load_text_generator
from upweight.methods import DPO, SFT
from upweight.methods.base import Method
from upweight.types import Sampling

CHATML = DataSection(chat_template="chatml")
SAMPLING = Sampling(1, temperature=1.0, seed=3)
GREEDY = Sampling(1, temperature=0.0)


def writer(family: str = "chatml", data: DataSection | None = CHATML, kind: str = "llama", **options) -> TextGenerator:
    tokenizer = byte_tokenizer(family)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return TextGenerator(tiny(kind, vocab_size=len(tokenizer), **ends), tokenizer, data=data, **options)


def read(asked: TextGenerator, prompt, **row) -> str:
    return byte_tokenizer().decode(asked.encode({"prompt": prompt, **row}))


def test_texts_become_user_turns_unless_raw():
    turn = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert read(writer(), "hello") == turn
    assert read(writer(), [{"role": "user", "content": "hello"}]) == turn
    assert read(writer(raw=True), "hello") == "hello"
    assert read(writer(data=None), "hello") == "hello"
    told = writer(system="be brief")
    assert read(told, "hello") == "<|im_start|>system\nbe brief<|im_end|>\n" + turn
    own = [{"role": "system", "content": "be long"}, {"role": "user", "content": "hello"}]
    assert read(told, own) == "<|im_start|>system\nbe long<|im_end|>\n" + turn
    by_dataset = writer(data=None, entry=DatasetSpec(chat_template="chatml"))
    assert read(by_dataset, "hello") == turn


def trained_by(kind, method: Method | None = None, **keys) -> TextGenerator:
    return writer(trained_on=(DatasetSpec(type=kind, **keys), method or SFT()))


def test_texts_are_written_as_training_wrote_them(caplog):
    asked = trained_by("alpaca")
    assert read(asked, "Add 2 and 3").endswith("### Instruction:\nAdd 2 and 3\n\n### Response:\n")
    assert read(asked, "Add", input="2, 3").endswith("### Instruction:\nAdd\n\n### Input:\n2, 3\n\n### Response:\n")
    assert read(trained_by("alpaca_chat.load_qa"), "Why?").endswith("USER: Why?\nASSISTANT:")
    form = UserFormat(field_prompt="question", prompt_format="Q: {prompt}\nA: ")
    assert read(trained_by(form, DPO()), "Why?") == "Q: Why?\nA: "
    assert read(trained_by(form, DPO()), "Why?", question="How?") == "Q: How?\nA: "
    assert read(trained_by(None, as_messages=False), "Why?") == "Why?"
    for templated in (trained_by("chat_template"), trained_by(None), trained_by(form, DPO(), as_messages=True)):
        assert read(templated, "Why?").startswith("<|im_start|>")
    with pytest.raises(RowError, match=r"columns article and question.*--no-style"):
        read(trained_by("context_qa"), "Why?")
    assert "chat template" not in caplog.text


def test_texts_in_the_chat_template_in_place_of_the_style_of_training_are_warned_of(caplog):
    plain = writer(trained_on=(DatasetSpec(type="alpaca"), SFT()), style=False)
    assert "chat template" not in caplog.text
    assert read(plain, "hello").startswith("<|im_start|>")
    assert "training wrote prompts by `type: alpaca`, and here they are put into the chat template" in caplog.text


def test_plain_text_begins_with_bos_where_training_does():
    asked = writer("plain", data=None)
    tokenizer = byte_tokenizer("plain")
    assert asked.encode({"prompt": "hello"}) == tokenizer("hello")["input_ids"]
    assert asked.encode({"prompt": "hello"})[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("prompt", ["", "  \n", None, [], 3])
def test_what_is_no_prompt_is_refused(prompt):
    for raw in (False, True):
        with pytest.raises(RowError, match="prompt"):
            writer(raw=raw).encode({"prompt": prompt})


def test_too_long_prompts_are_refused_with_numbers():
    with pytest.raises(RowError, match=r"at most 255 tokens .*256 positions, and 1 new .*got 300"):
        writer(raw=True).encode({"prompt": "0" * 300})
    short = writer(raw=True, new_tokens=200)
    assert len(short.encode({"prompt": "0" * 56})) == 56
    with pytest.raises(RowError, match=r"at most 56 tokens .*200 new tokens are to follow.*got 57"):
        short.encode({"prompt": "0" * 57})


def test_messages_and_system_texts_need_a_template():
    with pytest.raises(UserError, match="chat_template"):
        writer(data=None).encode({"prompt": [{"role": "user", "content": "hello"}]})
    for options in ({"raw": True}, {"data": None}):
        with pytest.raises(UserError, match="system text needs a chat template"):
            writer(system="be brief", **options)


def test_answers_fill_the_room_there_is():
    asked = writer(raw=True)
    asked._sampler._ends = frozenset()
    prompts = [asked.encode({"prompt": text}) for text in ("0" * 200, "1" * 250, "2" * 200)]
    groups = asked(prompts, SAMPLING, 2)
    assert [[len(one.ids) for one in group] for group in groups] == [[56, 56], [6, 6], [56, 56]]
    assert NEW_TOKENS > 256
    again = asked(prompts, SAMPLING, 2)
    assert [[one.text for one in group] for group in again] == [[one.text for one in group] for group in groups]
    other = asked(prompts, dataclasses.replace(SAMPLING, seed=4), 2)
    assert other[0][0].text != groups[0][0].text


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_pieces_are_the_text_and_end_between_letters(kind: str):
    asked = writer(kind=kind, new_tokens=60)
    prompts = [asked.encode({"prompt": text}) for text in ("hello", "good day")]
    pieces: list[str] = []
    groups = asked(prompts, SAMPLING, 2, on_text=pieces.append)
    assert "".join(pieces) == groups[0][0].text
    assert kind == "mamba" or len(pieces) > 5
    assert all(pieces)


def test_half_a_letter_waits_for_its_rest():
    asked = writer(new_tokens=8)
    tokenizer = byte_tokenizer()
    letter = tokenizer.encode("\u20ac", add_special_tokens=False)
    assert len(letter) == 3
    script = [*tokenizer.encode("a", add_special_tokens=False), *letter, tokenizer.eos_token_id]
    base = asked._sampler._base
    follows = dict(zip([asked.encode({"prompt": "hello"})[-1], *script], script, strict=False))
    with torch.no_grad():  # each token of the script leads to the next one
        embedding = torch.eye(len(tokenizer), 32)
        for number, token in enumerate(follows):
            embedding[token] = 0
            embedding[token, number] = 1
        head = torch.zeros(len(tokenizer), 32)
        for token, following in follows.items():
            head[following] += embedding[token]
        for name, weight in base.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        base.get_input_embeddings().weight.copy_(embedding)
        base.get_output_embeddings().weight.copy_(head)
    pieces: list[str] = []
    ((answer,),) = asked([asked.encode({"prompt": "hello"})], GREEDY, on_text=pieces.append)
    assert (answer.text, answer.finished) == ("a\u20ac", True)
    assert pieces == ["a", "\u20ac"]


def test_the_end_of_a_turn_ends_an_answer_though_it_is_not_the_end_token():
    asked = writer("gemma", DataSection(chat_template="gemma"))
    tokenizer = byte_tokenizer("gemma")
    assert asked._ends == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end_of_turn>")}
    assert writer("gemma", None)._ends == {tokenizer.eos_token_id}


def test_a_folder_is_loaded_and_a_reward_model_refused(tmp_path):
    section = ModelSection(base_model=str(write_model(tmp_path)))
    asked = load_text_generator(section, new_tokens=5)
    ((answer,),) = asked([asked.encode({"prompt": "hello"})], GREEDY)
    assert 1 <= len(answer.ids) <= 5
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", "LlamaForSequenceClassification"))
    with pytest.raises(UserError, match="is a reward model"):
        load_text_generator(section)
