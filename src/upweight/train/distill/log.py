"""Writes a teacher's log-probs of a dataset to a file once, for trainings that then need no teacher."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from upweight.config import Config
from upweight.config.sections.model import LOGGED
from upweight.data.units import units_of
from upweight.errors import UserError
from upweight.files import atomic_path
from upweight.heartbeat import heartbeat, progressed
from upweight.log import logger
from upweight.methods import METHODS
from upweight.train.run import build
from upweight.train.trainer import MethodTrainer
from upweight.types import IGNORED

ROWS_AT_A_TIME = 64
IDS = pa.list_(pa.int32())
SCHEMA = pa.schema({
    "input_ids": IDS, "labels": IDS, "teacher_ids": pa.list_(IDS), "teacher_logps": pa.list_(pa.list_(pa.float16())),
})  # fmt: skip


def write_log(config: Config, output: Path) -> int:
    """Write the rows of a config with its teacher's lists, at temperature 1; return the number of scored tokens."""
    places = config.teacher.places
    if config.method.name != "distill" or not places or LOGGED in places.values():
        raise UserError("distill-log: needs 'rl: distill' with the teacher whose log-probs are written.")
    if config.method.teacher_top_k is None:
        raise UserError("distill.top_k: missing. Set how many tokens of the teacher are written for each token.")
    changed = {"on_policy": 0.0, "seq_kd": False, "temperature": 1.0, "tail": "bucket"}
    values = {**config.method.model_dump(), **changed}
    method = METHODS["distill"](**values)
    trainer = build(dataclasses.replace(config, method=method))
    if trainer.accelerator.num_processes > 1:
        raise UserError("distill-log: is for one process.")
    rows, tokens = trainer.train_dataset, 0
    with heartbeat(), atomic_path(output) as partial, pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            part = [rows[number] for number in range(start, min(start + ROWS_AT_A_TIME, len(rows)))]
            logged = _logged(trainer, part)
            writer.write_table(pa.Table.from_pylist(logged, SCHEMA))
            tokens += sum(sum(label != IGNORED for label in row["labels"]) for row in logged)
            progressed()
            logger.info("distill-log: %d of %d rows", start + len(part), len(rows))
    return tokens


@torch.no_grad()
def _logged(trainer: MethodTrainer, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with their teacher's lists at every scored token, and empty ones at the others."""
    runner, units = trainer.runner, units_of(rows, trainer.method)
    assert runner.teachers is not None
    logged: list[dict[str, Any]] = [{} for _ in rows]
    packed = runner.packer.rows(units, runner.token_budget)
    for row in runner.teachers.taught(trainer.model, packed, units):
        batch = row.batch
        assert batch.teacher_ids_TK is not None
        assert batch.teacher_logps_TK is not None
        sequence = batch.sequence_T.cpu().numpy()
        ids_TK, logps_TK = batch.teacher_ids_TK.cpu().numpy(), batch.teacher_logps_TK.float().cpu().numpy()
        for index, number in enumerate(row.unit_numbers):
            (sample,) = units[number].samples
            at, mine = np.flatnonzero(sample.loss_mask), sequence == index
            lists: list[list[int]] = [[] for _ in sample.ids]
            logps: list[list[np.float16]] = [[] for _ in sample.ids]
            for position, ids_K, logps_K in zip(at[len(at) - mine.sum() :], ids_TK[mine], logps_TK[mine], strict=True):
                lists[position], logps[position] = (
                    ids_K[ids_K >= 0].tolist(),
                    list(logps_K[ids_K >= 0].astype(np.float16)),
                )
            labels = np.where(sample.loss_mask, sample.ids, IGNORED).tolist()
            logged[number] = {
                "input_ids": sample.ids.tolist(), "labels": labels, "teacher_ids": lists, "teacher_logps": logps,
            }  # fmt: skip
    return logged
