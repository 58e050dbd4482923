"""Policies compared with the formulas of their papers, and limits that all of them keep."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omniload.base.config import checked
from omniload.base.errors import ConfigError
from omniload.base.settings import registry
from omniload.mix.edits import history as edits_history
from omniload.mix.edits.edit import AddSource, SetWeights
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import with_begun
from omniload.mix.journal.rewards import SourceRewards
from omniload.mix.policy.rules import (
    PolicyInput,
    Turn,
    capped,
    decide,
    seen_at,
    turns_that_weigh,
)
from omniload.mix.schema.policies import SteeringConfig
from omniload.mix.sources import ParquetSource
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix

NAMES = ("books", "code", "news", "web")


def a_policy(**policy):
    return checked(
        {"version": 1, "every": 10, "policy": policy}, SteeringConfig, name="steer"
    ).policy


def seen(shares, *, declared=None, losses=None, step=0):
    shares = dict(zip(NAMES, shares, strict=False))
    return PolicyInput(
        step=step,
        declared=dict(zip(NAMES, declared, strict=False)) if declared is not None else shares,
        shares=shares,
        losses=losses or {},
        labels=dict.fromkeys(losses or {}, 100),
    )


weights = st.lists(st.sampled_from([0.0, 1e-6, 0.1, 1.0, 7.0]), min_size=4, max_size=4).filter(
    lambda found: sum(found) > 0
)
losses = st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1e3))
policies = st.sampled_from(
    [
        {"type": "constant"},
        {"type": "loss", "rate": 0.5},
        {"type": "loss", "rate": 1e6, "declared": 0.01, "reference": {"web": 3.0}},
        {"type": "reward"},
        {"type": "odm"},
        {"type": "odm", "smoothing": 0, "goes_by": "reward"},
        {"type": "temperature", "start": 100, "to_step": 50},
        {"type": "temperature", "start": 0.01, "end": 0.01, "to_step": 50},
    ]
)


@given(policies, weights, weights, losses, st.integers(0, 100))
def test_shares_sum_to_one_and_what_is_left_out_stays_so(policy, now, declared, losses, step):
    now, declared = ([w / sum(found) for w in found] for found in (now, declared))
    told = replace(
        seen(now, declared=declared, losses=losses, step=step),
        rewards={
            name: SourceRewards(groups=3, kept=int(loss) % 4) for name, loss in losses.items()
        },
        turns=[
            Turn(number=2, shares=dict(zip(NAMES, declared, strict=True)), values=losses),
            Turn(number=9, shares=dict(zip(NAMES, now, strict=True)), values=losses),
        ][: step % 3],
    )
    if not any(d for d, n in zip(declared, now, strict=True) if n) and policy["type"] != "loss":
        return  # nothing that is drawn has a share in the file

    found = decide(a_policy(**policy), told, {})

    assert sum(found.values()) == pytest.approx(1.0)
    assert all(share >= 0 for share in found.values())
    assert [name for name, share in found.items() if not told.shares[name] and share] == []


def test_losses_move_shares_as_in_doremi():
    shares, reference = np.array([0.1, 0.2, 0.3, 0.4]), np.array([1.0, 2.0, 0.0, 4.0])
    losses = np.array([2.5, 2.5, 2.5, 2.5])
    policy = a_policy(
        type="loss", rate=0.7, declared=0.25, reference=dict(zip(NAMES, reference, strict=True))
    )

    found = decide(policy, seen(shares, losses=dict(zip(NAMES, losses, strict=True))), {})

    moved = shares * np.exp(0.7 * np.maximum(losses - reference, 0))
    wanted = 0.75 * moved / moved.sum() + 0.25 * shares
    assert list(found.values()) == pytest.approx(wanted.tolist())


def test_a_source_without_losses_moves_like_the_mean():
    found = decide(
        a_policy(type="loss", rate=1.0), seen([0.25] * 4, losses={"books": 1.0, "code": 3.0}), {}
    )

    assert found["books"] < found["news"] == found["web"] < found["code"]


def test_no_source_falls_below_its_part_of_the_file():
    policy, shares = a_policy(type="loss", rate=100, declared=0.2), [0.25] * 4
    for _ in range(20):
        shares = list(decide(policy, seen(shares, losses={"web": 9.0, "code": 1.0}), {}).values())

    declared = decide(policy, seen(shares, declared=[0.25] * 4, losses={"web": 9.0, "code": 1}), {})
    assert min(declared.values()) >= 0.2 * 0.25 - 1e-12
    assert declared["web"] > 0.8


def rewarded(shares, groups, **changes):
    rewards = {
        name: SourceRewards(groups=10, kept=kept, answers=80, right=40)
        for name, kept in groups.items()
    }
    return replace(seen(shares, **changes), rewards=rewards)


def test_sources_whose_groups_differ_in_reward_gain_and_those_too_easy_or_too_hard_lose():
    policy = a_policy(type="reward", declared=0.2)
    declared = np.array([0.4, 0.3, 0.2, 0.1])
    told = rewarded([0.25] * 4, {"books": 0, "code": 5, "news": 10, "web": 0}, declared=declared)

    found = decide(policy, told, {})

    moved = declared * np.array([0, 0.5, 1, 0])
    assert list(found.values()) == pytest.approx(
        (0.8 * moved / moved.sum() + 0.2 * declared).tolist()
    )


def test_a_source_without_rewards_is_drawn_like_the_mean_and_one_that_was_left_out_stays_so():
    policy = a_policy(type="reward", declared=0.5)
    told = rewarded([0.5, 0.3, 0.2, 0.0], {"books": 2, "code": 6}, declared=[0.25] * 4)

    found = decide(policy, told, {})

    assert found["books"] < found["news"] < found["code"]
    assert found["news"] == pytest.approx(1 / 3)
    assert found["web"] == 0


def test_rewards_that_never_differ_move_nothing():
    told = rewarded([0.7, 0.3], {"books": 0, "code": 0}, declared=[0.5, 0.5])

    assert decide(a_policy(type="reward"), told, {}) == pytest.approx({"books": 0.7, "code": 0.3})


def exp3(turns, arms, alpha):
    """Return the shares that the paper's algorithm has after some turns, one after another."""
    K = len(arms)  # noqa: N806 -- the paper's letters
    R, E = np.zeros(K), [1 / K]  # noqa: N806
    told = {turn.number: turn for turn in turns}
    for t in range(1, turns[-1].number + 1):
        E.append(min(1 / K, math.sqrt(math.log(K) / (K * t))))
        if (turn := told.get(t)) is None:
            continue
        for i, name in enumerate(arms):
            if name in turn.values and turn.shares[name] > 0:
                R[i] = alpha * R[i] + (1 - alpha) * turn.values[name] / turn.shares[name]
    gibbs = np.exp(E[-2] * R)
    return dict(zip(arms, (1 - K * E[-1]) * gibbs / gibbs.sum() + E[-1], strict=True))


@given(
    weights,
    st.lists(
        st.tuples(
            weights, st.dictionaries(st.sampled_from(NAMES), st.floats(-3, 12)), st.integers(1, 40)
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([0.0, 0.5, 0.9, 0.999]),
)
def test_a_bandit_moves_shares_as_the_algorithm_of_odm(now, drawn, alpha):
    now = [w / sum(now) for w in now]
    turns, number = [], 0
    for found, values, further in drawn:
        number += further
        # No share is so small that the plain sum of exponentials leaves the range of a double.
        shares = {n: max(w / sum(found), 0.02 * (w > 0)) for n, w in zip(NAMES, found, strict=True)}
        turns.append(Turn(number=number, shares=shares, values=values))
    told = replace(seen(now), turns=turns)

    found = decide(a_policy(type="odm", smoothing=alpha), told, {})

    arms = [name for name, share in told.shares.items() if share]
    assert found == pytest.approx(dict.fromkeys(NAMES, 0.0) | exp3(turns, arms, alpha))
    least = min(1 / len(arms), math.sqrt(math.log(len(arms)) / (len(arms) * number)))
    assert all(found[name] >= least - 1e-12 for name in arms)


def test_a_bandit_goes_from_even_to_what_is_lost_most_and_the_turns_that_weigh_are_enough():
    policy = a_policy(type="odm")
    shares, turns, found = dict.fromkeys(NAMES, 0.25), [], []
    for number in range(1, 301):
        losses = {"books": 2.0, "code": 2.0, "news": 2.0, "web": 6.0}
        turns.append(Turn(number=number, shares=shares, values=losses))
        shares = decide(policy, replace(seen(shares.values()), turns=turns), {})
        found.append(shares)
        latest = turns[-turns_that_weigh(0.9) :]
        few = decide(policy, replace(seen(shares.values()), turns=latest), {})
        assert few == pytest.approx(shares, abs=1e-5)

    assert found[0] == dict.fromkeys(NAMES, 0.25)  # all is explored at first
    assert found[40]["web"] > 0.3
    assert max(found[40].values()) == found[40]["web"]
    assert decide(policy, seen([0.7, 0.3]), {}) == pytest.approx({"books": 0.7, "code": 0.3})


def test_a_largest_share_holds_for_a_bandit_however_much_is_lost():
    told = Turn(number=50, shares=dict.fromkeys(NAMES, 0.25), values={"web": 1e300, "code": -1e300})

    found = decide(a_policy(type="odm"), replace(seen([0.25] * 4), turns=[told]), {"web": 0.4})

    assert found["web"] == pytest.approx(0.4)
    assert sum(found.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(("smoothing", "turns"), [(0, 1), (0.5, 20), (0.9, 132), (0.999, 13857)])
def test_what_weighs_less_than_a_millionth_is_passed_over(smoothing, turns):
    assert turns_that_weigh(smoothing) == turns
    assert smoothing**turns <= 2.0**-20 * (1 + 1e-9)


@pytest.mark.parametrize(("step", "temperature"), [(0, 5), (100, 5), (150, 3), (200, 1), (999, 1)])
def test_the_temperature_moves_in_a_line(step, temperature):
    policy = a_policy(type="temperature", start=5, end=1, from_step=100, to_step=200)
    declared = np.array([0.05, 0.15, 0.2, 0.6])

    found = decide(policy, seen([0.25] * 4, declared=declared, step=step), {})

    wanted = declared ** (1 / temperature)
    assert list(found.values()) == pytest.approx((wanted / wanted.sum()).tolist())


def test_a_source_that_the_cold_left_nothing_of_comes_back_when_it_gets_warm():
    policy = a_policy(type="temperature", start=0.01, end=1, to_step=100)
    declared = [1e-6, 1 - 1e-6]

    cold = decide(policy, seen(declared, declared=declared, step=0), {})
    warm = decide(policy, seen(cold.values(), declared=declared, step=100), {})

    assert 0 < cold["books"] < 1e-9
    assert list(warm.values()) == pytest.approx(declared)


def test_constant_is_the_file_whatever_was_set():
    found = decide(a_policy(type="constant"), seen([0.7, 0.3], declared=[0.5, 0.5]), {})

    assert found == {"books": 0.5, "code": 0.5}


@given(weights, st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.1, 0.3, 0.5, 1.0])))
def test_no_share_is_above_its_largest_and_the_others_keep_their_proportions(found, most):
    shares = dict(zip(NAMES, found, strict=True))
    room = sum(most.get(name, 1.0) for name, share in shares.items() if share)
    if room < 1 - 1e-12:  # sums of decimals end next to 1
        with pytest.raises(ConfigError, match="by their max_fraction; raise one"):
            capped(shares, most)
        return

    whole = capped(shares, most)

    assert sum(whole.values()) == pytest.approx(1.0)
    assert all(share <= most.get(name, 1.0) + 1e-12 for name, share in whole.items())
    free = [name for name in NAMES if shares[name] and whole[name] < most.get(name, 1.0) - 1e-9]
    factors = [whole[name] / shares[name] for name in free]
    assert factors == pytest.approx(factors[:1] * len(factors))
    for name in set(NAMES) - set(free):  # held down, not up
        assert not factors or whole[name] <= factors[0] * shares[name] * (1 + 1e-9)


def in_proportion(members, amount, shares, most):
    """Return the parts of members in an amount, by halving the factor of all shares; a group is its cap and members."""

    def of(member, factor):
        if isinstance(member, str):
            return min(factor * shares[member], most.get(member, 1.0))
        return min(member[0], sum(of(each, factor) for each in member[1]))

    low, high = 0.0, 1e9
    for _ in range(100):
        middle = (low + high) / 2
        is_over = sum(of(member, middle) for member in members) > amount
        low, high = (low, middle) if is_over else (middle, high)
    found = {}
    for member in members:
        if isinstance(member, str):
            found[member] = of(member, high)
        else:
            found |= in_proportion(member[1], of(member, high), shares, most)
    return found


part = st.sampled_from([0.05, 0.2, 0.4, 0.7, 1.0])


@given(
    st.lists(st.sampled_from([0.01, 0.2, 1.0, 3.0, 50.0]), min_size=5, max_size=5),
    st.dictionaries(st.sampled_from((*NAMES, "wiki")), part),
    part,
    part,
)
def test_no_group_is_above_its_largest_and_nobody_else_is_held_down(found, most, inner, outer):
    shares = dict(zip((*NAMES, "wiki"), found, strict=True))
    groups = [(frozenset({"books", "code"}), inner), (frozenset({"books", "code", "news"}), outer)]
    members = ["web", "wiki", (outer, ["news", (inner, ["books", "code"])])]
    require_capped(members, shares, most, groups, off_by=1e-12)


def require_capped(members, shares, most, groups, *, off_by):
    """Check that shares are capped one by one, and that caps which no share can meet are refused."""
    wanted = in_proportion(members, 1.0, shares, most)
    if sum(wanted.values()) < 1 - 1e-9:
        with pytest.raises(ConfigError, match="by their max_fraction; raise one"):
            capped(shares, most, groups)
        return

    whole = capped(shares, most, groups)

    assert whole == pytest.approx(wanted, abs=1e-6)
    assert sum(whole.values()) == pytest.approx(1)
    for names, cap in [*groups, *((frozenset({name}), cap) for name, cap in most.items())]:
        assert sum(whole[name] for name in names) <= cap + off_by


@st.composite
def nests(draw, names=tuple("abcdef"), depth=3):
    """Return members in the form of ``in_proportion``: names, and caps of nested groups of them."""
    if len(names) == 1:
        return [names[0]]
    cut = draw(st.integers(1, len(names) - 1))
    members = []
    for half in (names[:cut], names[cut:]):
        inner = draw(nests(half, depth - 1)) if depth else list(half)
        members += [(draw(part), inner)] if draw(st.booleans()) else inner
    return members


def groups_in(members):
    """Return the groups among members, and the names of all."""
    groups, names = [], set()
    for member in members:
        if isinstance(member, str):
            names.add(member)
            continue
        inner, within = groups_in(member[1])
        groups += [*inner, (frozenset(within), member[0])]
        names |= within
    return groups, names


@settings(max_examples=200)
@example([(0.5, ["a", "b"]), "c", "d", "e", "f"], [0.9, 0.05, 0.05, 1e-6, 1e-6, 1e-6], {"a": 0.3})
@given(
    nests(),
    st.lists(st.sampled_from([0.01, 0.2, 1.0, 3.0, 50.0]), min_size=6, max_size=6),
    st.dictionaries(st.sampled_from("abcdef"), part),
)
def test_caps_hold_however_deep_they_nest(members, found, most):
    shares = dict(zip("abcdef", found, strict=True))
    groups, _ = groups_in(members)
    require_capped(members, shares, most, groups, off_by=1e-9)


def test_a_decision_folds_each_edit_once_however_many_sources_were_added(monkeypatch):
    history = History(a_mix())
    for i in range(12):
        config = ParquetSource(type="parquet", path=f"{i}.parquet", text="text")
        history = history.edited(AddSource(name=f"s{i}", source=config, weight=0.1), i)
    folded, one = [], edits_history.edited_mix
    monkeypatch.setattr(
        edits_history, "edited_mix", lambda mix, edit: folded.append(edit) or one(mix, edit)
    )

    seen_at(History(history.base, history.edits), 20, {}, {}, {})

    assert len(folded) == 12


def test_what_is_declared_behind_a_stage_that_began_by_epochs_is_that_stage():
    stages = [
        {"weights": {"web": 3, "code": 1}},
        {"from_epochs": {"web": 2}, "weights": {"web": 1, "code": 3}},
    ]
    history = History(a_mix(version=2, mix={"stages": stages}))
    state = replace(MixState.start(2), step=7, cursors_S=((0, 0, 0), (20, 0, 0)))
    begun = with_begun(history, state, [100, 10])
    begun = begun.edited(SetWeights(weights={"web": 3}), 9)

    declared = {step: seen_at(begun, step, {}, {}, {}).declared["web"] for step in (6, 7, 8, 10)}

    assert declared == {6: 0.75, 7: 0.25, 8: 0.25, 10: 0.25}


def test_an_added_source_is_declared_by_the_edit_that_added_it():
    stages = [{"from_step": 0, "weights": {"web": 3, "code": 1}}]
    source = ParquetSource(type="parquet", path="books/*.parquet", tokens="tokens")
    history = History(a_mix(mix={"stages": stages}))
    history = history.edited(AddSource(name="books", source=source, weight=4), 10)
    history = history.edited(SetWeights(weights={"books": 1, "web": 1, "code": 0}), 20)

    found = seen_at(history, 30, {}, {}, {})

    assert found.shares == {"code": 0.0, "web": 0.5, "books": 0.5}
    assert found.declared == {"code": 0.125, "web": 0.375, "books": 0.5}
    restored = decide(a_policy(type="constant"), found, {})
    assert restored == pytest.approx({"code": 0.0, "web": 3 / 7, "books": 4 / 7})


FUNCTIONS = """
import numpy

def favour(seen, *, name):
    return {other: (10.0 if other == name else 1.0) for other in seen.shares}

def some(seen):
    return {"web": 1.0}

def less(seen):
    return dict.fromkeys(seen.shares, -1)

def leaves(seen):
    raise SystemExit("nobody")


def broken(seen):
    return seen.losses["nobody"]

def nothing(seen):
    return dict.fromkeys(seen.shares, 0)

def numbered(seen):
    return {1: 0.5, "web": 0.5}

def huge(seen):
    return {name: numpy.float64(1e308) for name in seen.shares}

def of_numpy(seen):
    return {name: numpy.float32(i) for i, name in enumerate(seen.shares)}
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    meta = tmp_path / "lab-2.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 2.0\n")
    names = (
        "favour",
        "some",
        "less",
        "broken",
        "leaves",
        "nothing",
        "numbered",
        "huge",
        "of_numpy",
    )
    lines = "".join(f"{name} = lab_of_policies:{name}\n" for name in names)
    (meta / "entry_points.txt").write_text(f"[omniload.policies]\n{lines}")
    (tmp_path / "lab_of_policies.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.path_importer_cache.clear()
    registry.registered.cache_clear()
    yield
    sys.modules.pop("lab_of_policies", None)
    registry.registered.cache_clear()


def test_a_function_of_the_users_decides(installed):
    policy = a_policy(type="registered", function="favour", options={"name": "code"})

    found = decide(policy, seen([0.25, 0.5, 0.25, 0.0]), {"code": 0.6})

    assert found == pytest.approx({"books": 0.2, "code": 0.6, "news": 0.2, "web": 0.0})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("function", "shares"), [("huge", [1 / 4] * 4), ("of_numpy", [0, 1 / 6, 2 / 6, 3 / 6])]
)
def test_shares_are_numbers_of_any_kind_and_size(function, shares):
    found = decide(a_policy(type="registered", function=function), seen([0.25] * 4), {})

    assert list(found.values()) == pytest.approx(shares)
    assert all(type(share) is float for share in found.values())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("some", r"policy 'some' \(lab 2.0\) gives shares of \['web'\]; the mix has books, code"),
        ("numbered", r"gives shares of \['1', 'web'\]; the mix has books, code"),
        ("less", "gives books the share -1; give a number of at least 0"),
        ("broken", "fails at step 0: KeyError: 'nobody'"),
        ("leaves", "fails at step 0: SystemExit: nobody"),
        ("nothing", "gives every source of books, code, news, web the share 0"),
        ("gone", "no installed distributions register 'gone'"),
    ],
)
def test_what_a_function_gives_that_are_no_shares_is_told(installed, function, said):
    with pytest.raises(ConfigError, match=said):
        decide(a_policy(type="registered", function=function), seen([0.25] * 4), {})


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"type": "temperature", "start": 5, "from_step": 9, "to_step": 9}, "moves between them"),
        ({"type": "los"}, "did you mean 'loss'"),
        ({"type": "registered", "function": "os:system"}, "function"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(policy, said):
    with pytest.raises(ConfigError, match=said):
        a_policy(**policy)
