"""Trains config.yaml with its own loss and with GRPO's, and draws both reward curves as docs/images/own_method.svg."""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from upweight.config import load_config
from upweight.runs.files import metrics_of
from upweight.train.run import train

LETTERS = "abcdefgh"
FOLDER, HERE = Path(".cache/own_method"), Path(__file__).parent
RUNS = {
    "squared loss": ([], "#c2410c"),
    "GRPO": (["trl.loss_type=dapo", "trl.advantage_estimator=group", "method_args=null"], "#1d4ed8"),
}


def write_task() -> None:
    """Write a fresh model that knows letters alone, and prompts that ask for one of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", ":", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=":"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        FOLDER / "model"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(FOLDER / "model")
    rows = [{"prompt": f"{letter}:", "letter": letter} for letter in LETTERS for _ in range(8)]
    (FOLDER / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def curve(name: str, overrides: list[str]) -> list[float]:
    """Train and return the mean reward of every rollout."""
    out = FOLDER / name.replace(" ", "_")
    train(load_config(HERE / "config.yaml", [*overrides, f"output_dir={out}"]))
    return [row["reward"] for row in metrics_of(out) if "reward" in row]


def drawing(curves: dict[str, list[float]]) -> str:
    """Return the curves as an SVG picture, each point the mean of five rollouts."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 300" font-family="sans-serif" font-size="13">']
    parts.append('<rect width="640" height="300" fill="white"/>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = 260 - 230 * share
        parts.append(
            f'<path d="M50 {y}H620" stroke="#ddd"/><text x="42" y="{y + 4}" text-anchor="end">{share:g}</text>'
        )
    for row, (name, values) in enumerate(curves.items()):
        means = [sum(values[max(0, n - 4) : n + 1]) / len(values[max(0, n - 4) : n + 1]) for n in range(len(values))]
        points = " ".join(f"{50 + 570 * n / (len(means) - 1):.1f},{260 - 230 * v:.1f}" for n, v in enumerate(means))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{RUNS[name][1]}" stroke-width="2"/>')
        parts.append(f'<text x="600" y="{205 + 18 * row}" text-anchor="end" fill="{RUNS[name][1]}">{name}</text>')
    parts.append('<text x="335" y="290" text-anchor="middle">rollouts (mean reward, 1 is best)</text></svg>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    write_task()
    measured = {name: curve(name, overrides) for name, (overrides, _) in RUNS.items()}
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/own_method.svg")
    target.write_text(drawing(measured))
    for name, values in measured.items():
        print(f"{name}: reward {sum(values[:5]) / 5:.3f} at first, {sum(values[-5:]) / 5:.3f} at last")
