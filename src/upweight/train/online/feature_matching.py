"""EBFT in the loop: features of completions and ground truth, rewards from both, and demonstrations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate import PartialState
from numpy.typing import NDArray
from torch import Tensor, nn

from upweight.data.images.records import image_refs
from upweight.engine.packing import build_batch, plan_rows, whole_blocks
from upweight.methods import EBFT, feature_matcher
from upweight.methods.formulas.features import pooled, pooled_positions
from upweight.models.reference import Reference, adapter_state, make_reference, reference_kind
from upweight.rollout.completion_source import CompletionSource
from upweight.rollout.ebft import KnownTurns, StridedBlocks, anchors
from upweight.rollout.rollout import images_before
from upweight.rollout.units import demonstration, units_of_documents, units_of_groups
from upweight.sampler.in_process import InProcess
from upweight.train.distributed.ranks import all_gather_objects
from upweight.train.policy import Policy
from upweight.train.step import StepRunner
from upweight.types import Generator, Group, ImageRef, Sample, Sampling, Unit

MIN_COMPLETION_LIMIT = 64  # tokens that a completion may always have, however short the true one is


@dataclass(frozen=True)
class FeatureMatching:
    """Scores groups by features of a frozen copy of the initial policy, and builds their units."""

    method: EBFT
    initial_policy: Reference

    @property
    def adapts(self) -> bool:
        """Whether ground-truth answers bound the length of completions."""
        return self.method.adaptive_max_tokens and not self.method.strided

    def block_sampling(self) -> Sampling:
        """Return the sampling parameters of strided blocks."""
        method = self.method
        return Sampling(method.generate_max_len, temperature=method.temperature, top_p=method.top_p)

    def completion_source(self, policy: Policy, generator: Generator | None) -> CompletionSource:
        """Return the source of completions: turns of known conversations, or strided blocks of documents."""
        if not self.method.strided:
            return KnownTurns(generator, policy.tokenizer.eos_token_id)
        assert isinstance(generator, InProcess), "blocks are sampled in process"
        device = PartialState().device if policy.sharded else None
        return StridedBlocks(policy.model, self.method, generator, policy.tokenizer.decode, device)

    def longest(self, groups: Sequence[Group]) -> int:
        """Return the length limit of a turn, from the longest ground-truth turn of these prompts."""
        most = self.method.max_completion_length
        true = max((len(turn) for group in groups for turn in group.row["truth_ids"][::2]), default=most)
        return min(max(int(self.method.gt_length_multiplier * true), MIN_COMPLETION_LIMIT), most)

    def score(self, groups: Sequence[Group], size: int, runner: StepRunner, model: nn.Module) -> dict[str, float]:
        """Set the rewards of every group, `size` samples per target, and return metrics. Every rank calls it."""
        parts, ranks = runner.packer.data_parallel_size, runner.accelerator.num_processes
        numbers = range(runner.accelerator.process_index * parts // ranks, len(groups), parts)
        mine = {number: groups[number] for number in numbers}
        rewards: dict[int, Tensor] = {}
        logged: dict[str, list[float]] = {}
        with self.initial_policy.use(model) as network:
            for group_index, feature_SF, target_GF in self._features(mine, size, runner, network):
                rewards_SR, metrics = self.method.feature_rewards(feature_SF, target_GF, size)
                rewards[group_index] = rewards_SR.float().cpu()
                for name, values in metrics.items():
                    logged.setdefault(name, []).extend(values.tolist())
        gathered = all_gather_objects((rewards, logged))[:: ranks // parts]
        for group_index, rewards_SR in (item for of_rank, _ in gathered for item in of_rank.items()):
            groups[group_index].rewards_SR = rewards_SR
        names = dict.fromkeys(name for _, of_rank in gathered for name in of_rank)
        logs = {name: [value for _, of_rank in gathered for value in of_rank.get(name, ())] for name in names}
        means = {name: float(np.mean(values)) for name, values in logs.items()}
        rewards_S = torch.cat([reward.sum(1) for of_rank, _ in gathered for reward in of_rank.values()])
        blocks = {"ebft/num_blocks": sum(len(group.completions) for group in groups) / size / len(groups)}
        return {**means, "ebft/reward": float(rewards_S.mean()), **(blocks if self.method.strided else {})}

    def units(self, groups: Sequence[Group], *, mask_truncated: bool, sampler_logps: bool) -> list[Unit]:
        """Return the units of the completions, one per completion or per pass over a document."""
        if self.method.strided:
            return units_of_documents(groups, [anchors(group.row, self.method) for group in groups])
        return units_of_groups(groups, mask_truncated=mask_truncated, sampler_logps=sampler_logps, labelled=True)

    def demonstrations(self, groups: Sequence[Group]) -> list[Unit]:
        """Return the units of the ground truth, one per group."""
        if self.method.strided:
            rows = [group.row for group in groups]
            return [
                demonstration(number, row["input_ids"], row["loss_mask"], image_refs(row))
                for number, row in enumerate(rows)
            ]
        units = []
        for number, group in enumerate(groups):
            turns = self._ground_truth_turns(group)
            wrote = [turn % 2 == 0 for turn, ids in enumerate(turns) for _ in ids]
            ids = [*group.prompt_ids, *(token for turn in turns for token in turn)]
            mask = [*[False] * len(group.prompt_ids), *wrote]
            units.append(demonstration(number, ids, mask, image_refs(group.row)))
        return units

    def cross_entropy(self, groups: Sequence[Group], runner: StepRunner, model: nn.Module) -> float:
        """Return the mean negative log-prob of the ground-truth tokens under the policy."""
        logps = np.concatenate([part for unit in runner.logps(model, self.demonstrations(groups)) for part in unit])
        return -float(logps.mean())

    def _ground_truth_turns(self, group: Group) -> list[list[int]]:
        """Return the ground-truth turns, cut to the completion length, with the other messages between them."""
        most = self.method.max_completion_length
        turns: list[list[int]] = group.row["truth_ids"]
        return [list(ids[:most] if turn % 2 == 0 else ids) for turn, ids in enumerate(turns)]

    def _texts_to_embed(self, group_index: int, group: Group, size: int) -> Iterator["_TextToEmbed"]:
        """Yield the completions of a group, then the ground truth that each `size` of them are compared with."""
        prompt = group.prompt_ids
        if not self.method.strided:
            true = [token for turn in self._ground_truth_turns(group) for token in turn]
            images = image_refs(group.row)
            for side, answers in enumerate(([one.ids for one in group.completions], [true])):
                for answer in answers:
                    one = self._text_to_embed([*prompt, *answer], 0, len(prompt), group_index, side)
                    yield one.with_images(images)
            return
        starts, length = anchors(group.row, self.method), self.method.generate_max_len
        for number, one in enumerate(group.completions):
            at = starts[number // size]
            sampled = self._text_to_embed([*prompt[:at], *one.ids], at, at, group_index, 0)
            yield sampled.with_images(images_before(group, at))
        for at in starts:
            true = self._text_to_embed(prompt[: at + length], at, at, group_index, 1)
            yield true.with_images(images_before(group, at))

    def _features(
        self, groups: dict[int, Group], size: int, runner: StepRunner, network: nn.Module
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each group's number, features and targets; every rank runs the same number of forwards."""
        units = [
            unit for group_index, group in groups.items() for unit in self._texts_to_embed(group_index, group, size)
        ]
        plan = plan_rows([one.unit for one in units], runner.token_budget, 1, runner.engine.layout)[0]
        waiting = {group_index: sum(one.unit.group == group_index for one in units) for group_index in groups}
        kept: dict[int, Tensor] = {}
        for number in range(max(all_gather_objects(len(plan)))):
            row = plan[number] if number < len(plan) else []
            kept |= dict(zip(row, self._forward([units[n] for n in row], runner, network), strict=True))
            for n in row:
                waiting[units[n].unit.group] -= 1
            for group_index in sorted({units[n].unit.group for n in row if waiting[units[n].unit.group] == 0}):
                mine = [n for n, one in enumerate(units) if one.unit.group == group_index]
                sides = [torch.stack([kept.pop(n) for n in mine if units[n].side == side]) for side in (0, 1)]
                yield group_index, sides[0], sides[1]

    def _text_to_embed(self, ids: list[int], begin: int, answer: int, group_index: int, side: int) -> "_TextToEmbed":
        """Return tokens of which the embedded part and the answer begin at these positions."""
        positions = pooled_positions(self.method.embed_method, begin, answer, len(ids))
        distinct, index = np.unique(positions, return_inverse=True)
        mask = np.zeros(len(ids), np.bool_)
        mask[distinct] = True
        return _TextToEmbed(Unit((Sample(np.array(ids, np.int64), mask),), group_index), index, side)

    def _forward(self, units: Sequence["_TextToEmbed"], runner: StepRunner, network: nn.Module) -> Tensor:
        """Return the features of the texts of one row; an empty row only keeps collectives aligned."""
        device = runner.accelerator.device
        pad_to = whole_blocks if device.type == "cuda" else None
        batch = build_batch([one.unit for one in units], runner.engine.layout, predict=False, pad_to=pad_to)
        out = runner.engine(network, batch.to(device), depths=self.method.feature_layers, head=False)
        assert out.features_TF is not None
        if not units:
            return out.features_TF[:0]
        sizes = [int(one.unit.samples[0].loss_mask.sum()) for one in units]
        index = np.concatenate([one.index + start for one, start in zip(units, np.cumsum([0, *sizes]), strict=False)])
        sequence = np.repeat(np.arange(len(units)), [len(one.index) for one in units])
        state_TF = out.features_TF[torch.from_numpy(index).to(device)]
        return pooled(state_TF, torch.from_numpy(sequence).to(device), len(units), self.method.embed_method)


def build_feature_matching(policy: Policy) -> FeatureMatching | None:
    """Return the feature matching of EBFT, else None; the policy's reference is reused if it stays the initial one."""
    ebft, reference = feature_matcher(policy.method), policy.reference
    if ebft is None:
        return None
    if reference is None or ebft.reference_sync is not None:
        kind = reference_kind(needed=True, adapter=adapter_state(policy.model))
        reference = make_reference(kind, policy.model, policy.dtype, offload=policy.offload_reference)
    assert reference is not None
    return FeatureMatching(ebft, reference)


@dataclass(frozen=True, eq=False)
class _TextToEmbed:
    """A text to embed: its pooled positions are scored, and `index` maps each pooled position to a scored one."""

    unit: Unit
    index: NDArray[np.int64]
    side: int  # 0 completion, 1 ground truth

    def with_images(self, images: tuple[ImageRef, ...]) -> "_TextToEmbed":
        """Return the text with the images that its tokens hold."""
        if not images:
            return self
        (sample,) = self.unit.samples
        return replace(self, unit=replace(self.unit, samples=(replace(sample, images=images),)))
