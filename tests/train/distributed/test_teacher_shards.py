import json

import pytest
import torch

from made_runs import on_ranks, trainer_for
from tiny_models import tiny
from upweight.methods import Distill
from upweight.models.reference import SeparateModel
from upweight.train.distill.load import shard_frozen
from upweight.train.distill.teachers import LocalTeacher, Teachers

METHOD = Distill(on_policy=0, divergence="jsd", beta=0.4)


def teachers(sharded):
    def load(policy, engine, attach_engine):
        model = tiny("qwen3", num_hidden_layers=2, hidden_size=16)
        if sharded:
            shard_frozen(model, torch.device("cpu"))
        return Teachers({None: LocalTeacher(METHOD, SeparateModel(policy, model), attach_engine(model), 89)})

    return {"load_teachers": load}


def on_two_ranks(folder):
    options = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    trainer = trainer_for(METHOD, folder, parts=teachers(True), batch=4, max_steps=2, **options)
    trainer.train()
    if trainer.is_world_process_zero():
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history))


@pytest.mark.slow
def test_a_teacher_that_is_sharded_teaches_as_a_whole_one(tmp_path):
    (tmp_path / "two").mkdir()
    on_ranks(on_two_ranks, 2, tmp_path / "two")
    trainer = trainer_for(METHOD, tmp_path / "one", parts=teachers(False), batch=8, max_steps=2)
    trainer.train()
    there = json.loads((tmp_path / "two" / "log.json").read_text())
    for one, other in zip(trainer.state.log_history[:2], there[:2], strict=True):
        for name in ("loss", "distill/forward_kl", "distill/agreement"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
