"""Messages are read back from prompts that a template has written, and from no others."""

import pytest

from made_tokenizers import byte_tokenizer
from upweight.data.tokenize.turns import TurnReader

TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}",
    "letters": "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<|im_end|>' }}{% endfor %}"
               "{{ 'a:' if add_generation_prompt }}",
    "default system": "{% if messages[0].role != 'system' %}<s>Be kind.{% endif %}{% for m in messages %}"
                      "<{{ m.role[0] }}>{{ m.content | trim }}{% endfor %}<a>",
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
                 "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]",
}  # fmt: skip
USER, ANSWER = {"role": "user", "content": "a: or s: which?"}, {"role": "assistant", "content": "Both.\nOr none."}
SYSTEM = {"role": "system", "content": "Answer u: in few words."}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER]])
def test_messages_are_read_back(name, messages):
    tokenizer = byte_tokenizer("chatml", TEMPLATES[name])
    if name == "no system" and SYSTEM in messages:
        return
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = [{"role": "system", "content": "Be kind."}, *messages] if name == "default system" else messages
    assert TurnReader(tokenizer).messages(text) == (messages if SYSTEM in messages else expected)
    assert TurnReader(tokenizer).messages(text[3:]) is None


def test_a_token_at_the_beginning_that_the_template_does_not_write():
    tokenizer = byte_tokenizer("llama3", TEMPLATES["letters"])
    assert TurnReader(tokenizer).messages(f"{tokenizer.bos_token}u:Why?<|im_end|>a:") == [
        {"role": "user", "content": "Why?"}
    ]


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_plain_text_has_no_turns(template):
    tokenizer = byte_tokenizer("chatml", template)
    assert TurnReader(tokenizer).messages("u:Why?") == (
        None if template is None else [{"role": "user", "content": "u:Why?"}]
    )
