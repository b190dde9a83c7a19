"""What is measured: tokens, rewards and a random model, written to a folder that both sides read."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

VOCABULARY = 32_000
END = 0  # ends a completion; 1 is padding
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


MIXTURE: dict[str, Any] = SHAPE | {
    "moe_intermediate_size": 192,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "head_dim": 64,
}
TEACHER: dict[str, Any] = SHAPE | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}


@dataclass(frozen=True)
class Case:
    """One comparison: the method, and the rows that TRL's micro-batch and our token budget are cut from."""

    name: str
    rows: Callable[[random.Random], list[dict[str, Any]]]
    micro_batch: int  # TRL: sequences (GRPO, KTO) or pairs in a forward
    budget: int  # ours: distinct tokens in a forward, about what TRL's micro-batch holds with padding
    completions: int = 0  # to sample for each prompt
    new_tokens: int = 0  # of each of them: the end is a token that the model does not have
    mixture: bool = False  # the model is a mixture of experts, with its load-balancing loss
    distils: bool = False  # there is a teacher, about four times as large


def write_case(case: Case, folder: Path, seed: int) -> None:
    """The case's rows, model and tokenizer as files in `folder`."""
    work = asdict(case) | {"rows": case.rows(random.Random(seed))}
    (folder / "work.json").write_text(json.dumps(work))
    end = VOCABULARY if case.new_tokens else END
    _write_model(folder / "model", seed, score_head=case.name == "reward_step", end=end, mixture=case.mixture)
    if case.distils:
        _write_model(folder / "teacher", seed + 1, score_head=False, end=end, shape=TEACHER)


def _groups(rng: random.Random) -> list[dict[str, Any]]:
    """Two prompts of 256 tokens with eight completions of 16 to 128 tokens and their rewards."""
    return [
        {
            "prompt": _words(rng, 256),
            "completions": [[*_words(rng, rng.randint(15, 127)), END] for _ in range(8)],
            "rewards": [rng.random() for _ in range(8)],
        }
        for _ in range(2)
    ]


def _pairs(rng: random.Random, count: int = 8) -> list[dict[str, Any]]:
    """Prompts of 64 to 256 tokens with two completions of 16 to 128 tokens."""
    return [
        {
            "prompt": _words(rng, rng.randint(64, 256)),
            "chosen": [*_words(rng, rng.randint(15, 127)), END],
            "rejected": [*_words(rng, rng.randint(15, 127)), END],
        }
        for _ in range(count)
    ]


def _labelled(rng: random.Random) -> list[dict[str, Any]]:
    """Eight prompts of 64 to 256 tokens with a completion of 16 to 128 tokens, every second one wanted."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 2 == 0}
        for number, row in enumerate(_pairs(rng))
    ]


def _prompts(rng: random.Random) -> list[dict[str, Any]]:
    """Four prompts of 128 to 256 tokens."""
    return [{"prompt": _words(rng, rng.randint(128, 256))} for _ in range(4)]


def _demonstrations(rng: random.Random) -> list[dict[str, Any]]:
    """Eight prompts of 64 to 256 tokens with a completion of 16 to 128 tokens."""
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in _pairs(rng)]


def _many_prompts(rng: random.Random) -> list[dict[str, Any]]:
    """Sixteen prompts of 64 to 256 tokens."""
    return [{"prompt": _words(rng, rng.randint(64, 256))} for _ in range(16)]


CASES = [
    Case("grpo_step", _groups, micro_batch=8, budget=3072),
    Case("grpo_whole_step", _prompts, micro_batch=8, budget=2560, completions=8, new_tokens=64),
    Case("dpo_step", _pairs, micro_batch=4, budget=3072),
    # TRL takes ORPO's likelihood and KTO's KL over a micro-batch, we over the step: the same where there is one.
    Case("kto_step", _labelled, micro_batch=8, budget=3072),
    Case("orpo_step", lambda rng: _pairs(rng, 4), micro_batch=4, budget=3072),
    Case("simpo_step", _pairs, micro_batch=4, budget=3072),
    Case("reward_step", _pairs, micro_batch=4, budget=3072),
    Case("moe_step", _pairs, micro_batch=8, budget=3072, mixture=True),  # DPO; TRL balances routers by micro-batch
    Case("gkd_step", _demonstrations, micro_batch=4, budget=3072, distils=True),
    Case(
        "distillation_whole_step", _many_prompts, micro_batch=8, budget=2560, completions=1, new_tokens=64, distils=True
    ),
]


def _words(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, VOCABULARY) for _ in range(length)]


def _write_model(
    folder: Path,
    seed: int,
    *,
    score_head: bool,
    end: int,
    shape: Mapping[str, Any] = MappingProxyType(SHAPE),
    mixture: bool = False,
) -> None:
    """A random model, and a tokenizer whose word `t7` is token 7, so that TRL's own tokenisation gives our tokens."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(seed)
    own_end = end if end < VOCABULARY else None
    tokens = {"vocab_size": VOCABULARY, "eos_token_id": own_end, "pad_token_id": 1, "bos_token_id": None}
    if mixture:
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**tokens, **MIXTURE)).save_pretrained(folder)
    else:
        config = Qwen2Config(**tokens, **shape)
        config.num_labels = 1
        (Qwen2ForSequenceClassification if score_head else Qwen2ForCausalLM)(config).save_pretrained(folder)
    vocabulary = {f"t{n}": n for n in range(VOCABULARY) if n not in (end, 1)} | {"</s>": end, "<pad>": 1}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
