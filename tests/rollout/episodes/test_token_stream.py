"""Tokens of a rollout, in segments."""

from dataclasses import replace

import numpy as np

from upweight.rollout.episodes.token_stream import TokenStream, build_completion, shared_prompt
from upweight.types import Completion, Group


def sampled(*ids, version=1):
    return Completion(list(ids), [-float(i) for i in ids], [version] * len(ids), True)


def test_only_what_the_policy_wrote_is_marked_as_its_own():
    stream = TokenStream([1, 2, 3])
    stream.append_sampled(sampled(10, 11, version=4))
    stream.append_observation([20, 21])
    stream.append_sampled(sampled(12, version=5))
    assert stream.length == 5
    found = build_completion(stream, Group(0, {}, [1, 2, 3]), finished=True)
    assert found.ids == [10, 11, 20, 21, 12]
    assert found.sampled == [True, True, False, False, True]
    assert found.logps == [-10.0, -11.0, 0.0, 0.0, -12.0]
    assert found.versions == [4, 4, 4, 4, 5]
    assert found.earlier == []


def test_log_probs_of_a_rollout_are_unknown_where_those_of_a_turn_are():
    stream = TokenStream([1])
    stream.append_sampled(sampled(10))
    stream.append_observation([20])
    stream.append_sampled(Completion([11], [], [1], True))
    completion = build_completion(stream, Group(0, {}, [1]), finished=True)
    assert (completion.ids, completion.logps) == ([10, 20, 11], [])


def test_a_restarted_history_leaves_the_earlier_segment_up_to_its_last_sampled_token():
    stream = TokenStream([1, 2])
    stream.append_sampled(sampled(10, 11))
    stream.append_observation([20])
    stream.append_sampled(sampled(12, version=2))
    stream.restart([1, 2, 30, 31])
    stream.append_sampled(sampled(13, version=3))
    found = build_completion(stream, Group(0, {}, [1, 2]), finished=False)
    assert (found.ids, found.sampled, found.finished) == ([30, 31, 13], [False, False, True], False)
    (earlier,) = found.earlier
    assert (earlier.ids, earlier.sampled, earlier.versions) == (
        [10, 11, 20, 12],
        [True, True, False, True],
        [1, 1, 1, 2],
    )


def test_a_groups_prompt_is_what_all_its_sequences_were_given():
    streams = [TokenStream([1, 2, 3]), TokenStream([1, 2, 4, 5])]
    for stream in streams:
        stream.append_sampled(sampled(3))
    assert shared_prompt(streams) == [1, 2]
    streams[1].restart([1, 9])
    streams[1].append_sampled(sampled(7))
    assert shared_prompt(streams) == [1]
    found = build_completion(streams[0], Group(0, {}, [1]), finished=True)
    assert (found.ids, found.sampled) == ([2, 3, 3], [False, False, True])


def routes(*experts):
    """The experts of some tokens in a model with one router that chooses one."""
    return np.array(experts, np.int16).reshape(-1, 1, 1)


def test_the_experts_of_a_token_are_those_of_its_first_forward():
    stream = TokenStream([1, 2])
    stream.append_sampled(replace(sampled(10, 11), routes=routes(5, 6, 7, -1)))
    stream.append_observation([20])
    # The second turn feeds all tokens again, and may route them otherwise.
    stream.append_sampled(replace(sampled(12), routes=routes(0, 0, 0, 3, 4, -1)))
    stream.append_observation([21])
    completion = build_completion(stream, Group(0, {}, [1, 2]), finished=True)
    assert completion.routes.ravel().tolist() == [5, 6, 7, 3, 4, -1, -1]
    assert len(completion.routes) == 2 + len(completion.ids)


def test_an_earlier_segment_has_its_own_experts():
    stream = TokenStream([1])
    stream.append_sampled(replace(sampled(10, 11), routes=routes(5, 6, -1)))
    stream.append_observation([20])
    stream.restart([1, 30])
    stream.append_sampled(replace(sampled(12), routes=routes(7, 8, -1)))
    completion = build_completion(stream, Group(0, {}, [1]), finished=True)
    assert completion.earlier[0].routes.ravel().tolist() == [5, 6, -1]
    assert completion.routes.ravel().tolist() == [7, 8, -1]
