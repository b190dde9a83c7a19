"""A model with random weights in a starter: it learns nothing useful, and every command runs without a download."""

import re
from pathlib import Path

from upweight.errors import UserError

STUDENT, TEACHER = "tiny", "tiny-teacher"
APART = 0.005  # added to the teacher's weights: it then agrees with the student on half of the tokens
KEYS = {"base_model": STUDENT, "teacher": TEACHER}  # that name a model in a starter's config


def with_tiny_models(method: str, config: str) -> tuple[str, list[str]]:
    """Return a starter's config with folders of tiny models in place of models of the hub, and those folders."""
    if method.startswith("vlm-"):
        raise UserError(f"--tiny: the tiny model reads no images, which {method} needs. Leave it out.")
    names: list[str] = []
    for key, name in KEYS.items():
        config, count = re.subn(rf"^(\s*{key}:) \S+.*$", rf"\1 ./{name}   # random weights", config, flags=re.M)
        names += [name] * bool(count)
    return config, names


def write_tiny_model(folder: Path, seed: int) -> None:
    """Write a model of two layers and its tokenizer, which has a token for each byte; seeds above 0 change it a bit."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from upweight.log import quiet_transformers

    quiet_transformers()
    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<eos>' }}{% endfor %}"
        "{{ 'a:' if add_generation_prompt }}"
    )
    shape = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(shape)
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters() if seed else ():
                weight.add_(torch.randn_like(weight), alpha=APART)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
