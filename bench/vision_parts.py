"""What both sides of a case with images are made of: a random Qwen2.5-VL, its processor, drawn images and rows.

It imports neither Upweight nor TRL. The word `t7` is token 7, so that both tokenise the same rows to the same ids.
"""

import random
from typing import Any

END, PAD, USER, BOT, IMAGE, VIDEO, START, STOP = range(8)
SPECIAL = ("</s>", "<pad>", "<user>", "<bot>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<bot> ' if m['role'] == 'assistant' else '<user> ' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|> {% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %} {% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)
ADAPTED = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
TINY: dict[str, Any] = {
    "vocabulary": 4096,
    "image": 336,  # pixels a side: 144 tokens
    "text": {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
    },
    "vision": {
        "depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128,
        "window_size": 112, "fullatt_block_indexes": [1, 3],
    },
}  # fmt: skip
LARGE: dict[str, Any] = {  # of Qwen2.5-VL-3B
    "vocabulary": 151_936,
    "image": 896,  # 1,024 tokens
    "text": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
}  # fmt: skip


def work_of(name: str, shape: dict[str, Any], *, prompts: int, completion: int, lora_r: int = 0) -> dict[str, Any]:
    """The rows and settings of a case: GRPO with eight completions of an image and a question, or pairs of answers."""
    rng = random.Random(0)

    def words(length: int) -> list[int]:
        return [rng.randrange(len(SPECIAL), shape["vocabulary"]) for _ in range(length)]

    rows: list[dict[str, Any]] = []
    for number in range(prompts):
        row: dict[str, Any] = {"picture": number, "question": words(16)}
        if name == "vlm_dpo_step":
            row |= {"chosen": words(completion), "rejected": words(completion)}
        else:
            row["completions"] = [[*words(completion - 1), END] for _ in range(8)]
            row["rewards"] = [rng.random() for _ in range(8)]
        rows.append(row)
    return {
        "name": name,
        "rows": rows,
        "shape": shape,
        "lora_r": lora_r,
        "micro_batch": 4 if name == "vlm_dpo_step" else 8,
        "completions": 8,
        "new_tokens": completion,
    }


def text(ids: list[int]) -> str:
    return " ".join(SPECIAL[token] if token < len(SPECIAL) else f"t{token}" for token in ids)


def picture(number: int, side: int) -> Any:
    """An image of coloured squares, no two alike."""
    from PIL import Image, ImageDraw

    rng = random.Random(number)
    made = Image.new("RGB", (side, side), (rng.randrange(256), rng.randrange(256), 90))
    draw = ImageDraw.Draw(made)
    for _ in range(12):
        left, top = (rng.randrange(side) for _ in range(2))
        colour = tuple(rng.randrange(256) for _ in range(3))
        draw.rectangle((left, top, left + side // 5, top + side // 5), fill=colour)
    return made


def prompt_rows(work: dict[str, Any]) -> list[dict[str, Any]]:
    """The case's prompts as rows of a dataset: messages, and a column of images."""
    return [
        {
            "prompt": [{"role": "user", "content": text(row["question"])}],
            "images": [picture(row["picture"], work["shape"]["image"])],
        }
        for row in work["rows"]
    ]


def pair_rows(work: dict[str, Any]) -> list[dict[str, Any]]:
    sides = ("chosen", "rejected")
    answers = [{side: [{"role": "assistant", "content": text(row[side])}] for side in sides} for row in work["rows"]]
    return [prompt | answer for prompt, answer in zip(prompt_rows(work), answers, strict=True)]


def processor(work: dict[str, Any]) -> Any:
    """Qwen2.5-VL's processor without videos, which would need torchvision; whole steps have an end never written."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    size = work["shape"]["vocabulary"]
    named = {SPECIAL[number]: number for number in range(len(SPECIAL))}
    named |= {"</s>": size} if work["name"] == "vlm_grpo_whole" else {}
    words = Tokenizer(WordLevel(named | {f"t{n}": n for n in range(len(SPECIAL), size)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", pad_token="<pad>", extra_special_tokens=list(SPECIAL[2:])
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.image_token, tokenizer.video_token = SPECIAL[IMAGE], SPECIAL[VIDEO]
    tokenizer.image_token_id, tokenizer.video_token_id = IMAGE, VIDEO
    reads = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
    images = reads(size={"shortest_edge": 56 * 56, "longest_edge": 1024 * 1024})
    kind = transformers.Qwen2_5_VLProcessor
    accepts = {"check_argument_for_proper_class": lambda self, name, value: value}
    return type(kind.__name__, (kind,), accepts)(images, tokenizer, video_processor=None, chat_template=TEMPLATE)


def model(work: dict[str, Any], device: str, dtype: Any) -> Any:
    """Random weights, the same on both sides."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    shape = work["shape"]
    end = shape["vocabulary"] if work["name"] == "vlm_grpo_whole" else END
    tokens = {"vocab_size": shape["vocabulary"], "eos_token_id": end, "pad_token_id": PAD, "bos_token_id": None}
    named = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    named |= {"vision_start_token_id": START, "vision_end_token_id": STOP}
    tied = {"tie_word_embeddings": shape["text"]["tie_word_embeddings"]}
    config = Qwen2_5_VLConfig(text_config=shape["text"] | tokens, vision_config=shape["vision"], **named, **tied)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        made = Qwen2_5_VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    return made


def adapter(work: dict[str, Any]) -> Any:
    """A LoRA on the linear layers of the language model; None where all weights are trained."""
    if not work["lora_r"]:
        return None
    from peft import LoraConfig

    return LoraConfig(r=work["lora_r"], lora_alpha=32, target_modules=ADAPTED, task_type="CAUSAL_LM")
