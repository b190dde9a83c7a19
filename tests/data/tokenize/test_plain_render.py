"""Plain messages are rendered without transformers' call, and always as it renders them."""

import pytest

from made_tokenizers import byte_tokenizer
from upweight.config.peers import TEMPLATE_NAMES
from upweight.data.raw_row import RowError
from upweight.data.tokenize.messages import Conversation
from upweight.data.tokenize.plain_render import MOST_COMPARED
from upweight.data.tokenize.templates import ChatTemplate, template_source

TURNS = [("user", "hi {{ x }}"), ("assistant", " yo\n"), ("user", "<think>a</think> é"), ("assistant", "")]
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


class Counting:
    """A tokenizer that counts how often transformers renders, and may render otherwise."""

    def __init__(self, tokenizer, end=""):
        self.tokenizer, self.end, self.calls = tokenizer, end, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def apply_chat_template(self, *args, **options):
        self.calls += 1
        return self.tokenizer.apply_chat_template(*args, **options) + self.end


def messages(number):
    return [{"role": role, "content": f"{text}{number}"} for role, text in TURNS[: 1 + number % 4]]


@pytest.mark.parametrize("name", [*(name for name in TEMPLATE_NAMES if name != "jinja"), None])
def test_texts_are_those_of_transformers(name):
    own = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}{{ mark }}"
    tokenizer = Counting(byte_tokenizer("chatml", own))
    source = template_source(name, None, tokenizer, None)
    template = ChatTemplate(tokenizer, source, {"mark": "!"})
    options = {"chat_template": source, "tokenize": False, "mark": "!"}
    for number in range(3 * MOST_COMPARED):
        ask = number % 2 == 0
        right = tokenizer.tokenizer.apply_chat_template(messages(number), add_generation_prompt=ask, **options)
        assert template.render(Conversation(messages(number)), ask=ask) == right
    assert tokenizer.calls == MOST_COMPARED


def test_richer_messages_are_rendered_by_transformers():
    tokenizer = Counting(byte_tokenizer("chatml", "{{ messages | tojson }}{{ tools }}{{ x }}"))
    plain, listed = ChatTemplate(tokenizer, None, {}), ChatTemplate(tokenizer, None, {"x": ["a"]})
    for number in range(MOST_COMPARED):
        plain.render(Conversation(messages(number)))
    tokenizer.calls = 0
    user = {"role": "user", "content": "hi"}
    richer = [
        Conversation([user, {"role": "assistant", "content": "yo", "reasoning_content": "hm"}]),
        Conversation([user, {"role": "assistant", "content": "", "tool_calls": [CALL]}]),
        Conversation([user], [{"type": "function", "function": {"name": "look"}}]),
        Conversation([user], variables={"x": 1}),
    ]
    for count, conversation in enumerate(richer, 1):
        plain.render(conversation)
        assert tokenizer.calls == count
    listed.render(Conversation([user]))
    assert tokenizer.calls == len(richer) + 1
    assert "reasoning_content" in plain.render(richer[0])


def test_a_text_that_differs_ends_it():
    tokenizer = Counting(byte_tokenizer("chatml", "{{ messages[0].content }}"), end="?")
    template = ChatTemplate(tokenizer, None, {})
    count = 2 * MOST_COMPARED
    assert {template.render(Conversation(messages(0))) for _ in range(count)} == {"hi {{ x }}0?"}
    assert tokenizer.calls == count


def test_what_a_template_refuses_is_said_in_its_words():
    refuses = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(byte_tokenizer("chatml", refuses), None, {})
    for _ in range(2 * MOST_COMPARED):
        template.render(Conversation(messages(0)))
    with pytest.raises(RowError, match="its error: one turn only"):
        template.render(Conversation(messages(1)))
