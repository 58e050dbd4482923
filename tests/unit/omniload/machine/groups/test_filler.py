"""The machine that fills batches, by a script of events."""

import numpy as np
import pytest

from omniload.base.errors import StateError
from omniload.machine.groups.filler import (
    BatchBegun,
    DataEnded,
    DrawPrompts,
    Filler,
    Filling,
    GiveUp,
    HandOut,
    NoMore,
    RoundReplayed,
    RoundReported,
)
from omniload.plan.groups.dealing import EVERYBODY

RIGHT, WRONG, MIXED = (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)


def a_filler(**changes):
    return Filler(filling=Filling(**({"groups": 2, "max_rounds": 3, "num_ranks": 2} | changes)))


def a_round(step, *rewards, first=None, owners=None):
    first = step * 10 if first is None else first
    numbers = range(first, first + len(rewards))
    return RoundReported(
        step=step,
        keys_N3=np.array([(0, number, 0) for number in numbers]).reshape(-1, 3),
        owners_N=np.array(owners or [0] * len(rewards), np.int64),
        digests=[f"digest {number}" for number in numbers],
        rewards_NG=np.array(rewards, float).reshape(-1, 2),
    )


def begun(filler, *rounds):
    """Begin a batch, apply rounds, and return the last command."""
    command = filler.handle(BatchBegun())
    for each in rounds:
        assert command == DrawPrompts()
        command = filler.handle(each)
    return command


def test_rounds_are_drawn_until_a_batch_is_full():
    command = begun(a_filler(), a_round(0, MIXED, RIGHT), a_round(1, WRONG), a_round(2, MIXED))

    assert isinstance(command, HandOut)
    assert [group.key for group in command.groups] == [(0, 0, 0), (0, 20, 0)]
    assert command.decision.batch == 0
    assert [each.step for each in command.decision.rounds] == [0, 1, 2]


def test_a_round_without_prompts_is_a_round():
    assert begun(a_filler(), a_round(0)) == DrawPrompts()


def test_the_surplus_is_carried_and_every_rank_is_to_hold_it():
    filler = a_filler()

    first = begun(filler, a_round(0, *[MIXED] * 5, owners=[0, 1, 1, 1, 0]))
    second = filler.handle(BatchBegun())

    assert isinstance(second, HandOut)
    assert [group.key for group in first.carried[:2]] == [group.key for group in second.groups]
    assert {group.owner for group in first.carried} <= {0, 1}
    assert {group.owner for group in second.groups} == {EVERYBODY}
    assert second.decision.rounds == ()
    assert sorted(second.ranks) == [0, 1]
    assert (filler.counts[0].kept, filler.counts[0].waiting) == (4, 1)


def test_the_surplus_is_dropped_where_that_was_asked_for_and_counted():
    filler = a_filler(surplus="drop")

    command = begun(filler, a_round(0, *[MIXED] * 5))

    assert command.carried == ()
    assert (filler.counts[0].kept, filler.counts[0].dropped) == (2, 3)
    assert filler.handle(BatchBegun()) == DrawPrompts()


def test_rounds_have_a_limit_after_which_as_many_more_may_be_tried():
    filler = a_filler(max_rounds=2)

    given_up = begun(filler, a_round(0, MIXED, WRONG), a_round(1, WRONG))

    assert isinstance(given_up, GiveUp)
    assert (given_up.rounds, given_up.drawn, given_up.kept) == (2, 3, 1)
    assert filler.handle(a_round(2, WRONG)) == DrawPrompts()
    command = filler.handle(a_round(3, MIXED))
    assert isinstance(command, HandOut)
    assert len(command.decision.rounds) == 4


def test_the_end_of_the_data_leaves_a_batch_half_full_whatever_becomes_of_a_surplus():
    filler = a_filler(surplus="drop")
    begun(filler, a_round(0, MIXED))

    assert isinstance(filler.handle(DataEnded()), NoMore)
    assert (filler.counts[0].waiting, filler.counts[0].dropped) == (1, 0)


def test_a_prompt_that_two_ranks_report_is_refused_with_both():
    filler = a_filler()
    filler.handle(BatchBegun())
    filler.handle(a_round(0, MIXED, owners=[1]))

    with pytest.raises(
        StateError,
        match="rank 0 reports the prompt at position 0 of source 0, but rank 1 has that prompt",
    ):
        filler.handle(a_round(1, MIXED, first=0))


def test_answers_of_a_batch_are_counted_by_source():
    command = begun(a_filler(groups=1), a_round(0, RIGHT, WRONG), a_round(1, MIXED))

    assert command.decision.answers == {0: (6, 3)}


def replay(judged, of):
    return RoundReplayed(
        step=of.step,
        keys_N3=of.keys_N3[::-1],
        owners_N=of.owners_N,
        digests=of.digests[::-1],
        judged=judged,
    )


def test_a_replay_comes_to_the_same_batch_without_rewards_and_beyond_the_limit():
    rounds = [a_round(0, MIXED, RIGHT), a_round(1, WRONG, MIXED)]
    decision = begun(a_filler(), *rounds).decision

    command = begun(a_filler(max_rounds=1), *map(replay, decision.rounds, rounds))

    assert command.decision.digest == decision.digest


def test_a_replay_of_other_prompts_is_refused():
    decision = begun(a_filler(), a_round(0, MIXED, MIXED)).decision
    filler = a_filler()
    filler.handle(BatchBegun())

    with pytest.raises(
        StateError, match="step 0 has 2 prompts, but other prompts were judged, 2 of step 0"
    ):
        filler.handle(replay(decision.rounds[0], a_round(0, MIXED, MIXED, first=1)))


def test_the_digest_is_of_tokens_too():
    first = begun(a_filler(groups=1), a_round(0, MIXED))
    other = a_round(0, MIXED)
    other.digests[0] = "other tokens"

    assert first.decision.digest != begun(a_filler(groups=1), other).decision.digest
