"""Noise on embeddings: as large as the sequence says, in training only, whatever lies beside it in the row."""

import pytest
import torch

from tiny_models import group, three_levels, tiny
from upweight.engine import Engine
from upweight.engine.noise import add_noise, longest_through
from upweight.engine.packing import build_batch


def test_each_token_knows_the_longest_sequence_it_belongs_to():
    units = group(4, (3, 6, 2)) + three_levels()
    batch = build_batch(units)
    end, position = batch.end_BN[0], batch.position_BN[0]
    right = [max(position[k:e].tolist()) + 1 for k, e in enumerate(end.tolist())]
    assert longest_through(end, position).tolist() == right
    assert len(set(right)) > 2


@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_noise_is_there_in_training_only_and_within_its_bounds(layout):
    model = tiny("llama")
    engine = Engine(model, layout)
    batch = build_batch(three_levels() + group(), layout)
    add_noise(model, 5.0)
    embedding, seen = model.get_input_embeddings(), []
    embedding.register_forward_hook(lambda module, args, out: seen.append(out))
    plain = torch.nn.functional.embedding(batch.ids_BN, embedding.weight)
    engine(model.eval(), batch)
    assert torch.equal(seen.pop(), plain)
    torch.manual_seed(0)
    engine(model.train(), batch).logps_T.sum().backward()
    noise = (seen.pop() - plain).abs().amax(-1)
    if layout == "tree":
        length = longest_through(batch.end_BN[0], batch.position_BN[0])[None]
    else:
        length = batch.length_B[:, None].expand_as(noise)
    bound = 5.0 / (length * plain.shape[-1]).sqrt()
    assert bool((noise <= bound).all())
    assert bool((noise > 0.5 * bound).all())
