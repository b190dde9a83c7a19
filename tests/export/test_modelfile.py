"""A chat template in Ollama's language writes the same text, or is refused."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from made_tokenizers import byte_tokenizer
from upweight.errors import UserError
from upweight.export.modelfile import modelfile, turn_template

TEMPLATES = sorted(files("upweight.data").joinpath("chat_templates").iterdir(), key=lambda file: file.name)
TALK = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "I."},
    {"role": "user", "content": "Why?"},
]


def rendered_by_go(template: str, messages: list[dict[str, str]], system: str = "") -> str:
    """The text of a template that only ranges over messages and compares roles, as Go would execute it."""
    start, _, rest = template.partition("{{ range .Messages }}")
    body, _, ask = rest.rpartition("{{ end }}")
    kinds = re.findall(r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}(.*?)(?=\{\{ else|\{\{ end)', body, re.DOTALL)
    turns = [dict(kinds).get(one["role"], "").replace("{{ .Content }}", one["content"]) for one in messages]
    return start.replace("{{ .System }}", system) + "".join(turns) + ask


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.name)
def test_every_template_that_comes_with_us_has_a_modelfile(template):
    tokenizer = byte_tokenizer("chatml", template.read_text())
    tokenizer.bos_token = "<s>"
    read = turn_template(tokenizer)
    messages = [*([{"role": "system", "content": read.default_system}] if read.default_system else []), *TALK]
    right = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert rendered_by_go(read.in_go(), messages) == right


def test_a_system_text_of_the_template_is_the_modelfiles(tmp_path):
    system = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    turns = "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
    ask = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = byte_tokenizer("chatml", system + turns + ask)
    text = modelfile(tmp_path / "model-q4_k_m.gguf", tokenizer, ["<|im_end|>"], 2048)
    assert text.startswith("FROM ./model-q4_k_m.gguf\n")
    assert 'SYSTEM """Be kind."""\n' in text
    assert 'PARAMETER stop "<|im_end|>"\nPARAMETER num_ctx 2048\nPARAMETER temperature 0.7\n' in text
    assert '{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n' in text


def test_a_bos_that_the_tokenizer_adds_is_left_out():
    template = "{{ bos_token }}{% for one in messages %}[{{ one.role }}]{{ one.content }}{% endfor %}"
    adds = byte_tokenizer("plain", template)
    assert adds.bos_token not in turn_template(adds).in_go()
    leaves = byte_tokenizer("chatml", template)
    leaves.bos_token = "<s>"
    assert turn_template(leaves).in_go().startswith("<s>")


def test_a_template_that_does_more_is_refused():
    last_only = "{% for one in messages[-1:] %}[{{ one.role }}]{{ one.content }}{% endfor %}"
    counted = "{% for one in messages %}[{{ loop.index }} {{ one.role }}]{{ one.content }}{% endfor %}"
    for template in (last_only, counted, "{{ raise_exception('never') }}"):
        with pytest.raises(UserError, match=r"more than write turns.*--to gguf"):
            turn_template(byte_tokenizer("chatml", template))
    with pytest.raises(UserError, match="has none"):
        modelfile(Path("a.gguf"), byte_tokenizer("chatml"), [], None)
