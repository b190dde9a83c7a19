"""Cascade attention of the newest token of each completion: one softmax over prompt and completion keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from upweight.engine.attention.rules import AttentionParams, Rule


@dataclass(frozen=True, eq=False)
class Cascade:
    """Keys and values of prompts [groups, key heads, P, width] and of completions [slots, key heads, L, width].

    `bias_GMK` is added to the scores of the P + L columns of a group, or of each member. Slots of a group are adjacent.
    """

    prompt_key: Tensor
    prompt_value: Tensor
    new_key: Tensor
    new_value: Tensor
    bias_GMK: Tensor  # M is 1 where all members see the same columns


def cascade_attention(query: Tensor, kept: Cascade, params: AttentionParams) -> Tensor:
    """Attend with a query [slots, heads, 1, width]; the output has the same axes.

    The members of a group lie along the query axis of one product with their prompt's keys, so no key is copied.
    """
    plain = params.rule == Rule() and params.softcap is None and params.sinks is None
    fused = plain and not query.is_cuda and kept.prompt_key.shape[-1] == kept.prompt_value.shape[-1]
    return _merged(query, kept, params.scaling) if fused else _explicit(query, kept, params)


def _merged(query: Tensor, kept: Cascade, scaling: float) -> Tensor:
    """Combine two calls of the CPU's fused attention by their log-sum-exps."""
    slots, heads, _, _ = query.shape
    groups, key_heads, length, _ = kept.prompt_key.shape
    members, repeat = slots // groups, heads // key_heads
    by_head = (groups, key_heads, members, repeat, -1)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    bias_GMP = kept.bias_GMK[:, :, :length].to(query.dtype)
    if bias_GMP.shape[1] > 1:
        bias_GMP = bias_GMP.repeat_interleave(repeat, 1)
    shared = query.reshape(groups, members, key_heads, repeat, -1).transpose(1, 2)
    on_prompt, log_prompt = attend(
        shared.reshape(groups, key_heads, members * repeat, -1),
        kept.prompt_key,
        kept.prompt_value,
        attn_mask=bias_GMP[:, None],
        scale=scaling,
    )
    by_slot = query.reshape(slots, key_heads, repeat, -1)
    on_new, log_new = attend(by_slot, kept.new_key, kept.new_value, scale=scaling)
    on_prompt, log_prompt = (
        x.reshape(by_head).transpose(1, 2).reshape(slots, key_heads, repeat, -1) for x in (on_prompt, log_prompt)
    )
    share = torch.sigmoid(log_new[..., None] - log_prompt).to(query.dtype)
    return torch.lerp(on_prompt, on_new, share).reshape(slots, heads, 1, -1)


def _explicit(query: Tensor, kept: Cascade, params: AttentionParams) -> Tensor:
    """Compute the softmax step by step, for windows, capped scores and attention sinks."""
    slots, heads, _, _ = query.shape
    groups, key_heads, length, _ = kept.prompt_key.shape
    members, repeat = slots // groups, heads // key_heads
    by_member = (groups, members, key_heads, repeat, -1)
    by_head = (groups, key_heads, members, repeat, -1)
    shared = query.reshape(by_member).transpose(1, 2).reshape(groups, key_heads, members * repeat, -1)
    to_prompt = (shared @ kept.prompt_key.transpose(-1, -2)).view(by_head).transpose(1, 2)
    to_new = (query.reshape(slots, key_heads, repeat, -1) @ kept.new_key.transpose(-1, -2)).view(by_member)
    scores = torch.cat([to_prompt, to_new], -1).float().mul_(params.scaling)
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores += kept.bias_GMK[:, :, None, None]
    if params.sinks is not None:
        column = params.sinks.float().view(1, 1, key_heads, repeat, 1).expand(groups, members, -1, -1, -1)
        scores = torch.cat([scores, column], -1)
    share = scores.softmax(-1).to(query.dtype)
    on_prompt = share[..., :length].transpose(1, 2).reshape(groups, key_heads, -1, length) @ kept.prompt_value
    end = length + kept.new_key.shape[2]
    on_new = share[..., length:end].reshape(slots, key_heads, repeat, -1) @ kept.new_value
    out = on_prompt.view(by_head).transpose(1, 2) + on_new.view(by_member)
    return out.reshape(slots, heads, 1, -1)
