"""Prompt styles of Axolotl: the exact text of each, what is trained on, and texts in pieces."""

import pytest

from made_tokenizers import byte_tokenizer, encoder
from upweight.data.encode import RowError

S1 = "Below is an instruction that describes a task, paired with an input that provides further context. "
S1 += "Write a response that appropriately completes the request."
S0 = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
C0 = "Below is an instruction from a USER that describes a task. The ASSISTANT writes a response that appropriately "
C0 += "and concisely completes the request.\n\n"
ROW = {"instruction": "I", "input": "X", "output": "O", "response": "R", "system": "S", "question": "Q", "answer": "A"}
PLAIN = {**ROW, "input": ""}
CHOICE = {"question": "Q", "choices": ["a", "b"], "explanation": "E"}


def texts(name, row, **keys):
    """What is not trained on, and what is, of the one record of a row."""
    tokenizer = byte_tokenizer("plain")
    (record,) = encoder({"type": name}, tokenizer, **keys)(row)
    ids, mask = record.columns["input_ids"], record.columns["loss_mask"]
    first = mask.index(True)
    assert all(mask[first:])
    return tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])


@pytest.mark.parametrize(
    ("name", "row", "prompt", "answer"),
    [
        ("alpaca:instruct", ROW, f"{S1}\n\n### Instruction:\nI\n\n### Input:\nX\n\n### Response:\n", "O"),
        ("alpaca:chat", ROW, f"SYSTEM: {S1}\nUSER: I\nX\nASSISTANT:", "O"),
        ("alpaca_chat", PLAIN, f"SYSTEM: {S0}\nUSER: I\nASSISTANT:", "O"),
        (
            "alpaca:chatml", ROW,
            f"<|im_start|>system\n{S1}<|im_end|>\n<|im_start|>user\nI\nX<|im_end|>\n<|im_start|>assistant\n", "O",
        ),
        ("alpaca:phi", ROW, f"<|system|>\n{S1}<|end|>\n<|user|>\nI<|end|>X<|assistant|>", "O"),
        ("alpaca:phi", PLAIN, f"<|system|>\n{S0}<|end|>\n<|user|>\nI<|end|>\n<|assistant|>\n", "O"),
        ("alpaca_instruct.load_no_prompt", PLAIN, "### Instruction:\nI\n\n### Response:\n", "O"),
        ("alpaca_chat.load_concise", PLAIN, f"SYSTEM: {C0}\nUSER: I\nASSISTANT:", "O"),
        ("alpaca_chat.load_no_prompt", ROW, "USER: I\nX\nASSISTANT:", "O"),
        ("alpaca_chat.load_qa", ROW, f"SYSTEM: {C0}\nUSER: Q\nASSISTANT:", "A"),
        ("gpteacher:chat", PLAIN, f"SYSTEM: {S0}\nUSER: I\nASSISTANT:", "R"),
        (
            "oasst", {"INSTRUCTION": "I", "RESPONSE": "R", "input": "X"},
            f"{S0}\n\n### Instruction:\nI\n\n### Response:\n", "R",
        ),
        ("alpaca_w_system", ROW, "SYSTEM: S\nUSER: I\nX\nASSISTANT:", "O"),
        ("alpaca_w_system.load_chat", {**ROW, "system": ""}, "USER: I\nX\nASSISTANT:", "O"),
        ("alpaca_w_system.load_instruct", PLAIN, "S\n\n### Instruction:\nI\n\n### Response:\n", "O"),
        (
            "alpaca_w_system.load_open_orca", {**ROW, "system_prompt": "P"},
            "### System:\nP\n### Human:\nQ\n### Assistant:\n", "R",
        ),
        ("alpaca_w_system.load_open_orca_chatml", ROW, "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n", "R"),
        (
            "context_qa", {**ROW, "article": "T"},
            "SYSTEM: Use the following contextual information to concisely answer the question.\n\nUSER: T\n===\nQ\n"
            "ASSISTANT:", "A",
        ),
        ("context_qa.load_v2", {**ROW, "context": "T"}, "Context: T\nQuestion: Q\n", "Answer: A"),
        (
            "explainchoice", CHOICE,
            "Choose the answer that best answers the question. Explain your reasoning.\n\n\n### Instruction:\nQ\n\n"
            '### Input:\n- "a"\n- "b"\n\n### Response:\n', "E",
        ),
        (
            "concisechoice", {**CHOICE, "solution": "Y"},
            "Choose the answer that best answers the question. Be concise in your response.\n\n"
            'USER: Q\n- "a"\n- "b"\nASSISTANT:', "Y",
        ),
        (
            "jeopardy", {**ROW, "category": "K"},
            f"{S1}\n\n### Instruction:\nQ\n\n### Input:\nK\n\n### Response:\n", "what is A",
        ),
        (
            "reflection", {**PLAIN, "reflection": "F", "corrected": "C"}, "### Instruction:\nI\n\n### Response:\n",
            "### Thought:\nO\n\n### Agent Reflection:\nF\n\n### Final Response:\nC",
        ),
        ("metharme", {"prompt": "p", "generation": "g"}, "p", "g</s></s>"),
        (
            "pygmalion", {"conversations": [
                {"role": "system", "value": "P\n<START>"}, {"role": "human", "value": "H"},
                {"role": "bot", "value": "B"},
            ]}, "<|system|>Persona: P<|user|> H<|model|>", " B",
        ),
    ],
)  # fmt: skip
def test_the_text_of_a_style(name, row, prompt, answer):
    assert texts(name, row) == (f"<s>{prompt}", f"{answer}</s>")


def test_prompts_are_trained_on_where_the_config_says_so():
    assert texts("alpaca:chat", PLAIN, train_on_inputs=True) == ("<s>", f"SYSTEM: {S0}\nUSER: I\nASSISTANT:O</s>")


def test_prompt_and_answer_are_tokenized_alone():
    tokenizer = byte_tokenizer("plain")
    row = {"prompt": "The qui", "generation": "ck brown"}
    (record,) = encoder({"type": "metharme"}, tokenizer)(row)
    alone = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in row.values()]
    assert tokenizer("The quick brown", add_special_tokens=False)["input_ids"] != alone[0] + alone[1]
    assert record.columns["input_ids"] == [tokenizer.bos_token_id, *alone[0], *alone[1], *[tokenizer.eos_token_id] * 3]


def test_segments_get_neither_bos_nor_eos():
    row = {"segments": [{"label": False, "text": "a "}, {"label": True, "text": "b"}]}
    assert texts("input_output", row) == ("a ", "b")
    row["segments"].append({"label": "yes", "text": "c"})
    with pytest.raises(RowError, match=r"segments\[2\].label"):
        texts("input_output", row)


def test_llama2_trains_on_answers_with_their_ends():
    tokenizer = byte_tokenizer("plain")
    turns = [("system", "S"), ("human", "H1"), ("gpt", "G1"), ("human", "H2"), ("gpt", "G2")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    (record,) = encoder({"type": "llama2_chat"}, tokenizer)(row)
    ids, mask = record.columns["input_ids"], record.columns["loss_mask"]
    text = "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nH1[/INST] G1 </s><s>[INST] H2 [/INST] G2 </s>"
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([one for one, trained in zip(ids, mask, strict=True) if trained]) == " G1 </s> G2 </s>"
    row["conversations"].pop()
    with pytest.raises(RowError, match="alternation"):
        encoder({"type": "llama2_chat"}, tokenizer)(row)


@pytest.mark.parametrize(("name", "row"), [("alpaca:chat", {"output": "O"}), ("jeopardy", {"question": "Q"})])
def test_a_missing_column_is_named(name, row):
    with pytest.raises(RowError, match=r"'(instruction|category)': expected text, got nothing"):
        texts(name, row)


def pieces(name, text, length, family="plain", **entry):
    tokenizer = byte_tokenizer(family)
    made = encoder({"type": name, **entry}, tokenizer, sequence_len=length)
    records = made({entry.get("text_column", "text"): text})
    assert all(
        record.columns["loss_mask"] == [False] + [True] * (len(record.columns["input_ids"]) - 1) for record in records
    )
    return [tokenizer.decode(record.columns["input_ids"]) for record in records]


def test_long_texts_are_split_without_overlap():
    assert pieces("completion", "ZYXWVUPKLMNB", 5) == ["<s>ZYXW", "VUPKL", "MNB</s>"]
    assert pieces("completion", "ZYXW", 10) == ["<s>ZYXW</s>"]
    assert pieces("completion", "ZYXW", 5) == ["<s>ZYXW"]  # the end token alone has nothing to be predicted from


def test_windows_overlap_and_begin_and_end_each():
    assert pieces("pretrain", "ZYXWVUPK", 6, text_column="body") == ["<s>ZYXW</s>", "<s>XWVU</s>", "<s>VUPK</s>"]
    assert pieces("pretrain", "ZYXWVUP", 6) == ["<s>ZYXW</s>", "<s>XWVU</s>", "<s>VUP</s>"]
    assert pieces("pretrain", "ZYXW", 6) == ["<s>ZYXW</s>"]
    assert pieces("pretrain", "ZYXWV", 5, family="chatml")[0] == "ZYXW<|im_end|>"
