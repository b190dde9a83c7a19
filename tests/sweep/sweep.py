"""Every causal language model and classifier of the installed transformers against plain forwards of single sequences.

`python tests/sweep/sweep.py [docs/models.md]` prints, or writes, the table of what each of them does.
"""

import collections
import contextlib
import logging
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers as hf

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_models import VOCABULARY, drawn, gradients, identical, relative_difference, sample, three_levels, weighted
from upweight.engine import Engine
from upweight.engine.check import check_first_batch
from upweight.engine.packing import build_batch
from upweight.errors import UserError
from upweight.types import Unit

Kind = Literal["language model", "classifier"]
MAPPINGS: dict[Kind, Any] = {
    "language model": hf.MODEL_FOR_CAUSAL_LM_MAPPING,
    "classifier": hf.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}
OUTCOMES = {
    "trees": "right, prefixes shared",
    "padded": "right, rows padded",
    "refused": "refused in words",
    "not built": "no tiny model",
    "wrong": "wrong",
}
LARGEST, LARGEST_GRADIENT = 1e-4, 1e-3
MOST_WEIGHTS = 8_000_000
MOST_SECONDS = 120
# What makes a config tiny, wherever it has a field of this name.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "rnn_hidden_size", "attention_hidden_size", "lru_width", "dim_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "mamba_headdim", "mamba_d_head", "attention_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_inner"), 48),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "d_ff", "dim_ff", "feed_forward_proj_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_token", "top_k_experts"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "rotary_dim", "index_head_dim"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), 5),
    **dict.fromkeys(("index_n_heads",), 32),
    "index_topk": 8,
    "attention_chunk_size": 6,
    "local_attention": 4,
    "floor_scale": 4,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_d_state": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "query_pre_attn_scalar": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "cls_token_id": 1,
    "first_k_dense_replace": 1,
    "num_labels": 1,
}
SET_ALWAYS = {"pad_token_id", "bos_token_id", "eos_token_id", "num_labels"}
# What a config needs besides to be built, or to show what it can do.
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "phimoe": {"original_max_position_embeddings": 16},
}


@dataclass(frozen=True)
class Verdict:
    """What became of a model type: an outcome, and why or by how much."""

    kind: Kind
    model_type: str
    class_name: str
    outcome: str
    remark: str = ""


def units() -> list[Unit]:
    """Nested branches, duplicates, and a sequence longer than the windows and the lengths that scales begin at."""
    return [*three_levels(), *identical(), Unit((sample(drawn(99, 40), prompt=3),))]


def types_of(kind: Kind) -> list[type]:
    """The config classes of a kind, each once."""
    return sorted(set(MAPPINGS[kind].keys()), key=lambda config: config.model_type)


def tiny_config(kind: type) -> Any:
    """A small config of a class: its own defaults, with every size that is known by name made small."""
    default: Any = kind()
    text = default.get_text_config()
    changes = {name: value for name, value in SMALL.items() if name in SET_ALWAYS or _has(text, name)}
    if "kv_lora_rank" in changes:
        changes |= {"num_key_value_heads": changes["num_attention_heads"], "head_dim": SMALL["qk_rope_head_dim"]}
    layers = changes.get("num_hidden_layers", 2)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "no_rope_layers"):
        if isinstance(pattern := getattr(text, name, None), list):
            changes[name] = _both_kinds(pattern, layers)
    named = {name: text.attribute_map.get(name, name) for name in changes}
    fixed = [name for name, field in named.items() if isinstance(getattr(type(text), field, None), property)]
    for name in set(fixed) - SET_ALWAYS:
        del changes[name]
    changes |= SPECIAL.get(text.model_type, {})
    if text is default:
        return kind(**changes)
    for name, value in changes.items():
        if hasattr(text, name):
            setattr(text, name, value)
    return default


def _has(config: Any, name: str) -> bool:
    """Whether a config has a size of this name that is not left to be derived."""
    try:
        return getattr(config, name, None) is not None
    except Exception:  # some fields are read by layer only
        return True


def _both_kinds(pattern: list[Any], count: int) -> list[Any]:
    """A pattern of layers cut to a length, with every kind that still fits."""
    distinct = list(dict.fromkeys(pattern))
    return (distinct * count)[:count]


def tiny_model(kind: Kind, config_class: type) -> Any:
    """A float32 model with weights large enough for attention to matter."""
    config = tiny_config(config_class)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in MAPPINGS[kind][config_class](config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size:,} weights with every size made small that is known by name")
    model = MAPPINGS[kind][config_class](tiny_config(config_class)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "A_log" not in name:
                weight.mul_(6.0)
    return model


def plain(model: Any, scores: bool) -> torch.Tensor:
    """Log-probs of scored tokens, or scores of scored positions, each from a forward of one sequence."""
    found: list[torch.Tensor] = []
    for item in (item for unit in units() for item in unit.samples):
        ids = torch.from_numpy(item.ids)
        at = torch.from_numpy(np.flatnonzero(item.scored))
        if scores:
            texts = [ids[None, : int(one) + 1] for one in at[-2:]]
            found += [model(input_ids=text, use_cache=False).logits.reshape(-1, 1)[-1:] for text in texts]
        else:
            logits_NV = model(input_ids=ids[None], use_cache=False).logits[0, at - 1].float()
            found.append(logits_NV.log_softmax(-1).gather(1, ids[at][:, None])[:, 0])
    return torch.cat(found)


def ours(engine: Engine, model: Any) -> torch.Tensor:
    """The same by the engine, all sequences in one batch."""
    batch = build_batch(units(), engine.layout, predict=not engine.scores)
    out = engine(model, batch)
    if not engine.scores:
        assert out.logps_T is not None
        return out.logps_T
    assert out.scores_TC is not None
    last = torch.cat([(batch.sequence_T == s).nonzero()[-2:, 0] for s in range(batch.num_sequences)])
    return out.scores_TC[last]


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"building it and its plain forwards took more than {MOST_SECONDS} s")


def judge(kind: Kind, config_class: Any) -> Verdict:
    """Build a tiny model of a class, and compare."""
    model_type, name = config_class.model_type, MAPPINGS[kind][config_class].__name__
    verdict = lambda outcome, remark="": Verdict(kind, model_type, name, outcome, remark)  # noqa: E731
    if senses := [name for name in ("vision", "audio") if f"{name}_config" in (config_class.sub_configs or {})]:
        return verdict("refused", f"it reads {' and '.join(senses)} too; only text models are trained")
    signal.signal(signal.SIGALRM, _too_long)
    try:
        signal.alarm(MOST_SECONDS)
        model = tiny_model(kind, config_class)
        right = plain(model, kind == "classifier")
        signal.alarm(0)
    except Exception as error:
        signal.alarm(0)
        return verdict("not built", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120])
    try:
        engine = Engine(model)
        found = ours(engine, model)
    except UserError as error:
        return verdict("refused", str(error).splitlines()[0])
    except Exception as error:
        return verdict("wrong", f"{type(error).__name__}: {error}"[:120])
    right = plain(model, kind == "classifier")
    difference = float((found - right).detach().abs().max())
    turned = relative_difference(*(gradients(model, weighted({"x": x})) for x in (found, right)))
    check = check_first_batch(engine, model, build_batch(units(), engine.layout, not engine.scores))
    if not check.passed:
        return verdict("refused", f"by the proof of the first batch: {check.advice}")
    if not (difference <= LARGEST and turned <= LARGEST_GRADIENT):
        return verdict("wrong", f"{engine.layout}: off by {difference:.2g}, gradients by {turned:.2g}")
    return verdict({"tree": "trees", "padded": "padded"}[engine.layout])


@contextlib.contextmanager
def quiet() -> Any:
    """Without what transformers says about tiny configs."""
    hf.logging.set_verbosity_error()
    logging.getLogger("upweight").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def table(verdicts: list[Verdict]) -> str:
    """The verdicts as a page of the documentation."""
    lines = [
        "# Models",
        "",
        f"What training does with each model type of transformers {hf.__version__}, as `make test-models` measures it:",
        "tiny random models, log-probs (or scores) and all gradients of a batch against plain forwards of single",
        "sequences, with nested branches, duplicates and sequences beyond windows. `make models` writes this page.",
    ]
    for kind in MAPPINGS:
        of_kind = [verdict for verdict in verdicts if verdict.kind == kind]
        counts = collections.Counter(verdict.outcome for verdict in of_kind)
        lines += ["", f"## {kind.capitalize()}s", "", "| | number | model types |", "|---|---|---|"]
        for outcome, words in OUTCOMES.items():
            if counts[outcome]:
                named = [v.model_type for v in of_kind if v.outcome == outcome]
                lines.append(f"| {words} | {counts[outcome]} | {', '.join(named)} |")
        why = [verdict for verdict in of_kind if verdict.remark]
        if why:
            lines += ["", "| model type | | |", "|---|---|---|"]
            lines += [f"| {v.model_type} | {OUTCOMES[v.outcome]} | {v.remark.replace('|', '/')} |" for v in why]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Judge every type, or those named after `--only`, and write the table."""
    only = set(arguments[arguments.index("--only") + 1 :]) if "--only" in arguments else None
    verdicts: list[Verdict] = []
    with quiet():
        for kind in MAPPINGS:
            for config_class in types_of(kind):
                if only is None or config_class.model_type in only:
                    verdicts.append(judge(kind, config_class))
                    print(*(str(x) for x in vars(verdicts[-1]).values()), sep=" | ", file=sys.stderr, flush=True)
    page = table(verdicts)
    if arguments and only is None:
        Path(arguments[0]).write_text(page, encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main(sys.argv[1:])
