"""Twenty steps as they were recorded; run this file as a program to record them anew, and say why they changed."""

import json
import tempfile
from pathlib import Path

import pytest

from parity_script import case, run

CURVES = Path(__file__).parent / "curves.json"
ADAM = {"optim": "adamw_torch", "lr_scheduler_type": "cosine", "warmup_steps": 2, "train_sampling_strategy": "random"}
RUNS = {
    "sft": case("SFT", "messages", assistant_only_loss=True, learning_rate=3e-3, **ADAM),
    "dpo": case("DPO", "message pairs", gradient_accumulation_steps=2, per_device_train_batch_size=2, **ADAM)
    | {"lora": True},
}


def curves(name, folder):
    return run("upweight", RUNS[name], folder, epochs=10)


@pytest.mark.parametrize("name", RUNS)
def test_the_curve_is_the_recorded_one(name, tmp_path):
    recorded, found = json.loads(CURVES.read_text())[name], curves(name, tmp_path)
    assert len(found["loss"]) == 20
    assert found["loss"][-1] < found["loss"][0]
    for key, values in found.items():
        assert values == pytest.approx(recorded[key], rel=1e-4, abs=1e-4)


if __name__ == "__main__":
    lines = []
    for name in RUNS:
        with tempfile.TemporaryDirectory() as temporary:
            found = curves(name, Path(temporary))
        lines.append(f"  {json.dumps(name)}: " + json.dumps({k: [round(x, 6) for x in v] for k, v in found.items()}))
    CURVES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
