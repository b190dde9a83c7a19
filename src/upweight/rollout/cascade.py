"""Attention of the newest token of each completion: one softmax over the keys of its prompt and its own."""

import torch
from torch import Tensor

from upweight.engine.attention import Scores


def cascade_attention(
    query: Tensor, prompt: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], bias_GK: Tensor, form: Scores
) -> Tensor:
    """Query [slots, heads, 1, width]; keys and values of prompts [groups, key heads, P, width] and of completions
    [slots, key heads, L, width]; what to add to the scores of a group's P + L columns -> [slots, heads, 1, width].

    The members of a group stand along the query axis of one product with their prompt's keys: nothing is copied.
    """
    slots, heads, _, _ = query.shape
    groups, key_heads, length, _ = prompt[0].shape
    members, repeat = slots // groups, heads // key_heads
    by_member = (groups, members, key_heads, repeat, -1)
    by_head = (groups, key_heads, members, repeat, -1)
    shared = query.view(by_member).transpose(1, 2).reshape(groups, key_heads, members * repeat, -1)
    to_prompt = (shared @ prompt[0].transpose(-1, -2)).view(by_head).transpose(1, 2)
    to_new = (query.view(slots, key_heads, repeat, -1) @ new[0].transpose(-1, -2)).view(by_member)
    scores = torch.cat([to_prompt, to_new], -1).float().mul_(form.scaling)
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    scores += bias_GK[:, None, None, None]
    if form.sinks is not None:
        column = form.sinks.float().view(1, 1, key_heads, repeat, 1).expand(groups, members, -1, -1, -1)
        scores = torch.cat([scores, column], -1)
    share = scores.softmax(-1).to(query.dtype)
    end = length + new[0].shape[2]
    on_prompt = share[..., :length].transpose(1, 2).reshape(groups, key_heads, members * repeat, length) @ prompt[1]
    on_new = share[..., length:end].reshape(slots, key_heads, repeat, -1) @ new[1]
    out = on_prompt.view(by_head).transpose(1, 2) + on_new.view(by_member)
    return out.reshape(slots, heads, 1, -1)
