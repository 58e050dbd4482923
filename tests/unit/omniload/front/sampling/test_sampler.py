"""Dynamic sampling as a loop uses it: batches, failures raised on all ranks, states, replays and refusals."""

import json

import numpy as np
import pytest

import omniload
from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError
from omniload.base.metrics import REGISTRY
from omniload.base.state import sealed
from omniload.front.sampling.exchange import AloneExchange
from omniload.mix.journal.groups import GROUPS_NAME
from omniload.mix.journal.rewards import rewards_by_source
from tests.support.plane.sampling import LoaderInMemory, Ranks, as_told, some_steps, text_of

STEPS = some_steps([4] * 6)


def rewards_of(prompt):
    """Return two rewards: in every three prompts of a source, one is all right and one is all wrong."""
    return [[1, 1], [0, 0], [1, 0]][prompt.key[1] % 3]


def rollout(prompts):
    return [rewards_of(prompt) for prompt in prompts]


def with_answers(prompts):
    answers = [[[*prompt.tokens, i] for i in range(2)] for prompt in prompts]
    return omniload.Rollouts(rewards=rollout(prompts), answers=answers)


def a_sampler(steps=STEPS, **settings):
    run_dir = settings.pop("run_dir", None)
    return omniload.DynamicSampler(
        LoaderInMemory(steps, run_dir=run_dir), **({"groups": 3} | settings)
    )


def test_a_batch_has_groups_whose_rewards_differ_with_their_prompts_and_answers():
    batch = a_sampler().next_batch(with_answers)

    assert (len(batch), batch.total, batch.number) == (3, 3, 0)
    for group in batch.groups:
        assert group.rewards.tolist() == [1, 0]
        assert group.prompt.key[1] % 3 == 2
        assert group.prompt.source == ("easy", "hard")[group.prompt.key[0]]
        assert [each.tolist() for each in group.answers] == [
            [*group.prompt.tokens, i] for i in range(2)
        ]
    assert repr(batch) == "GroupBatch(number=0, groups=3 of 3, rounds=3)"


def test_answers_go_with_their_group_to_whoever_trains_on_it_and_into_the_state():
    ranks = Ranks(STEPS, 3, groups=4)
    first = ranks.next_batch(with_answers)
    state = json.loads(json.dumps(ranks.state_dict()))
    second = Ranks(STEPS, 2, groups=4, state=state).next_batch(with_answers)

    for part in [*first, *second]:
        for group in part.groups:
            assert group.prompt.text == text_of(group.prompt.key)
            assert group.rewards.tolist() == [1, 0]
            assert [each.tolist() for each in group.answers] == [
                [*group.prompt.tokens, i] for i in range(2)
            ]
    assert [len(part) for part in first] == [2, 1, 1]
    assert state["waiting"] == [] or state["waiting"][0]["answers"]
    assert as_told(second) == as_told(ranks.next_batch(with_answers))


def by_chance(seed):
    """Return a rollout that gives other rewards and answers on each rank, as models and judges that sample do."""
    drawn = np.random.default_rng(seed)

    def rollout(prompts):
        rewards = drawn.integers(0, 2, (len(prompts), 3)).astype(float)
        answers = [[drawn.integers(0, 9, 5).tolist() for _ in range(3)] for _ in prompts]
        return omniload.Rollouts(rewards=rewards, answers=answers)

    return rollout


def content_of(batch):
    return [
        (group.prompt.key, group.rewards.tolist(), [each.tolist() for each in group.answers])
        for group in batch.groups
    ]


def test_ranks_that_share_prompts_train_on_what_the_first_of_them_answered(tmp_path):
    """Each came to groups of its own, in other rounds, and nobody was told."""
    ranks = Ranks(STEPS, 2, peers=2, groups=4, run_dir=tmp_path)
    firsts = Ranks(STEPS, 2, groups=4)

    for _ in range(3):
        found = ranks.next_batch([by_chance(seed) for seed in (1, 5, 2, 6)])
        wanted = firsts.next_batch([by_chance(seed) for seed in (1, 2)])
        told = [content_of(each) for each in found]
        assert told == [content_of(each) for each in (wanted[0], wanted[0], *[wanted[1]] * 2)]
    assert ranks.state_dict() == firsts.state_dict()
    assert len((tmp_path / GROUPS_NAME).read_text().splitlines()) == 3


def test_of_ranks_that_share_prompts_all_but_the_first_may_give_nothing():
    ranks = Ranks(STEPS, 1, peers=3, groups=3)

    found = ranks.next_batch([with_answers, lambda _: None, lambda _: None])

    assert len({json.dumps(content_of(each), default=int) for each in found}) == 1


def test_what_fails_on_a_rank_that_shares_prompts_is_told_on_all_with_its_number():
    ranks = Ranks(STEPS, 2, peers=2, groups=3)

    def failing(_):
        raise ValueError("no memory for answers")

    first, *others = ranks.next_batch([with_answers, failing, with_answers, with_answers])

    assert str(first) == "rank 1: no memory for answers"
    assert isinstance(others[0], ValueError)
    assert all("no memory for answers" in str(each) for each in others)
    assert [len(each) for each in ranks.next_batch(with_answers)] == [2, 2, 1, 1]


def test_ranks_that_share_prompts_are_refused_where_they_sample_otherwise():
    ranks = Ranks(STEPS, 1, peers=2, groups=3, settings_of_last={"groups": 4})

    found = ranks.next_batch(with_answers)

    assert [type(each) for each in found] == [ConfigError] * 2
    assert "the sampler of rank 1 has {'groups': 4}, and that of rank 0 {'groups': 3}" in str(
        found[0]
    )


def test_an_exchange_of_other_peers_than_the_loader_has_is_refused():
    loader = LoaderInMemory(STEPS)
    loader.peers = (4, 5, 6)

    with pytest.raises(ConfigError, match=r"3 ranks .* and peers= is among 1; .*\[4, 5, 6\]"):
        omniload.DynamicSampler(loader, groups=3, peers=AloneExchange())


def test_groups_are_a_figure_by_source_and_verdict():
    def figure(verdict):
        labels = {"source": "hard", "verdict": verdict}
        return REGISTRY.get_sample_value("omniload_groups_total", labels) or 0

    before = [figure(verdict) for verdict in ("kept", "all_right", "all_wrong")]
    sampler = a_sampler(STEPS[:3])
    sampler.next_batch(rollout)

    found = sampler.counts["hard"]
    after = [figure(verdict) for verdict in ("kept", "all_right", "all_wrong")]
    assert found.drawn == 6
    assert [new - old for new, old in zip(after, before, strict=True)] == [
        found.kept + found.waiting,
        found.all_right,
        found.all_wrong,
    ]


def test_what_rounds_showed_of_sources_is_noted_for_policies_and_not_by_a_replay(tmp_path):
    sampler = a_sampler(groups=2, run_dir=tmp_path)
    list(sampler.batches(rollout))
    found, stop = rewards_by_source(tmp_path, 0)
    list(a_sampler(groups=2, run_dir=tmp_path).batches())

    assert stop == 6
    for name, counts in sampler.counts.items():
        assert found[name].groups == counts.drawn
        assert found[name].kept == counts.kept + counts.waiting
        assert (found[name].answers, found[name].right) == (counts.answers, counts.right_answers)
    assert rewards_by_source(tmp_path, 0)[0] == found


def test_too_many_rounds_are_told_with_what_was_found_and_may_go_on():
    sampler = a_sampler(groups=4, max_rounds=2)

    with pytest.raises(omniload.RoundLimitError) as caught:
        sampler.next_batch(rollout)

    assert (
        "2 steps of prompts, which is max_rounds, gave 8 groups, and of the 4 of batch 0 there are 2"
        in str(caught.value)
    )
    assert "easy: of 4 all right 2, all wrong 1" in str(caught.value)
    assert "raise max_rounds" in str(caught.value)
    assert isinstance(caught.value, ConfigError)
    assert len(sampler.next_batch(rollout)) == 4


def test_a_loop_that_asks_on_behind_too_many_rounds_goes_on_and_is_not_told_the_end():
    batches = a_sampler(groups=4, max_rounds=1).batches(rollout)
    found = []
    for _ in range(9):
        try:
            found.append(next(batches).number)
        except (omniload.RoundLimitError, StopIteration) as error:
            found.append(type(error).__name__)

    limited = ["RoundLimitError"] * 2
    assert found == [*limited, 0, *limited, 1, "StopIteration", "StopIteration", "StopIteration"]


def test_what_fails_on_one_rank_is_told_on_all_and_the_call_goes_on_with_the_same_prompts():
    ranks, asked = Ranks(STEPS, 2, groups=3), []

    def failing(prompts):
        asked.append([prompt.key for prompt in prompts])
        raise ValueError("no memory for answers")

    def noting(prompts):
        asked.append([prompt.key for prompt in prompts])
        return rollout(prompts)

    first, second = ranks.next_batch([rollout, failing])
    again = ranks.next_batch([rollout, noting])

    assert isinstance(second, ValueError)
    assert isinstance(first, UnavailableError)
    assert str(first) == "rank 1: no memory for answers"
    assert asked[0] == asked[1]
    assert as_told(again) == as_told(Ranks(STEPS, 1, groups=3).next_batch(rollout))


def test_a_reward_that_is_no_number_is_told_on_all_ranks():
    ranks = Ranks(STEPS, 2, groups=3)

    first, second = ranks.next_batch([lambda prompts: np.full((len(prompts), 2), np.nan), rollout])

    assert isinstance(first, ConfigError)
    assert isinstance(second, ConfigError)
    assert str(second) == f"rank 0: {first}"


def test_ranks_roll_out_as_many_answers():
    ranks = Ranks(some_steps([9]), 2, groups=1)

    found = ranks.next_batch([rollout, lambda prompts: np.ones((len(prompts), 3))])

    assert all(isinstance(each, ConfigError) for each in found)
    assert "by rank {0: 2, 1: 3}" in str(found[0])


def test_ranks_that_are_at_other_batches_or_steps_are_told():
    ranks = Ranks(STEPS, 2, groups=2, surplus="drop")
    state = ranks.state_dict()
    ranks.next_batch(rollout)
    ranks.samplers[1].load_state_dict(state)
    batches = ranks.next_batch(rollout)

    ranks = Ranks(STEPS, 2, groups=1)
    ranks.samplers[1].load_state_dict(sealed({**unsealed(state), "loader": {"step": 2}}))
    steps = ranks.next_batch(rollout)

    assert all(isinstance(each, StateError) for each in [*batches, *steps])
    assert "rank 1 gives the round of batch 0, and rank 0 the round of batch 1" in str(batches[0])
    assert "ranks drew the steps [0, 2] for one round" in str(steps[0])


@pytest.mark.parametrize(
    "other",
    [
        {"groups": 2},
        {"max_rounds": 1},
        {"surplus": "drop"},
        {"right_above": 0.5},
        {"tolerance": 1.0},
    ],
)
def test_ranks_whose_samplers_have_other_settings_are_told_before_a_batch(other):
    found = Ranks(STEPS, 3, groups=3, settings_of_last=other).next_batch(rollout)

    assert [type(each) for each in found] == [ConfigError] * 3
    ((name, value),) = other.items()
    assert f"the sampler of rank 2 has {{'{name}': {value!r}}}, and that of rank 0" in str(found[0])
    assert "give all ranks the same" in str(found[2])


def test_ranks_that_wait_with_other_groups_are_told_before_a_batch():
    ranks = Ranks(some_steps([12] * 3), 2, groups=1)
    ranks.next_batch(rollout)
    state = ranks.state_dict()
    first, *others = state["waiting"]
    waiting = [others[0], first, *others[1:]]
    ranks.samplers[1].load_state_dict(damaged(state, waiting=waiting))
    found = ranks.next_batch(rollout)

    assert [type(each) for each in found] == [StateError] * 2
    assert "batch 1 has other groups on other ranks: its digests are" in str(found[0])
    assert "load one state on all ranks" in str(found[0])


def test_a_rank_whose_batch_is_full_and_one_that_draws_for_it_are_told_of_one_batch():
    ranks = Ranks(some_steps([12] * 3), 2, groups=1)
    ranks.next_batch(rollout)
    state = ranks.state_dict()
    counts = {
        source: each | {"dropped": each["waiting"], "waiting": 0}
        for source, each in state["counts"].items()
    }
    ranks.samplers[1].load_state_dict(damaged(state, waiting=[], counts=counts))
    found = ranks.next_batch(rollout)

    assert [type(each) for each in found] == [StateError] * 2
    assert "rank 1 gives the round of batch 1, and rank 0 the groups of batch 1" in str(found[0])


def unsealed(state):
    return {key: value for key, value in state.items() if key != "blake2b"}


def test_a_rank_without_prompts_takes_part():
    ranks = Ranks(some_steps([1] * 8), 3, groups=2)

    assert sum(len(part) for part in ranks.next_batch(rollout)) == 2


def test_a_state_is_of_whole_batches():
    sampler = a_sampler(groups=6, max_rounds=1)
    with pytest.raises(omniload.RoundLimitError):
        sampler.next_batch(rollout)

    with pytest.raises(StateError, match="batch 0 is being filled"):
        sampler.state_dict()


def test_a_sampler_has_its_number_and_iterates_to_the_end_of_the_data():
    sampler = a_sampler(groups=2)

    found = [batch.number for batch in sampler.batches(rollout)]

    assert found == list(range(4))
    assert sampler.next_batch_number == 4


def damaged(state, **changes):
    return sealed({**unsealed(state), **changes})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: [state], "is of type list"),
        (
            lambda state: state["loader"],
            "the keys .'step'. and no loader, so it is not the state of a sampler",
        ),
        (lambda state: {**state, "batch": 7}, "is damaged: it carries digest"),
        (lambda state: damaged(state, version=2), "sampler state has version 2, this code reads 1"),
        (lambda state: damaged(state, batch=-1), "damaged"),
        (lambda state: damaged(state, waiting=state["waiting"] * 2), "a group waits twice"),
        (lambda state: damaged(state, waiting=[]), "0 groups of source 0 wait, counted as"),
        (lambda state: damaged(state, counts={}), "damaged"),
        (lambda state: damaged(state, rounds=[1]), "damaged"),
        (lambda state: damaged(state, waiting=[{}]), "damaged"),
        *(
            (
                lambda state, part=part: damaged(state, waiting=[state["waiting"][0] | part]),
                "damaged",
            )
            for part in (
                {"rewards": [float("inf"), 0.0]},
                {"rewards": [1.0]},
                {"answers": [[1]]},
                {"answers": [[1], [0.5]]},
                {"tokens": [1 << 40]},
                {"tokens": "text"},
                {"key": [0, 1]},
                {"source": 3},
            )
        ),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(change, said):
    sampler = a_sampler(some_steps([5] * 6), groups=1)
    while not sampler.state_dict()["waiting"]:
        sampler.next_batch(with_answers)
    state = sampler.state_dict()

    with pytest.raises(StateError, match=said):
        sampler.load_state_dict(change(state))
    assert sampler.state_dict() == state


def test_a_replay_goes_through_the_run_again_and_ends_with_it(tmp_path):
    whole = [as_told([batch]) for batch in a_sampler(groups=2, run_dir=tmp_path).batches(rollout)]
    sampler = a_sampler(groups=2, run_dir=tmp_path)

    replayed = [sampler.next_batch() for _ in whole]

    assert [as_told([batch]) for batch in replayed] == whole
    assert {group.rewards for batch in replayed for group in batch.groups} == {None}
    assert sampler.next_batch() is None
    assert len((tmp_path / GROUPS_NAME).read_bytes().splitlines()) == len(whole)


def test_a_run_goes_on_behind_its_replay_where_nothing_waits(tmp_path):
    steps = some_steps([4] * 12)
    whole = list(a_sampler(steps, surplus="drop").batches(rollout))
    run = a_sampler(steps, run_dir=tmp_path, surplus="drop")
    for _ in range(2):
        run.next_batch(rollout)
    sampler = a_sampler(steps, run_dir=tmp_path, surplus="drop")

    found = [*sampler.batches(), *sampler.batches(rollout)]

    assert len(found) > 3
    assert [batch.digest for batch in found] == [batch.digest for batch in whole]
    assert [batch.groups[0].rewards is None for batch in found[:3]] == [True, True, False]


def test_a_replay_leaves_groups_without_rewards_with_which_no_batch_is_filled(tmp_path):
    steps = some_steps([12] * 3)
    a_sampler(steps, groups=1, run_dir=tmp_path).next_batch(rollout)
    sampler = a_sampler(steps, groups=1, run_dir=tmp_path)
    sampler.next_batch()

    with pytest.raises(StateError, match="3 groups that wait come from a replay, which has no rew"):
        sampler.next_batch(rollout)


@pytest.mark.parametrize(
    ("steps", "settings", "kind", "said"),
    [
        (STEPS, {"groups": 2}, ConfigError, "batch 0 of the run has 3 groups with surplus 'carry'"),
        (STEPS, {"surplus": "drop"}, ConfigError, "this sampler 3 with 'drop'"),
        (
            some_steps([5] * 6),
            {},
            StateError,
            "step 0 has 5 prompts, but other prompts were judged",
        ),
        (
            [[(key, [9, 9]) for key, _ in step] for step in STEPS],
            {},
            IntegrityError,
            "batch 0 has digest .* the data has changed",
        ),
    ],
)
def test_a_replay_of_another_run_is_refused(tmp_path, steps, settings, kind, said):
    a_sampler(run_dir=tmp_path).next_batch(rollout)

    with pytest.raises(kind, match=said):
        a_sampler(steps, run_dir=tmp_path, **settings).next_batch()


def test_a_replay_needs_a_run_that_was_kept(tmp_path):
    with pytest.raises(ConfigError, match="there is no rollout, and the loader keeps no run"):
        a_sampler().next_batch()
    found = Ranks(STEPS, 2, run_dir=tmp_path, groups=3).next_batch()
    assert all("no decisions on groups" in str(each) for each in found)


def test_ranks_replay_together_or_not_at_all(tmp_path):
    Ranks(STEPS, 1, run_dir=tmp_path, groups=3).next_batch(rollout)

    found = Ranks(STEPS, 2, run_dir=tmp_path, groups=3).next_batch([None, rollout])

    assert "all with a rollout or all without" in str(found[0])
    assert [type(each) for each in found] == [StateError, StateError]


def test_a_folder_that_cannot_be_written_fails_the_batch_on_all_ranks(tmp_path):
    (tmp_path / GROUPS_NAME).mkdir()

    found = Ranks(STEPS, 2, run_dir=tmp_path, groups=3).next_batch(rollout)

    assert all(isinstance(each, omniload.OmniloadError) for each in found)
    (tmp_path / GROUPS_NAME).rmdir()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"groups": 0}, "groups is 0; give a whole number of at least 1"),
        ({"max_rounds": 0}, "max_rounds is 0"),
        ({"surplus": "keep"}, r"surplus is 'keep'; choose among \['carry', 'drop'\]"),
        ({"right_above": "1"}, "right_above is '1'; give a number"),
        ({"right_above": float("nan")}, "right_above is nan; give a finite number"),
        ({"tolerance": -1}, "tolerance is -1; give a finite number of at least 0"),
        ({"timeout": 0}, "timeout is 0"),
    ],
)
def test_an_argument_is_refused_with_its_value(settings, said):
    with pytest.raises(ConfigError, match=said):
        a_sampler(**settings)


def test_of_ranks_that_share_their_prompts_one_writes(tmp_path):
    loader = LoaderInMemory(STEPS, run_dir=tmp_path)
    loader.leads = False

    batch = omniload.DynamicSampler(loader, groups=3).next_batch(rollout)

    assert batch.digest == a_sampler().next_batch(rollout).digest
    assert list(tmp_path.iterdir()) == []


class FailsOnce:
    """An exchange of one rank that fails at its n-th call."""

    rank, size = 0, 1

    def __init__(self, at):
        self.left = at

    def all_gather(self, part):
        self.left -= 1
        if self.left == 0:
            raise UnavailableError("a rank is gone")
        return [part]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_call_that_an_exchange_failed_is_taken_up_again(tmp_path, at):
    sampler = a_sampler(run_dir=tmp_path, exchange=FailsOnce(at))

    with pytest.raises(UnavailableError, match="a rank is gone"):
        sampler.next_batch(rollout)
    batch = sampler.next_batch(rollout)

    assert batch.digest == a_sampler().next_batch(rollout).digest
    assert len((tmp_path / GROUPS_NAME).read_bytes().splitlines()) == 1
    assert sampler.counts["easy"].is_whole()
    assert sum(counts.drawn for counts in sampler.counts.values()) == 12


def test_ranks_need_a_way_to_agree():
    with pytest.raises(ConfigError, match="of 2 ranks, and there is no process group"):
        omniload.DynamicSampler(LoaderInMemory(STEPS, 0, 2), groups=1)


def test_an_exchange_among_other_ranks_is_refused():
    class Four:
        rank, size = 0, 4

    with pytest.raises(ConfigError, match="of 1 rank along dp, and the exchange among 4"):
        a_sampler(exchange=Four())


def test_a_loader_whose_ranks_have_changed_is_told():
    sampler = a_sampler()
    sampler.next_batch(rollout)
    loader = LoaderInMemory(STEPS)
    sampler = omniload.DynamicSampler(loader, groups=1)
    loader.num_ranks = 2

    with pytest.raises(ConfigError, match="the loader is of 2 ranks now, and the sampler of 1"):
        sampler.next_batch(rollout)


def test_a_prompt_that_was_cut_is_refused():
    steps = [[((0, 0, 0, 64), [1, 2])]]

    with pytest.raises(
        ConfigError, match=r"a prompt of easy was cut: a piece begins at its token 64"
    ):
        a_sampler(steps).next_batch(rollout)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([[[1], [2]]], r"answers are \[2\] of 1 prompts, and rewards \[4, 2\]"),
        ([[[1]]] * 4, r"answers are \[1, 1, 1, 1\] of 4 prompts"),
        ([[[1], [[2]]]] * 4, r"an answer has shape \[1, 1\]"),
        ([[[1], [0.5]]] * 4, "of float64; give token ids"),
        ([[[1], [[2], [3, 4]]]] * 4, "an answer is no sequence of token ids"),
    ],
)
def test_answers_that_are_none_are_told(answers, said):
    with pytest.raises(ConfigError, match=said):
        a_sampler().next_batch(
            lambda prompts: omniload.Rollouts(rewards=rollout(prompts), answers=answers)
        )
