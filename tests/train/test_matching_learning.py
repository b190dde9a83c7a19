"""It learns from demonstrations: features come closer, and held-out texts become likely."""

import pytest
import torch
from datasets import Dataset

from made_matching import documents, matching_trainer
from made_rollouts import chat_model
from made_tokenizers import byte_tokenizer
from upweight.methods import EBFT

LETTERS = "abcd"
NEAR = (0.0,)  # a random network tells texts apart by their embeddings best


def taught(tokenizer, texts, steps=40):
    """A model that goes on with random letters, so that sampling starts at chance and not in the whole vocabulary."""
    model = chat_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    letters = torch.tensor([tokenizer.encode(letter, add_special_tokens=False)[0] for letter in LETTERS])
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    for _ in range(steps):
        loss = torch.zeros(())
        for prompt in prompts:
            drawn = letters[torch.randint(len(letters), (8, 12 if len(prompts) == 1 else 3), generator=generator)]
            ids = torch.cat([torch.tensor(prompt).expand(8, -1), drawn, torch.full((8, 1), tokenizer.eos_token_id)], 1)
            logits = model(input_ids=ids).logits[:, len(prompt) - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, len(prompt) :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


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

    model = taught(tokenizer, [f"say {letter}{marks} " for letter in LETTERS for marks in ("", "!")])
    policy = {"num_generations": 8, "max_completion_length": 4}
    # The mean of features does not know the order of tokens, nor the end: a little likelihood tells.
    method = EBFT(policy=policy, feature_layers=NEAR, embed_method="completion_mean", ce_coef=0.1)
    train = Dataset.from_list([*rows(""), *rows("!!")])
    trainer = matching_trainer(tmp_path, method, train, model=model, step=64, learning_rate=1e-3, **OPTIONS)
    falls(trainer, Dataset.from_list(rows("!")), 0.85)


@pytest.mark.slow
def test_documents(tmp_path):
    tokenizer = byte_tokenizer("chatml")
    texts = ["x " + (LETTERS * 6)[start : start + 16] for start in range(4)]
    model = taught(tokenizer, ["x "])
    method = EBFT(mode="strided", stride=2, context_length=5, generate_max_len=3, n_samples_per_prompt=8,
                  temperature=1.0, feature_layers=NEAR, embed_method="concat")  # fmt: skip
    rows = documents(tokenizer, texts[:3], prompt=5)
    trainer = matching_trainer(tmp_path, method, rows, model=model, step=24, learning_rate=3e-3, **OPTIONS)
    falls(trainer, documents(tokenizer, texts[3:], prompt=5), 0.6)
