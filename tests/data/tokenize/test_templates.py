"""Chat templates: by name, by text, the tokenizer's own; and where turns stand in what they render."""

from importlib.resources import files
from pathlib import Path

import pytest

from made_tokenizers import byte_tokenizer, encoder
from upweight.config.peers import TEMPLATE_ALIASES, TEMPLATE_NAMES
from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.data.encode import RowError
from upweight.data.tokenize.messages import Conversation
from upweight.data.tokenize.templates import ChatTemplate, chat_template, template_source
from upweight.errors import UserError
from upweight.log import _warned

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
OWN = TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + OWN
# The turn is opened with more than is kept of it.
OPENED = OWN.replace("[assistant]{% endif %}", "[assistant]<think>{% endif %}")
# Every turn but the last is written in capitals.
REWRITES = OWN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}")

LAYOUTS = {
    "alpaca": "<s>S\n\n### Instruction:\nhi\n\n### Response:\nyo</s>\n\n### Instruction:\nhi\n\n### Response:\n",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "deepseek_v3": "<s>S<|User|>hi<|Assistant|>yo<|end▁of▁sentence|><|User|>hi<|Assistant|>".replace("|", "\uff5c"),
    "gemma": "<s><start_of_turn>user\nS\n\nhi<end_of_turn>\n<start_of_turn>model\nyo<end_of_turn>\n"
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nhi [/INST] yo </s><s>[INST] hi [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nyo<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral_v1": "<s> [INST] S\n\nhi [/INST] yo</s> [INST] hi [/INST]",
    "mistral_v2v3": "<s>[INST] S\n\nhi[/INST] yo</s>[INST] hi[/INST]",
    "mistral_v3_tekken": "<s>[INST]S\n\nhi[/INST]yo</s>[INST]hi[/INST]",
    "mistral_v7_tekken": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]hi[/INST]yo</s>[INST]hi[/INST]",
    "phi_3": "<|system|>\nS<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\nyo<|end|>\n"
    "<|user|>\nhi<|end|>\n<|assistant|>\n",
    "phi_4": "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>hi<|im_end|>"
    "<|im_start|>assistant<|im_sep|>yo<|im_end|><|im_start|>user<|im_sep|>hi<|im_end|><|im_start|>assistant<|im_sep|>",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nhi</s>\n<|assistant|>\nyo</s>\n<|user|>\nhi</s>\n<|assistant|>\n",
}
LAYOUTS["qwen_25"] = LAYOUTS["qwen3"] = LAYOUTS["chatml"]


def template(source, family="plain", own=None):
    return ChatTemplate(byte_tokenizer(family, own), source, {})


def named(name):
    return template(template_source(name, None, byte_tokenizer(), Path()))


def test_a_template_without_end_is_refused():
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    data = DataSection(chat_template_jinja=endless, template_timeout=0.3)
    with pytest.raises(RowError, match=r"it took longer than chat_template_timeout, 0\.3 seconds"):
        chat_template(data, DatasetSpec(), byte_tokenizer(), Path()).render(Conversation([USER]))


def test_a_template_that_ends_for_rows_alone_does_not_hang_where_it_is_probed():
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% if messages[0].content == 'USER-PROBE' %}" + endless + "{% endif %}{{ messages[0].content }}"
    made = ChatTemplate(byte_tokenizer(), source, {}, 0.3)
    assert made.turns(Conversation([USER, ANSWER]), [1])


def test_names_and_files_agree():
    folder = files("upweight.data").joinpath("chat_templates")
    assert {file.name.removesuffix(".jinja") for file in folder.iterdir()} == set(TEMPLATE_NAMES)
    assert set(TEMPLATE_ALIASES.values()) <= set(TEMPLATE_NAMES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    talk = [{"role": "system", "content": "S"}, USER, ANSWER, USER]
    assert named(name).render(Conversation(talk), ask=True) == LAYOUTS[name]


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
@pytest.mark.parametrize("system", [True, False])
def test_every_template_says_all_and_keeps_the_prompt(name, system):
    talk = Conversation([{"role": "system", "content": "SYSTEM"}, USER, ANSWER, USER][0 if system else 1 :])
    prompt, (answer,) = named(name).split(talk, [[{"role": "assistant", "content": "THE ANSWER"}]])
    assert ("SYSTEM" in prompt) == system
    assert prompt.count("hi") == 2
    assert prompt.count("yo") == 1
    assert "THE ANSWER" in answer
    assert named(name).render(talk.then({"role": "assistant", "content": "THE ANSWER"})).startswith(prompt)


@pytest.mark.parametrize("name", ["qwen_25", "qwen3"])
def test_tools_and_their_calls(name):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    tools = [{"type": "function", "function": {"name": "add"}}]
    talk = Conversation([USER, call, {"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}], tools)
    text = named(name).render(talk, ask=True)
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n' in text
    assert (
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>" in text
    )


def test_qwen3_keeps_reasoning_after_the_last_question_only():
    thought = {**ANSWER, "reasoning_content": "hm"}
    text = named("qwen3").render(Conversation([USER, thought, USER, thought]))
    assert text.count("hm") == 1
    assert text.endswith("<think>\nhm\n</think>\n\nyo<|im_end|>\n")


def test_tokenizers_own_template_and_fallback():
    plain, own = byte_tokenizer("plain"), byte_tokenizer("plain", OWN)
    assert template_source(None, None, own, Path()) is None
    assert template_source("tokenizer_default", None, own, Path()) is None
    assert template_source("tokenizer_default_fallback_chatml", None, own, Path()) is None
    assert "<|im_start|>" in (template_source("tokenizer_default_fallback_chatml", None, plain, Path()) or "")
    assert template_source("tokenizer_default_fallback_jinja", "{{ x }}", own, Path()) is None
    assert template_source("tokenizer_default_fallback_jinja", "{{ x }}", plain, Path()) == "{{ x }}"
    assert template_source("tokenizer_default_fallback_tokenizer_default", None, plain, Path()) is None
    assert template(None, own=OWN).render(Conversation([USER]), ask=True) == "[user]hi;[assistant]"
    with pytest.raises(UserError, match="chat_template"):
        template(None).render(Conversation([USER]))


def test_mistrals_turns_are_written_by_the_version_of_its_file():
    tokenizer = byte_tokenizer("plain")
    for version, name in ((3, None), (7, "mistral_v7_tekken"), (13, "mistral_v7_tekken")):
        tokenizer.tekken_version = version
        written = name and template_source(name, None, tokenizer, Path())
        assert template_source(None, None, tokenizer, Path()) == written
    tokenizer.chat_template = OWN
    assert template_source(None, None, tokenizer, Path()) is None


def test_template_text_and_file(tmp_path, monkeypatch):
    (tmp_path / "mine.jinja").write_text(OWN)
    assert template_source("jinja", OWN, None, tmp_path) == OWN
    assert template_source("jinja", "mine.jinja", None, tmp_path) == OWN
    monkeypatch.chdir(tmp_path)
    assert template_source(None, "mine.jinja", None, Path("/")) == OWN
    with pytest.raises(UserError, match="there is no file 'other"):
        template_source("jinja", "other.jinja", None, tmp_path)


def test_a_datasets_template_goes_before_the_configs():
    row = {"messages": [USER], "chosen": "a", "rejected": "b"}
    made = encoder({"type": "chat_template", "chat_template": "zephyr"}, rl="dpo", chat_template="chatml")
    assert made(row)[0].text["prompt"].startswith("<|user|>")
    made = encoder({"type": "chat_template", "chat_template": "jinja", "chat_template_jinja": OWN}, rl="dpo")
    assert made(row)[0].text == {"prompt": "[user]hi;[assistant]", "chosen": "a;", "rejected": "b;"}
    assert OWN in made.source_text


def test_a_template_without_a_system_role_gets_it_in_the_first_user_turn():
    system = {"role": "system", "content": "S"}
    assert template(NO_SYSTEM).render(Conversation([system, USER]), ask=True) == "[user]S\n\nhi;[assistant]"
    assert template(NO_SYSTEM).render(Conversation([system])) == "[user]S;"
    assert template(OWN).render(Conversation([system, USER])) == "[system]S;[user]hi;"


def test_the_prompt_ends_where_the_template_parts_from_its_opening():
    prompt, answers = template(OPENED).split(Conversation([USER]), [[ANSWER], [{**ANSWER, "content": "<thought"}]])
    assert (prompt, answers) == ("[user]hi;[assistant]", ["yo;", "<thought;"])


def test_a_template_that_rewrites_the_prompt_falls_back_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr("upweight.log._warned", set())
    prompt, answers = template(REWRITES).split(Conversation([ANSWER, USER]), [[ANSWER]])
    assert prompt == "[assistant]YO;[user]hi;[assistant]"
    assert answers == ["yo"]
    assert "differently" in caplog.text


def test_a_template_that_rewrites_turns_gives_each_a_text():
    found = template(REWRITES).turns(Conversation([USER, ANSWER, USER, ANSWER]), {1, 3})
    assert [text for text, _ in found] == ["[user]HI;[assistant]yo;", "[user]HI;[assistant]YO;[user]HI;[assistant]yo;"]


@pytest.mark.parametrize("source", [OWN, REWRITES])
def test_headers_and_other_turns_are_outside_a_turn(source):
    question = {"role": "user", "content": "\u2021 why"}
    conversation = Conversation([ANSWER, question, ANSWER, {"role": "user", "content": ""}])
    marked = [
        text[turn.start : turn.end].lower()
        for text, turns in template(source).turns(conversation, range(4))
        for turn in turns
    ]
    assert sorted(marked) == [";", "yo;", "yo;", "\u2021 why;"]


@pytest.mark.parametrize(
    ("header", "trained"), [("<{{ m.role }}>\n", "yo</end>"), (" ", " yo</end>"), ("", "yo</end>")]
)
def test_a_header_is_given_also_where_the_template_does_not_open_turns(header, trained):
    source = "{% for m in messages %}" + header + "{{ m.content }}</end>{% endfor %}"
    ((text, turns),) = template(source).turns(Conversation([USER, ANSWER, USER, ANSWER]), {1, 3})
    assert [text[turn.start : turn.end] for turn in turns] == [trained] * 2


@pytest.mark.parametrize("way", ["turns", "split"])
@pytest.mark.parametrize(
    ("said", "warned"),
    [
        ({"content": "<think>x</think> yo"}, True),
        ({"content": "yo", "reasoning_content": "x"}, True),
        ({"content": " yo\n"}, False),
    ],
)
def test_what_a_template_leaves_out_of_an_answer_is_said(said, warned, way, caplog, monkeypatch):
    monkeypatch.setattr("upweight.log._warned", set())
    made = template(OWN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim }}"))
    asked, answer = Conversation([USER]), {"role": "assistant", **said}
    _ = made.turns(asked.then(answer), {1}) if way == "turns" else made.split(asked, [[answer]])
    assert ("leaves out part" in caplog.text) == warned


def test_what_a_template_refuses_is_a_row_error():
    with pytest.raises(RowError, match="never"):
        template("{{ raise_exception('never') }}").render(Conversation([USER]))
    with pytest.raises(RowError):
        template("{{ messages[5].content + 1 }}").render(Conversation([USER]))


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
WITH_SYSTEM = "<|im_start|>system\nYou help.<|im_end|>\n" + CHATML  # as models that name themselves


@pytest.mark.parametrize(
    ("theirs", "named", "warned"),
    [(CHATML, "chatml", False), (WITH_SYSTEM, "chatml", False), (CHATML, "llama3", True), (None, "llama3", False),
     (CHATML, None, False), (CHATML, "tokenizer_default_fallback_llama3", False)],
)  # fmt: skip
def test_a_template_that_is_not_the_models_is_warned_of(theirs, named, warned, caplog):
    _warned.clear()
    chat_template(DataSection(chat_template=named), DatasetSpec(), byte_tokenizer(template=theirs), Path())
    assert ("writes turns differently from the model's own template" in caplog.text) == warned
