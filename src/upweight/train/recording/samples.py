"""The samples that a step trained on, for who looks at a step that went wrong."""

from collections.abc import Iterator
from typing import Any

from upweight.data.units import units_of


def samples_of_step(trainer: Any, step: int) -> Iterator[dict[str, Any]]:
    """Yield the samples of a step, counted from 0, with ids, loss mask, text; none that a feed or rollout has left."""
    if trainer.rollouts is not None:
        units = trainer.rollouts.units_of_step(trainer.state.global_step - step)
        samples = [({"advantage": one.advantage}, one) for unit in units for one in unit.samples]
    elif trainer.feed is not None:
        samples = [({}, one) for unit in trainer.feed_loader.units_of_step(step) for one in unit.samples]
    else:
        rows = {n: units_of([trainer.train_dataset[n]], trainer.method)[0] for n in trainer.sampler.rows_of(step)}
        samples = [({"row": number}, one) for number, unit in rows.items() for one in unit.samples]
    decode = getattr(trainer.processing_class, "decode", None)
    for where, sample in samples:
        ids = sample.ids.tolist()
        yield {**where, "text": decode and decode(ids), "ids": ids, "loss_mask": sample.loss_mask.tolist()}
