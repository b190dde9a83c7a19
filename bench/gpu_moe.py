"""Training steps of a mixture of experts on one GPU against TRL's, one JSON line each: `python -m bench.gpu_moe`.

Random weights of Qwen3-30B-A3B's shape with fewer layers, bfloat16 compute, gradient checkpointing, with the model's
load-balancing loss on both sides; all weights trained, or LoRA of rank 16 on attention and on all experts.
"""

import argparse
import json
from typing import Any

from bench.gpu_step import measure

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
}


def work_of(layers: int) -> dict[str, Any]:
    """What differs from the dense cases, for both sides."""
    return {
        "model_type": "qwen3_moe",
        "shape": SHAPE | {"num_hidden_layers": layers},
        "lora_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "lora_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_moe", description=__doc__)
    parser.add_argument("--only", choices=["grpo_280", "grpo_2048"], default="grpo_280")
    parser.add_argument("--train", choices=["lora", "full"], action="append", help="what is trained (default: both)")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--peer", choices=["float32", "bfloat16"], action="append", help="TRL's weights")
    options = parser.parse_args()
    for what in options.train or ["lora", "full"]:
        given = work_of(options.layers)
        for line in measure(options.only, [what], options.steps, options.peer or ["bfloat16"], **given):
            print(json.dumps(line | {"name": f"gpu_moe_{options.only}", "layers": options.layers}), flush=True)


if __name__ == "__main__":
    main()
