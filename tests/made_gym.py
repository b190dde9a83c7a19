"""Rows of NeMo Gym, and a tiny model that has been taught to call tools."""

import json
from pathlib import Path

import torch

from made_tokenizers import byte_tokenizer
from tiny_models import tiny

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("Warm", "Blazing")


def call_text(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


CALLS = [
    *(call_text("get_synonym_value", synonym=word) for word in WORDS),
    call_text("extract_synonym_values", synonym_values=[sum(map(ord, word)) for word in WORDS]),
]


def tool(name: str, **properties) -> dict:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "name": name, "description": "", "parameters": schema, "strict": True}


def arithmetic_rows(count: int = 4) -> list[dict]:
    """Rows as reasoning_gym makes them of its arithmetic."""
    return [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"{n} + {n} ="}]},
            "question": f"{n} + {n} =",
            "answer": str(2 * n),
            "metadata": {"source_dataset": "basic_arithmetic", "source_index": n},
        }
        for n in range(count)
    ]


def synonym_rows(count: int = 4) -> list[dict]:
    """Rows as example_multi_step has them: values have to be looked up and then handed in."""
    tools = [
        tool("get_synonym_value", synonym={"type": "string"}),
        tool("extract_synonym_values", synonym_values={"type": "array", "items": {"type": "integer"}}),
    ]
    return [
        {
            "id": n,
            "responses_create_params": {
                "input": [{"role": "system", "content": "Hot: Warm, Blazing"}, {"role": "user", "content": f"hot {n}"}],
                "tools": tools,
                "parallel_tool_calls": False,
            },
            "expected_synonyms": list(WORDS),
            "expected_synonym_values": [sum(map(ord, word)) for word in WORDS],
            "minefield_label": "Hot",
            "minefield_label_value": sum(map(ord, "Hot")),
        }
        for n in range(count)
    ]


def write_rows(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_caller(folder: Path, **sizes) -> Path:
    """A tiny model that calls a tool, then hands in or calls again, then stops, each about as likely as not."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer("chatml", TEMPLATE)
    tokenizer.add_tokens(CALLS)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, **sizes}
    marks = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = tiny("llama", **sizes, **marks)
    head = "<|im_start|>user\nhot 1<|im_end|>\n<|im_start|>assistant\n"
    told = '<|im_end|>\n<|im_start|>tool\n{"synonym_value":711}<|im_end|>\n<|im_start|>assistant\n'
    texts = [f"{head}{CALLS[0]}{told}{CALLS[2]}{told}done<|im_end|>", f"{head}{CALLS[1]}{told}{CALLS[2]}<|im_end|>"]
    rows = [torch.tensor([tokenizer.encode(text)]) for text in texts]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(25):
        for row in rows:
            optimizer.zero_grad()
            model(input_ids=row, labels=row).loss.backward()
            optimizer.step()
    model.eval()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
