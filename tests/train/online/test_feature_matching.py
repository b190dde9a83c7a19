"""EBFT in the loop: features, log-probs, gradients and whole steps against plain torch, one sequence at a time."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize

from made_matching import ANSWERS, BLOCKS, POLICY, answered, documents, matching_trainer
from made_rollouts import chat_model, logged, resumed_as_whole
from made_runs import largest_difference, on_ranks, weights_of
from made_tokenizers import byte_tokenizer
from slow_cases import slow_except
from tiny_models import gradients, relative_difference
from upweight.methods import EBFT
from upweight.rollout.ebft import anchors
from upweight.train.distributed.ranks import join_ranks
from upweight.types import Completion

DEPTHS = (0.25, 0.5, 0.75)


def plain_features(model, pooling, ids, begin, answer):
    """Features of a text from the model's own hidden states."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    layers = [states[int(depth * (len(states) - 1))][0] for depth in DEPTHS]
    text = normalize(torch.cat(layers, -1).float(), dim=-1)
    length = len(ids) - begin
    if pooling == "last_token":
        return normalize(text[-1], dim=0)
    if pooling == "concat":
        return normalize(torch.cat([text[begin + length * n // 4] for n in (1, 2, 3)]), dim=0)
    return normalize(text[answer if pooling == "completion_mean" else begin :].mean(0), dim=0)


def plain_rewards(model, method, group, size):
    """Rewards of a group's completions, two columns."""
    prompt, found = group.prompt_ids, []
    if method.mode == "strided":
        parts = [(at, at, prompt[:at], prompt[at : at + method.generate_max_len]) for at in anchors(group.row, method)]
    else:
        most = method.max_completion_length
        turns = group.row["truth_ids"]
        true = [token for n, turn in enumerate(turns) for token in (turn[:most] if n % 2 == 0 else turn)]
        parts = [(0, len(prompt), prompt, true)]
    for block, (begin, answer, before, true) in enumerate(parts):
        written = group.completions[block * size : (block + 1) * size]
        features = torch.stack(
            [plain_features(model, method.embed_method, [*before, *one.ids], begin, answer) for one in written]
        )
        target = plain_features(model, method.embed_method, [*before, *true], begin, answer)
        found.append(method.feature_rewards(features, target[None], size)[0])
    return torch.cat(found)


def weights_of_model(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def methods(pooling="last_token", **more):
    return [EBFT(**POLICY, embed_method=pooling, **more), EBFT(**BLOCKS, embed_method=pooling, **more)]


@pytest.mark.parametrize("pooling", ["last_token", "mean_pooling", "completion_mean", "concat"])
@pytest.mark.parametrize("mode", [0, 1], ids=["structured", "strided"])
def test_rewards_are_those_of_plain_forwards_of_the_frozen_policy(tmp_path, mode, pooling):
    method = methods(pooling)[mode]
    trainer = matching_trainer(tmp_path, method, max_steps=2, budget=60)
    start = chat_model(trainer.processing_class)
    trainer.train()
    assert largest_difference(weights_of(trainer), weights_of_model(start)) > 1e-3
    for group in trainer.rollouts.current.groups:
        right = plain_rewards(start, method, group, 4)
        torch.testing.assert_close(group.rewards_SR, right, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("fresh", [True, False])
def test_an_adapter_is_off_or_as_it_began_where_features_are_made(tmp_path, fresh):
    from peft import LoraConfig, get_peft_model

    def policy():
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=fresh)
        return get_peft_model(chat_model(byte_tokenizer("chatml")), config)

    method = EBFT(**POLICY, use_whitening=True)
    trainer = matching_trainer(tmp_path, method, model=policy(), max_steps=3, learning_rate=5.0)
    trainer.train()
    assert largest_difference(weights_of(trainer), weights_of_model(policy())) > 0
    for group in trainer.rollouts.current.groups:
        torch.testing.assert_close(group.rewards_SR, plain_rewards(policy(), method, group, 4), atol=1e-3, rtol=1e-3)


def plain_loss(model, method, trainer, temperature):
    """The loss of the rollout under way, one block or completion at a time, from the formulas."""
    rollouts, size = trainer.rollouts, method.group_size
    groups = rollouts.current.groups
    learned, tokens, shown, true = 0.0, 0, 0.0, 0
    for group in groups:
        starts = anchors(group.row, method) if method.mode == "strided" else [len(group.prompt_ids)]
        for place, (one, advantage) in enumerate(zip(group.completions, group.advantage_S, strict=True)):
            ids = torch.tensor([*group.prompt_ids[: starts[place // size]], *one.ids])
            logps = (model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
            logps = logps.gather(1, ids[1:, None])[-len(one.ids) :, 0]
            wrote = torch.tensor(one.sampled or [True] * len(one.ids))
            learned, tokens = learned - advantage * logps[wrote].sum(), tokens + int(wrote.sum())
        if method.ce_coef:
            (sample,) = rollouts.feature_matching.demonstrations([group])[0].samples
            ids, scored = torch.from_numpy(sample.ids), torch.from_numpy(sample.loss_mask)[1:]
            logps = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            shown, true = shown - logps[scored].sum(), true + int(scored.sum())
    loss = method.rl_coef * learned / tokens
    return loss + method.ce_coef * shown / true if method.ce_coef else loss


@pytest.mark.parametrize(("stride", "size", "context"), [(1, 3, 2), (4, 6, 5), (7, 1, 1), (3, 8, 4)])
@pytest.mark.parametrize("budget", [4096, 48])
def test_strided_gradients_are_those_of_each_block_alone(tmp_path, stride, size, context, budget):
    method = EBFT(mode="strided", stride=stride, generate_max_len=size, context_length=context, ce_coef=0.2,
                  n_samples_per_prompt=3, rl_coef=0.7, use_whitening=True)  # fmt: skip
    tokenizer = byte_tokenizer("chatml")
    rows = documents(tokenizer, ["the quick brown fox jumps", "a dog", "over the lazy dog and over again"])
    trainer = matching_trainer(tmp_path, method, rows, step=9, budget=budget, max_steps=1)
    trainer.create_optimizer_and_scheduler(1)
    step = trainer.rollouts.next_step(trainer.runner, trainer.model, trainer.state)
    model = trainer.model
    model.zero_grad()
    loss = trainer.runner.train(model, step["units"], step["counts"])
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    plain = chat_model(tokenizer)
    right = plain_loss(plain, method, trainer, 0.6)
    assert float(loss) == pytest.approx(float(right), abs=1e-5)
    assert relative_difference(found, gradients(plain, right)) < 1e-5
    # What the sampler said of its tokens is what training says of them.
    logps = trainer.runner.logps(model, trainer.rollouts.units)
    said = [one.logps for group in trainer.rollouts.current.groups for one in group.completions]
    assert sum(len(one) for unit in logps for one in unit) == sum(map(len, said))
    assert np.sort(np.concatenate([one for unit in logps for one in unit])) == pytest.approx(
        np.sort(np.concatenate(said)), abs=1e-5
    )


@pytest.mark.parametrize("more", [{}, {"ce_coef": 0.3}, {"ce_coef": 0.3, "rl_coef": 0.0}])
def test_structured_gradients_are_the_policy_gradient_and_the_likelihood_of_the_truth(tmp_path, more):
    method = EBFT(**POLICY, **more)
    trainer = matching_trainer(tmp_path, method, section={"temperature": 0.7})
    trainer.create_optimizer_and_scheduler(1)
    step = trainer.rollouts.next_step(trainer.runner, trainer.model, trainer.state)
    trainer.model.zero_grad()
    trainer.runner.train(trainer.model, step["units"], step["counts"])
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    plain = chat_model(trainer.processing_class)
    right = plain_loss(plain, method, trainer, 0.7)
    assert relative_difference(found, gradients(plain, right)) < 1e-5


def test_advantages_land_on_their_own_tokens(tmp_path):
    """A reward for one token, planted: exactly its blocks get it, and the policy learns to write it."""
    method = EBFT(**BLOCKS)
    trainer = matching_trainer(tmp_path, method, step=4)
    rollouts, wanted = trainer.rollouts, 17
    trainer.create_optimizer_and_scheduler(1)
    rollouts.next_step(trainer.runner, trainer.model, trainer.state)
    rollout = rollouts.current
    for group in rollout.groups:
        for place in range(0, len(group.completions), 3):
            ids = group.completions[place].ids
            group.completions[place] = Completion([wanted, *ids[1:]], [0.0] * len(ids), [0] * len(ids), finished=True)
        has = torch.tensor([float(one.ids[0] == wanted) for one in group.completions])
        group.rewards_SR = torch.stack([has, torch.zeros_like(has)], 1)
    rollouts._start_rollout(rollouts.producer.finish(rollout, 4), 0)
    for unit in rollouts.units:
        starts = anchors(rollout.groups[unit.group].row, method)
        assert len(unit.samples) == len(starts)
        for start, sample in zip(starts, unit.samples, strict=True):
            assert sample.loss_mask.tolist() == [False] * start + [True] * method.generate_max_len
            assert (sample.advantage > 0) == (sample.ids[start] == wanted)

    def likelihood():
        documents = [(group.prompt_ids, anchors(group.row, method)) for group in rollout.groups]
        with torch.no_grad():
            logits = [trainer.model(input_ids=torch.tensor([ids])).logits[0] for ids, _ in documents]
        starts = [[start - 1 for start in own] for _, own in documents]
        return torch.cat([one.log_softmax(-1)[own, wanted] for one, own in zip(logits, starts, strict=True)])

    before = likelihood()
    trainer.model.zero_grad()
    trainer.runner.train(trainer.model, rollouts.units)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.sub_(0.01 * parameter.grad)
    assert bool((likelihood() > before).all())


def test_greedy_blocks_are_trained_on_with_the_log_probs_of_temperature_one(tmp_path):
    trainer = matching_trainer(tmp_path, EBFT(**{**BLOCKS, "n_samples_per_prompt": 1, "temperature": 0.0}))
    assert (trainer.rollouts.producer.sampling.temperature, trainer.runner.temperature) == (0.0, 1.0)
    trainer.train()
    assert all(line["loss"] == line["loss"] for line in trainer.state.log_history if "loss" in line)


@pytest.mark.parametrize("mode", [0, 1], ids=["structured", "strided"])
def test_any_cut_into_forwards_gives_the_same_weights(tmp_path, mode):
    whole, cut = (
        matching_trainer(tmp_path / str(size), methods(ce_coef=0.1)[mode], wanted=16, budget=size)
        for size in (4096, 40)
    )
    whole.train()
    cut.train()
    assert largest_difference(weights_of(whole), weights_of(cut)) < 1e-5


@pytest.mark.parametrize(
    ("mode", "section"),
    slow_except([(1, {})], [(0, {}), (1, {}), (0, {"async_prefetch": True, "prefetch_depth": 2, "replay_size": 4})]),
    ids=["structured", "strided", "ahead and replayed"],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, mode, section):
    make = partial(matching_trainer, method=methods(ce_coef=0.1)[mode])
    resumed_as_whole(make, tmp_path, 4, 3, wanted=16, section=section)


def test_older_samples_are_weighed_by_the_policy_ratio(tmp_path):
    section = {"async_prefetch": True, "prefetch_depth": 1}
    trainer = matching_trainer(tmp_path, EBFT(**POLICY, ce_coef=0.1), section=section, iterations=2, max_steps=4)
    trainer.train()
    rows = logged(trainer)
    assert max(row["rollout/lag"] for row in rows if "rollout/lag" in row) >= 1
    assert max(abs(row["sampling/importance_sampling_ratio/mean"] - 1) for row in rows) > 1e-4
    assert all(unit.samples[0].old_logps is not None for unit in trainer.rollouts.units)


def test_groups_whose_completions_are_alike_are_replaced_by_kept_ones(tmp_path):
    def alike(groups, count, sampling, done):
        for group in groups:
            if len(seen) % 3 == 2:
                group.completions = [Completion([5, 6], [-1.0, -1.0], [0, 0], finished=True)] * count
            else:
                completion_source([group], count, sampling, None)
            seen.append(group.number)

    seen: list[int] = []
    trainer = matching_trainer(tmp_path, EBFT(**POLICY), section={"replay_size": 4}, max_steps=4)
    completion_source, trainer.rollouts.producer.completion_source = trainer.rollouts.producer.completion_source, alike
    trainer.train()
    assert sum(row["replay/replaced"] for row in logged(trainer)) >= 1


def test_every_generated_turn_is_trained_on(tmp_path):
    tokenizer = byte_tokenizer("chatml")
    method = EBFT(**POLICY, ce_coef=0.1)
    trainer = matching_trainer(tmp_path, method, answered(tokenizer, turns=3), section={"temperature": 0.9})
    start = chat_model(tokenizer)
    step = trainer.rollouts.next_step(trainer.runner, trainer.model, trainer.state)
    for group in trainer.rollouts.current.groups:
        replies = group.row["truth_ids"][1::2]
        for one in group.completions:
            given = [token for token, own in zip(one.ids, one.sampled, strict=True) if not own]
            assert [token for token in given if token != tokenizer.eos_token_id] == [*itertools.chain(*replies)]
            turns = np.diff([0, *one.sampled, 0]).tolist().count(1)
            assert turns == 3
        torch.testing.assert_close(group.rewards_SR, plain_rewards(start, method, group, 4), atol=2e-5, rtol=2e-5)
    for unit, one in zip(
        step["units"], (o for g in trainer.rollouts.current.groups for o in g.completions), strict=False
    ):
        assert unit.samples[0].loss_mask[-len(one.ids) :].tolist() == one.sampled
    shown = step["units"][-1].samples[0]
    assert shown.label == 1
    row = trainer.rollouts.current.groups[-1].row
    assert int(shown.loss_mask.sum()) == sum(len(turn[:8]) for turn in row["truth_ids"][::2])
    trainer.model.zero_grad()
    trainer.runner.train(trainer.model, step["units"], step["counts"])
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    assert relative_difference(found, gradients(start, plain_loss(start, method, trainer, 0.9))) < 1e-5


@pytest.mark.parametrize(
    ("keys", "limit"), [({}, 18), ({"gt_length_multiplier": 1.2}, 14), ({"adaptive_max_tokens": False}, 20)]
)
def test_true_answers_bound_the_length_of_completions(tmp_path, monkeypatch, keys, limit):
    monkeypatch.setattr("upweight.train.online.feature_matching.MIN_COMPLETION_LIMIT", 5)
    rows = answered(byte_tokenizer("chatml"), 2, answers=["z" * 11, "zz"])  # 12 tokens with the end, and 3
    method = EBFT(**{"num_generations": 4, "max_completion_length": 20}, **keys)
    trainer = matching_trainer(tmp_path, method, rows)
    trainer.rollouts.next_step(trainer.runner, trainer.model, trainer.state)
    lengths = [len(one.ids) for group in trainer.rollouts.current.groups for one in group.completions]
    assert max(lengths) == limit


@pytest.mark.parametrize("mode", [0, 1], ids=["structured", "strided"])
def test_evaluation_says_what_features_and_true_answers_say_and_leaves_training_alone(tmp_path, mode):
    method, weights = methods()[mode], []
    for often in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        sizes = {"section": {"num_generations_eval": 2}, "max_steps": 2, "evaluation": 2 if often else 0}
        trainer = matching_trainer(tmp_path / str(len(often)), method, **sizes, **often)
        trainer.train()
        weights.append(weights_of(trainer))
    found = trainer.evaluate()
    assert {"eval_reward", "eval_ebft/alignment", "eval_ebft/cfm_loss", "eval_ebft/diversity"} <= set(found)
    units = trainer.rollouts.feature_matching.demonstrations(
        trainer.rollouts.producer.evaluate(trainer.eval_dataset, 1)
    )
    logps = []
    for unit in units:
        ids, scored = torch.from_numpy(unit.samples[0].ids), torch.from_numpy(unit.samples[0].loss_mask)[1:]
        with torch.no_grad():
            log_p = trainer.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        logps.append(log_p.gather(1, ids[1:, None])[:, 0][scored])
    assert found["eval_ebft/ce_loss"] == pytest.approx(-float(torch.cat(logps).mean()), abs=1e-4)
    assert largest_difference(*weights) == 0


def train_on_ranks(folder, world, options):
    """The same global batch whatever the number of ranks; rank 0 keeps the weights."""
    join_ranks(60)
    for name, method in zip(("structured", "strided"), methods(ce_coef=0.1), strict=True):
        sizes = {"step": 8 // world, "wanted": 16 // world, "world": world}
        trainer = matching_trainer(f"{folder}/{name}", method, **sizes, **options)
        trainer.train()
        weights = {
            part: value.full_tensor() if isinstance(value, DTensor) else value
            for part, value in weights_of(trainer).items()
        }
        if trainer.is_world_process_zero():
            torch.save([weights, logged(trainer)], f"{folder}/{name}-{world}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"fsdp": True, "fsdp_config": {"version": 2}}], ids=["whole", "shards"])
def test_two_ranks_sample_and_learn_what_one_does(tmp_path, options):
    for world, own in ((1, {}), (2, options)):
        on_ranks(train_on_ranks, world, str(tmp_path), world, own)
    for name in ("structured", "strided"):
        (one, logs), (two, others) = (torch.load(tmp_path / f"{name}-{world}.pt") for world in (1, 2))
        assert largest_difference(one, two) < 1e-5
        for row, other in zip(logs, others, strict=True):
            assert other == pytest.approx(row, abs=1e-4), row


def test_answers_are_kept_for_people_to_read(tmp_path):
    from upweight.rollout.rollout import readable

    trainer = matching_trainer(tmp_path, EBFT(**BLOCKS), max_steps=1)
    trainer.train()
    producer = trainer.rollouts.producer
    rows = list(readable(trainer.rollouts.current, producer.names, producer.decode))
    assert {"anchor", "prompt", "ground_truth", "completion", "rewards", "advantage"} <= set(rows[0])
    assert not {"input_ids", "loss_mask"} & set(rows[0])
    assert set(rows[0]["rewards"]) == {"alignment", "diversity"}
    assert rows[0]["prompt"] + rows[0]["ground_truth"] in " ".join(text * 3 for text in ANSWERS)
