"""What follows a turn, as tokens: against the template's own rendering of the whole conversation."""

import pytest

from made_players import tokenizer_for
from upweight.data.raw_row import RowError
from upweight.data.tokenize.messages import Conversation
from upweight.data.tokenize.templates import ChatTemplate
from upweight.data.tokenize.tokens import TextTokens
from upweight.rollout.episodes.chat_tokens import ChatTokens

ASK = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "what is it?"}]
FAMILIES = {"chatml": "chatml", "llama3": "llama3", "qwen_25": "chatml", "qwen3": "chatml", "gemma": "gemma"}
STRICT = """{%- for m in messages -%}
{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls -%}{{ raise_exception('a result without a call') }}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\n' + m.content -}}
{%- for call in m.tool_calls or [] -%}{{ '[CALL]' + call.function.name }}{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


def chat_for(name, template=None, **variables):
    tokenizer = tokenizer_for(name, FAMILIES.get(name, "chatml"))
    if template is not None:
        tokenizer.chat_template = template
    made = ChatTemplate(tokenizer, None, variables)
    ends = {tokenizer.convert_tokens_to_ids(end) for end in ENDS if end in tokenizer.vocab}
    return tokenizer, made, ChatTokens(made, TextTokens(tokenizer, ()), ends, ASK)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("replies", [["more", "still more"], ["\n two lines \n", "x"]], ids=["plain", "spaces"])
def test_tokens_put_together_are_those_of_the_whole_conversation(name, replies):
    tokenizer, template, chat = chat_for(name)
    said, stream = list(ASK), chat.opening().ids
    for number, reply in enumerate(replies):
        text = f"answer {number}"
        answer = template.render(Conversation([*said, {"role": "assistant", "content": text}]))
        end = next(i for i in tokenizer.encode(answer, add_special_tokens=False)[::-1] if i in chat._ends)
        stream += [*tokenizer.encode(text, add_special_tokens=False), end]
        messages = [{"role": "user", "content": reply}]
        follow_up = chat.follow(text, end, (), messages)
        assert not follow_up.restarts
        stream += follow_up.ids
        said += [{"role": "assistant", "content": text}, *messages]
    assert tokenizer.decode(stream) == template.render(Conversation(said), ask=True)


def test_a_turn_that_was_cut_gets_its_end_as_observed_tokens():
    tokenizer, _, chat = chat_for("chatml")
    cut = tokenizer.encode("answer with no e", add_special_tokens=False)
    follow_up = chat.follow("answer with no e", cut[-1], (), [{"role": "tool", "content": "7"}])
    assert tokenizer.decode(follow_up.ids) == "<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    whole = chat_for("chatml")[2].follow("answer", tokenizer.eos_token_id, (), [{"role": "tool", "content": "7"}])
    assert whole.ids == follow_up.ids[1:]


def test_what_the_policy_wrote_is_not_tokenised_again():
    tokenizer, _, chat = chat_for("chatml")
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "the fox"]
    assert letters != tokenizer.encode("the fox", add_special_tokens=False)
    follow_up = chat.follow(tokenizer.decode(letters), letters[-1], (), [{"role": "user", "content": "so?"}])
    assert not follow_up.restarts
    assert tokenizer.decode(follow_up.ids).startswith("<|im_end|>\n<|im_start|>user\nso?")


def test_reasoning_that_a_template_drops_begins_a_new_sequence():
    tokenizer, _, chat = chat_for("qwen3")
    text = "<think>\nlong thoughts\n</think>\n\nseven"
    kept = chat.follow(text, tokenizer.eos_token_id, (), [{"role": "tool", "content": "ok"}])
    assert not kept.restarts  # reasoning stays while only tools answer
    dropped = chat.follow(text, tokenizer.eos_token_id, (), [{"role": "user", "content": "sure?"}])
    assert dropped.restarts
    prompt = tokenizer.decode(dropped.ids)
    assert "thoughts" not in prompt
    assert prompt.endswith("seven<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")
    again = chat.follow("yes", tokenizer.eos_token_id, (), [{"role": "user", "content": "good"}])
    assert not again.restarts


def test_a_prompt_that_opens_the_reasoning_is_followed_by_the_rest_of_it():
    opens = tokenizer_for("qwen3").chat_template.replace(
        "{{- '<|im_start|>assistant\\n' -}}\n{%- if enable",
        "{{- '<|im_start|>assistant\\n<think>\\n' -}}\n{%- if enable",
    )
    tokenizer, _, chat = chat_for("qwen3", opens)
    assert tokenizer.decode(chat.opening().ids).endswith("assistant\n<think>\n")
    follow_up = chat.follow("hm\n</think>\n\nseven", tokenizer.eos_token_id, (), [{"role": "tool", "content": "ok"}])
    assert not follow_up.restarts
    assert chat.follow("yes", tokenizer.eos_token_id, (), [{"role": "user", "content": "so"}]).restarts


def test_templates_that_want_the_call_before_its_result_get_it():
    tokenizer, _, chat = chat_for("chatml", STRICT)
    follow_up = chat.follow("I look", tokenizer.eos_token_id, [CALL], [{"role": "tool", "content": "7"}])
    assert not follow_up.restarts
    assert tokenizer.decode(follow_up.ids) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(RowError, match="a result without a call"):
        chat.follow("I look", tokenizer.eos_token_id, [], [{"role": "tool", "content": "7"}])
