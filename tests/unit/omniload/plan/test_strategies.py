"""Strategies: the built-in ones, a user's own, and its refusals."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from omniload.base.errors import ConfigError
from omniload.base.settings import registry
from omniload.machine.strategy import place
from omniload.mix.config import BalanceConfig
from omniload.mix.state import MixState
from omniload.plan import strategies
from omniload.plan.cost import QuadraticCost
from omniload.plan.dgraph import DGraph
from omniload.plan.forecast.figures import figures_of
from omniload.plan.images.table import ImageTable
from omniload.plan.membership import membership_of
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.strategies import PlacementRequest, doubts_of_balance, placed_by
from tests.support.plane.builders import a_mix
from tests.support.plane.reference import known_ahead

COST = QuadraticCost(768.0, 1.0)
TREE = ClientPlaceTree.of(dp=2)


def a_request(**changes):
    given = {"tree": TREE, "step": 7, "microbatches": 2, "rows_per_microbatch": 2, "cost": COST}
    return PlacementRequest(**(given | changes))


def some_rows(num=8):
    """Rows of one to three documents; the later ones hold the longer."""
    lengths_P = np.repeat(np.arange(1, num + 1) * 16, 2).astype(np.int32)
    return DGraph.of_rows(lengths_P, np.arange(0, 2 * num + 1, 2), {"sources": lengths_P % 3})


@pytest.mark.parametrize("name", sorted(strategies.BUILT_IN))
def test_a_built_in_strategy_is_held_to_what_a_users_is_held_to(name):
    request, rows = a_request(), some_rows()

    placement = placed_by(strategies.strategy_of(name), "a user's", rows, request)

    assert placement.loads_BM.shape == (2, 2)
    assert placement.loads_BM.sum() == pytest.approx(
        sum(2 * (768.0 * 16 * i + (16.0 * i) ** 2) for i in range(1, 9))
    )


def test_balance_leaves_less_to_wait_for_than_length_groups_and_these_less_than_order():
    imbalance = {
        name: placed_by(strategy, name, some_rows(), a_request()).imbalance
        for name, strategy in strategies.BUILT_IN.items()
    }

    assert imbalance["balanced"] < imbalance["by_length"] < imbalance["in_order"]


def test_rows_of_like_length_meet_in_the_same_microbatch_of_every_rank():
    placement = strategies.by_length(some_rows(), a_request())

    longest_first = [placement.members_of(rank, m).tolist() for m in (0, 1) for rank in (0, 1)]
    assert longest_first == [[5, 7], [4, 6], [1, 3], [0, 2]]


def odd_and_even(rows, request):
    """A strategy that deals by hand."""
    at = np.arange(len(rows))
    graph = request.distributed(rows).cost(request.cost, of=request.cost_columns)
    return graph.deal(at % 2, at // 2 % 2).plan(request.tree)


def by_tokens(lengths_P, sources_P):
    return lengths_P + 0.0 * sources_P


by_tokens.of = ("lengths", "sources")


def dear_domain(lengths_P, domains_P):
    return lengths_P * np.where(domains_P == "math", 100.0, 1.0)


dear_domain.of = ("lengths", "tags.domain")


def by_domain(rows, request):
    """Give rank 0 the rows that begin with mathematics."""
    is_math_S = np.array([tags.get("domain") == "math" for tags in request.source_tags])
    first_R = is_math_S[rows.columns["sources"][rows.row_offsets[:-1]]]
    ranks_R = np.where(first_R, 0, 1)
    turns_R = np.where(first_R, np.cumsum(first_R), np.cumsum(~first_R)) - 1
    graph = request.distributed(rows).cost(request.cost, of=request.cost_columns)
    return graph.deal(ranks_R, turns_R // 2).plan(request.tree)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution of the user's that registers two strategies, a cost and two things that are none."""
    meta = tmp_path / "lab-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(
        f"[omniload.strategies]\nodd_and_even = {__name__}:odd_and_even\nlost = {__name__}:lost\n"
        f"number = {__name__}:COST.linear\ngone = no_such_module:none\n"
        f"by_domain = {__name__}:by_domain\n"
        f"[omniload.costs]\nby_tokens = {__name__}:by_tokens\ndear_domain = {__name__}:dear_domain\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sys.path_importer_cache.clear()
    registry.registered.cache_clear()
    yield
    registry.registered.cache_clear()


def lost(rows, request):
    whole = odd_and_even(rows, request)
    return replace(whole, members_N=whole.members_N[:-1], buckets_N=whole.buckets_N[:-1])


def a_step(**balance):
    """Return a mix with this balance, its first step, and the step's plan for two ranks."""
    mix = a_mix(sources=("web",), rows=8, length=16, micro_rows=2)
    mix = mix.model_copy(update={"balance": BalanceConfig(**balance)})
    state = MixState.start(1)
    membership = membership_of(mix, state, known_ahead(state, [[[3], [5], [9], [14]]], 400))
    return mix, place(mix, TREE, state, membership)


def test_a_strategy_and_a_cost_of_the_users_reach_the_plan(installed):
    _, plan = a_step(strategy="odd_and_even", cost="by_tokens")

    assert plan.dp_ranks_R.tolist() == [0, 1] * 4
    assert plan.microbatches_R.tolist() == [0, 0, 1, 1] * 2
    assert plan.imbalance == pytest.approx(1.0, abs=0.1)  # by tokens; by squares it is far more


def a_tagged_mix(**balance):
    """A mix of two sources, one of them tagged."""
    mix = a_mix(sources=("news", "proofs"), rows=8, length=16, micro_rows=2)
    proofs = mix.sources["proofs"].model_copy(update={"tags": {"domain": "math"}})
    sources = {"news": mix.sources["news"], "proofs": proofs}
    return mix.model_copy(update={"balance": BalanceConfig(**balance), "sources": sources})


def a_tagged_step(**balance):
    """As ``a_step``, from two sources alternately; each sample fills a row."""
    mix, state = a_tagged_mix(**balance), MixState.start(2)
    ahead = known_ahead(state, [[[16]], [[16]]], 40)
    return place(mix, TREE, state, membership_of(mix, state, ahead))


def sources_of_rows(plan):
    return plan.pieces.sources_P[plan.row_offsets[:-1]]


def test_a_cost_goes_by_the_tags_of_sources(installed):
    plan = a_tagged_step(cost="dear_domain")

    sources_R = sources_of_rows(plan)
    assert sorted(sources_R.tolist()) == [0] * 4 + [1] * 4
    # Two of the dear source for each rank: any other dealing is uneven.
    assert [int(sources_R[plan.dp_ranks_R == rank].sum()) for rank in (0, 1)] == [2, 2]
    assert plan.imbalance == pytest.approx(1.0)


def test_what_a_step_costs_in_order_is_foreseen_by_the_tags_of_sources(installed):
    plan = a_tagged_step(cost="dear_domain")

    figures = figures_of(a_tagged_mix(cost="dear_domain"), plan, dp=8)

    assert figures.imbalance_before == pytest.approx(100 / 50.5)  # a row each, of one source


def test_a_cost_that_asks_for_what_a_step_has_not_is_refused_by_its_name(installed, monkeypatch):
    monkeypatch.setattr(dear_domain, "of", ("lengths", "columns.lang"))

    with pytest.raises(
        ConfigError, match=r"'dear_domain' failed on 8 pieces.*'columns.lang'.*mend"
    ):
        figures_of(a_tagged_mix(cost="dear_domain"), a_tagged_step(), dp=2)


def test_a_tag_that_no_source_has_is_a_doubt_which_says_what_there_is(installed, monkeypatch):
    assert doubts_of_balance(a_tagged_mix(cost="dear_domain")) == []

    monkeypatch.setattr(dear_domain, "of", ("lengths", "tags.domian"))

    (said,) = doubts_of_balance(a_tagged_mix(cost="dear_domain"))
    assert said.startswith("balance.cost 'dear_domain' reads 'tags.domian', which is empty")
    assert "there are ['tags.domain']" in said


def test_a_strategy_goes_by_the_tags_of_sources(installed):
    plan = a_tagged_step(strategy="by_domain")

    assert plan.dp_ranks_R.tolist() == np.where(sources_of_rows(plan) == 1, 0, 1).tolist()


def test_what_is_trained_on_is_the_same_under_every_strategy(installed):
    digests = {a_step(strategy=s)[1].membership_digest() for s in ("odd_and_even", "balanced")}

    assert len(digests) == 1


def test_a_placement_that_loses_a_row_is_refused_with_the_strategy_and_the_step(installed):
    with pytest.raises(
        ConfigError, match=r"strategy 'lost' at step 0, with 8 rows, was refused: its 7 rows"
    ):
        a_step(strategy="lost")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nobody", "balance.strategy: no installed distributions register 'nobody' .*; built in"),
        ("hybri", "'omniload.strategies'; did you mean 'hybrid'. built in"),
        ("number", r"is float, not a function"),
        ("gone", r"cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_strategy_that_cannot_be_had_is_refused_before_a_step(installed, name, says):
    with pytest.raises(ConfigError, match=says):
        strategies.require_strategy(BalanceConfig(strategy=name))


def test_a_cost_that_nobody_registers_is_refused_before_a_step():
    with pytest.raises(ConfigError, match=r"balance.cost: .*'dear'.*built in: \['quadratic'\]"):
        strategies.require_strategy(BalanceConfig(cost="dear"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"members_N": np.arange(8)[::-1]}, "its 8 rows are not the 8 of the step"),
        ({"buckets_N": np.zeros(7, np.int32)}, "it gives 7 of 8 rows a bucket"),
        ({"buckets_N": np.full(8, 0.5)}, "it gives 0 of 8 rows a bucket, by whole numbers"),
        ({"microbatches_N": [0] * 8}, "it gives 0 of 8 rows a microbatch, by whole numbers"),
        ({"buckets_N": np.zeros((8, 1), np.int32)}, "it gives 0 of 8 rows a bucket"),
        ({"buckets_N": np.full(8, 2, np.int32)}, "row 0 goes to bucket 2 of 2"),
        ({"microbatches_N": np.full(8, -1, np.int32)}, "row 0 goes to microbatch -1 of 2"),
        ({"microbatches_N": np.zeros(8, np.int32)}, "microbatch 0 of dp rank 0 has 4 rows"),
    ],
)
def test_a_placement_that_is_not_whole_is_refused(change, says):
    def broken(rows, request):
        return replace(odd_and_even(rows, request), **change)

    with pytest.raises(ConfigError, match=says):
        placed_by(broken, "broken", some_rows(), a_request())


def some_images():
    """Two images, in the first and the last document of ``some_rows``."""
    whole = np.arange(2, dtype=np.int32)
    return ImageTable(
        pieces_I=whole.astype(np.int64) * 15,
        numbers_I=whole * 0,
        firsts_I=whole,
        tokens_I=whole + 1,
        patches_I=whole + 4,
    )


@pytest.mark.parametrize(
    ("encoders_I", "says"),
    [
        (np.zeros(3, np.int32), "it gives 3 of 2 images a rank of the tree, by whole numbers"),
        (np.zeros(2), "it gives 0 of 2 images a rank of the tree"),
        (
            np.array([0, 2]),
            "image 1 goes to rank of the tree 2 of 2, numbered from 0; mend",
        ),
    ],
)
def test_images_that_are_not_dealt_to_ranks_are_refused_in_a_line(encoders_I, says):
    def broken(rows, request):
        return replace(odd_and_even(rows, request), encoders_I=encoders_I)

    with pytest.raises(ConfigError, match=says):
        placed_by(broken, "broken", some_rows(), a_request(images=some_images()))


@pytest.mark.parametrize(
    "changed",
    [
        lambda rows, request: rows.columns["sources"],
        lambda rows, request: rows.columns["lengths"],
        lambda rows, request: rows.row_offsets,
        lambda rows, request: request.images.pieces_I,
    ],
)
def test_a_strategy_that_writes_to_what_a_step_holds_fails_and_changes_nothing(changed):
    offsets = np.arange(0, 17, 2)
    columns = {"lengths": np.full(16, 8), "sources": np.zeros(16, np.int16)}
    rows = DGraph.of_rows(columns["lengths"], offsets, {"sources": columns["sources"]})
    held = some_images()
    request = a_request(images=held)

    def writes(rows, request):
        changed(rows, request)[0] += 1
        return odd_and_even(rows, request)

    with pytest.raises(
        ConfigError, match=r"strategy 'writes' at step 7.*failed.*read-only; mend it"
    ):
        placed_by(writes, "writes", rows, request)
    assert [int(array[0]) for array in (*columns.values(), offsets, held.pieces_I)] == [8, 0, 0, 0]


def test_a_strategy_and_a_cost_are_given_what_they_cannot_change_the_step_by(
    installed, monkeypatch
):
    def relabels(lengths_P, sources_P):
        sources_P[:] = 1
        return lengths_P * 1.0

    relabels.of = ("lengths", "sources")
    monkeypatch.setattr(sys.modules[__name__], "by_tokens", relabels)

    with pytest.raises(
        ConfigError,
        match=r"cost 'relabels', by which 'balanced' deals the 8 rows of step 0, failed: .*read-only",
    ):
        a_step(cost="by_tokens")


def test_a_strategy_may_fill_the_same_arrays_in_every_step():
    places_R = np.zeros(8, np.int64)

    def reuses(rows, request):
        places_R[:] = np.roll(places_R, 1) if places_R.any() else np.arange(8) % 2
        return replace(odd_and_even(rows, request), buckets_N=places_R)

    first, second = (placed_by(reuses, "reuses", some_rows(), a_request()) for _ in range(2))

    assert first.buckets_N.dtype == np.int32
    assert first.buckets_N.tolist() == [0, 1] * 4
    assert second.buckets_N.tolist() == [1, 0] * 4


def test_a_rank_without_work_is_refused():
    def idle(rows, request):
        made = odd_and_even(rows, request)
        return replace(made, microbatches_N=np.zeros(len(rows), np.int32))

    with pytest.raises(ConfigError, match="microbatch 1 of dp rank 0 has no row"):
        placed_by(idle, "idle", some_rows(), a_request(rows_per_microbatch=4))


def test_a_strategy_that_fails_or_returns_something_else_is_named():
    with pytest.raises(ConfigError, match=r"strategy 'none' .* it returned NoneType"):
        placed_by(lambda rows, request: None, "none", some_rows(), a_request())
    with pytest.raises(ConfigError, match=r"failed: KeyError: 'patches'") as failed:
        placed_by(lambda rows, request: rows.columns["patches"], "vlm", some_rows(), a_request())
    assert isinstance(failed.value.__cause__, KeyError)
    with pytest.raises(ConfigError, match=r"strategy 'exits' .* failed: SystemExit: no patches"):
        placed_by(lambda rows, request: sys.exit("no patches"), "exits", some_rows(), a_request())


@pytest.mark.parametrize(
    ("buckets", "microbatches", "says"),
    [
        (np.zeros(3, int), np.zeros(8, int), r"buckets_N has shape \(3,\)"),
        (np.zeros(8), np.zeros(8, int), "type float64"),
        (np.full(8, -1), np.zeros(8, int), r"buckets_N\[0\] is -1"),
        (np.zeros(8, int), np.full(8, 2), "microbatches_N holds 2; a bucket has 2"),
        (np.full(8, 5), np.zeros(8, int), "bucket 5 of 2"),
        (np.zeros(8, int), np.zeros(8, int), "microbatch 0 of bucket 0 is dealt 8 members"),
    ],
)
def test_dealing_by_hand_is_checked(buckets, microbatches, says):
    graph = a_request().distributed(some_rows()).cost(COST)

    with pytest.raises(ValueError, match=says):
        graph.deal(buckets, microbatches).plan(TREE)
