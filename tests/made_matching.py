"""EBFT trainers around tiny models, with rows as prepared data has them."""

from datasets import Dataset

from made_rollouts import online_trainer
from made_tokenizers import byte_tokenizer
from upweight.methods import EBFT
from upweight.rollout.ebft import with_blocks

ANSWERS = ("the quick dog", "a fox", "jumps over the lazy answer", "dogs")
POLICY = {"num_generations": 4, "max_completion_length": 8}
BLOCKS = {"mode": "strided", "stride": 5, "context_length": 3, "generate_max_len": 4, "n_samples_per_prompt": 4}


def answered(tokenizer, count: int = 5, answers=ANSWERS, turns: int = 1) -> Dataset:
    """Prompts with their true answers; with `turns` above 1, conversations."""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    rows = []
    for number in range(count):
        prompt, answer = f"say {'!' * number} ", answers[number % len(answers)]
        truth = [[*ids(answer), tokenizer.eos_token_id]]
        for turn in range(1, turns):
            truth += [ids(f" and {turn}? "), [*ids(answer[::-1]), tokenizer.eos_token_id]]
        rows.append({"prompt": prompt, "prompt_ids": ids(prompt), "ground_truth": answer, "truth_ids": truth})
    return Dataset.from_list(rows)


def documents(tokenizer, texts=ANSWERS, prompt: int = 1) -> Dataset:
    """Whole texts, of which everything behind the prompt counts."""
    each = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return Dataset.from_list(
        [
            {"input_ids": ids, "loss_mask": [n >= prompt for n in range(len(ids))], "prompt_length": prompt}
            for ids in each
        ]
    )


def matching_trainer(folder, method: EBFT, rows=None, **options):
    """A trainer of a tiny model with plain SGD; `options` are those of `online_trainer`."""
    tokenizer = byte_tokenizer("chatml")
    strided = method.mode == "strided"
    if rows is None:
        rows = documents(tokenizer, [text * 3 for text in ANSWERS]) if strided else answered(tokenizer)
    rows = with_blocks(rows, method, "training") if strided else rows
    return online_trainer(folder, method=method, rewards=(), data=rows, tokenizer=tokenizer, **options)
