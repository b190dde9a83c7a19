"""It learns from demonstrations: features come closer, and held-out texts become likely."""

import pytest
from datasets import Dataset

from made_matching import documents, matching_trainer
from made_rollouts import taught
from made_tokenizers import byte_tokenizer
from upweight.methods import EBFT

LETTERS = "abcd"
NEAR = (0.0,)  # a random network tells texts apart by their embeddings best


def falls(trainer, evaluation, share):
    """Train; the distance of features and the held-out cross-entropy end below a share of where they began."""
    trainer.eval_dataset = evaluation
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    curve = [row["ebft/cfm_loss"] for row in trainer.state.log_history if "ebft/cfm_loss" in row]
    assert sum(curve[-10:]) < share * sum(curve[:10])
    assert after["eval_ebft/cfm_loss"] < share * before["eval_ebft/cfm_loss"]
    assert after["eval_ebft/ce_loss"] < share * before["eval_ebft/ce_loss"]


OPTIONS = {"optim": "adamw_torch", "max_grad_norm": 1.0, "max_steps": 40}


@pytest.mark.slow
def test_answers(tmp_path):
    tokenizer = byte_tokenizer("chatml")

    def rows(marks):
        found = []
        for letter in LETTERS:
            prompt = tokenizer.encode(f"say {letter}{marks} ", add_special_tokens=False)
            truth = tokenizer.encode(letter * 3, add_special_tokens=False)
            found.append({"prompt": letter, "prompt_ids": prompt, "truth_ids": [[*truth, tokenizer.eos_token_id]]})
        return found

    texts = [f"say {letter}{marks} " for letter in LETTERS for marks in ("", "!")]
    model = taught(tokenizer, tokenizer(texts, add_special_tokens=False)["input_ids"], LETTERS, steps=40)
    policy = {"num_generations": 8, "max_completion_length": 4}
    # The mean of features does not know the order of tokens, nor the end: a little likelihood tells.
    method = EBFT(**policy, feature_layers=NEAR, embed_method="completion_mean", ce_coef=0.1)
    train = Dataset.from_list([*rows(""), *rows("!!")])
    trainer = matching_trainer(tmp_path, method, train, model=model, step=64, learning_rate=1e-3, **OPTIONS)
    falls(trainer, Dataset.from_list(rows("!")), 0.85)


@pytest.mark.slow
def test_documents(tmp_path):
    tokenizer = byte_tokenizer("chatml")
    texts = ["x " + (LETTERS * 6)[start : start + 16] for start in range(4)]
    model = taught(tokenizer, [tokenizer.encode("x ", add_special_tokens=False)], LETTERS, length=12, steps=40)
    method = EBFT(mode="strided", stride=2, context_length=5, generate_max_len=3, n_samples_per_prompt=8,
                  temperature=1.0, feature_layers=NEAR, embed_method="concat")  # fmt: skip
    rows = documents(tokenizer, texts[:3], prompt=5)
    trainer = matching_trainer(tmp_path, method, rows, model=model, step=24, learning_rate=3e-3, **OPTIONS)
    falls(trainer, documents(tokenizer, texts[3:], prompt=5), 0.6)
