import yaml

from made_runs import write_config
from upweight.config import load_config
from upweight.train.recording.model_card import model_card
from upweight.train.run import train

HISTORY = [
    {"step": 1, "loss": 0.6931, "rewards/margins": 0.0, "learning_rate": 1e-3},
    {"step": 4, "loss": 0.5, "rewards/margins": 0.25, "learning_rate": 0.0},
    {"step": 4, "eval_loss": 0.55},
    {"step": 4, "train_runtime": 3.0, "train_loss": 0.6},
]


def card_of(folder, **keys):
    return model_card(load_config(write_config(folder, folder / "some-model", **keys)), HISTORY, 22)


def front(card):
    return yaml.safe_load(card.split("---")[1])


def test_a_card_records_config_data_and_metrics(tmp_path):
    card = card_of(tmp_path, adapter="lora", lora_r=4, rl_beta=0.3, wandb_project="mine", hub_model_id="me/better")
    assert front(card) == {"base_model": "some-model", "library_name": "peft", "tags": ["upweight", "dpo", "lora"]}
    assert "# better" in card
    assert "by DPO, 4 steps on 22 rows" in card
    assert "| loss | 0.6931 | 0.5 |" in card
    assert "| eval_loss | 0.55 | 0.55 |" in card
    assert "learning_rate | " not in card
    assert "rl_beta: 0.3" in card
    assert "- `pairs.jsonl` (chatml.intel)" in card


def test_a_card_keeps_folders_and_accounts_to_itself(tmp_path):
    card = card_of(tmp_path, wandb_project="mine")
    assert str(tmp_path) not in card
    assert "mine" not in card
    assert "output_dir" not in card


def test_hub_datasets_are_named(tmp_path):
    card = card_of(tmp_path, datasets=[{"path": "org/pairs", "type": "chatml.intel"}])
    assert front(card)["datasets"] == ["org/pairs"]


def test_a_run_leaves_one(model_folder, tmp_path):
    train(load_config(write_config(tmp_path, model_folder, max_steps=2, adapter="lora")))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "by DPO, 2 steps on 22 rows" in card
    assert "| loss | 0.6931 |" in card
