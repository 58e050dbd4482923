import numpy as np
import pytest

from omniload.mix.config import MixConfig, Stage
from omniload.mix.schedule import MixSchedule
from omniload.plan.cost import QuadraticCost
from omniload.plan.dgraph import DGraph
from omniload.plan.place_tree import ClientPlaceTree

COST = QuadraticCost(768.0, 1.0)
HALVES = MixSchedule.constant({"web": 1, "code": 1})


def some_samples(num=400, *, seed=0):
    """Lengths and sources of candidates."""
    rng = np.random.default_rng(seed)
    lengths_N = np.clip(rng.lognormal(5.5, 1.2, num), 1, 8_192).astype(np.int32)
    return lengths_N, rng.integers(0, 2, num)


def a_mixed(**changes):
    return DGraph.of_samples(*some_samples()).mix(HALVES, **({"budget": 40_000} | changes))


def a_balanced(graph=None, axis="dp", **distribution):
    graph = a_mixed() if graph is None else graph
    return graph.distribute(axis, **distribution).cost(COST).balance()


def test_samples_go_from_metadata_to_ranks_in_one_expression():
    placement = (
        DGraph.of_samples(*some_samples())
        .mix(HALVES, budget=40_000)
        .distribute("dp", microbatches=2)
        .cost(COST)
        .balance("greedy_swap")
        .broadcast_at("tp")
        .plan(ClientPlaceTree.of(dp=4, tp=2))
    )

    assert placement.loads_BM.shape == (4, 2)
    assert placement.bound <= placement.imbalance <= 1.01 < placement.imbalance_before
    assert placement.fetching_ranks == (0, 2, 4, 6)


def test_rows_are_balanced_by_the_documents_in_them_not_by_their_tokens():
    piece_lengths_P = np.array([1024, *[32] * 32, 1024, *[32] * 32])  # equal tokens, unequal work
    row_offsets = np.array([0, 1, 33, 34, 66])

    placement = a_balanced(DGraph.of_rows(piece_lengths_P, row_offsets), max_count=2).plan(
        ClientPlaceTree.of(dp=2)
    )

    assert placement.imbalance == 1.0
    first, second = placement.members_of(0, 0).tolist(), placement.members_of(1, 0).tolist()
    assert {0, 2} & set(first)
    assert {0, 2} & set(second)


def test_mixing_takes_the_head_of_every_source_by_weight():
    lengths_N = np.full(12, 10)
    sources_N = np.array([0, 1] * 6)
    schedule = MixSchedule.constant({"web": 3, "code": 1})

    graph = DGraph.of_samples(lengths_N, sources_N).mix(schedule, budget=80)

    assert sorted(graph.members_N.tolist()) == [0, 1, 2, 3, 4, 6, 8, 10]
    assert graph.drawn.counts_S.tolist() == [6, 2]


def test_steps_drawn_one_after_the_other_are_the_step_drawn_at_once():
    lengths_N, sources_N = some_samples()
    whole = a_mixed(budget=20_000)

    first = a_mixed(budget=8_000)
    rest = np.setdiff1d(np.arange(len(lengths_N)), first.members_N)
    left = 20_000 - int(first.columns["lengths"].sum())
    second = DGraph.of_samples(lengths_N[rest], sources_N[rest]).mix(
        HALVES, budget=left, credits_S=first.drawn.credits_S
    )

    drawn = [*first.members_N.tolist(), *rest[second.members_N].tolist()]
    assert drawn == whole.members_N.tolist()


def test_weights_by_samples_count_samples_and_the_budget_counts_tokens():
    lengths_N = np.array([100] * 10 + [1] * 10)
    sources_N = np.repeat([0, 1], 10)
    schedule = MixSchedule.constant({"long": 1, "short": 1}, level="sample")

    graph = DGraph.of_samples(lengths_N, sources_N).mix(schedule, budget=404)

    assert graph.drawn.counts_S.tolist() == [4, 4]


def test_the_weights_of_the_step_are_used():
    stages = (
        Stage(from_step=0, weights={"web": 1}),
        Stage(from_step=10, weights={"code": 1}),
    )
    schedule = MixSchedule(stages, ("web", "code"))
    graph = DGraph.of_samples(*some_samples())

    assert set(graph.mix(schedule, step=9, budget=2_000).columns["sources"].tolist()) == {0}
    assert set(graph.mix(schedule, step=10, budget=2_000).columns["sources"].tolist()) == {1}


def test_every_call_leaves_the_graph_before_it_as_it_was():
    loaded = DGraph.of_samples(*some_samples())
    mixed = loaded.mix(HALVES, budget=10_000)
    balanced = a_balanced(mixed)

    assert (loaded.state, mixed.state, balanced.state) == ("loaded", "mixed", "balanced")
    assert len(loaded) == 400
    assert dict(mixed.costs) == {}
    assert mixed.distribution is None


def test_two_modules_are_both_more_even_than_in_order_dealing_leaves_them():
    lengths_N, _ = some_samples(512)
    patches_N = np.random.default_rng(1).lognormal(5, 1, 512)
    graph = (
        DGraph.of_samples(lengths_N, columns={"patches": patches_N})
        .distribute("dp")
        .cost(COST)
        .cost(QuadraticCost(1.0, 0.01), "encoder", of=("patches",))
    )
    tree = ClientPlaceTree.of(dp=8)

    hybrid = graph.balance().plan(tree).imbalance_of_module
    in_order = graph.balance("none").plan(tree).imbalance_of_module

    assert list(hybrid) == ["backbone", "encoder"]
    assert hybrid["backbone"] < in_order["backbone"]
    assert hybrid["encoder"] < in_order["encoder"]


def test_a_module_that_costs_nothing_does_not_disturb_the_others():
    graph = DGraph.of_samples(np.array([4, 3, 2, 1])).distribute("dp").cost(COST)

    placement = (
        graph.cost(lambda lengths_N: lengths_N * 0.0, "encoder")
        .balance()
        .plan(ClientPlaceTree.of(dp=2))
    )

    assert placement.imbalance_of_module["encoder"] == 1.0
    assert placement.imbalance == placement.imbalance_of_module["backbone"]


def test_a_cost_may_be_any_function_of_several_columns():
    graph = DGraph.of_samples(np.array([1, 2]), columns={"patches": np.array([10, 20])})

    costed = graph.distribute("world").cost(lambda n, p: n + p, "fused", of=("lengths", "patches"))

    assert costed.costs["fused"].tolist() == [11.0, 22.0]


def test_encoder_work_can_be_spread_over_every_rank():
    graph = DGraph.of_samples(np.arange(1, 33)).distribute("world", 2).cost(COST).balance()

    placement = graph.plan(ClientPlaceTree.of(dp=4, tp=2, cp=2))

    assert placement.loads_BM.shape == (8, 1)


def test_an_empty_step_is_placed_as_nothing():
    placement = a_balanced(DGraph.of_samples(np.empty(0, np.int32)), microbatches=2).plan(
        ClientPlaceTree.of(dp=2)
    )

    assert placement.buckets_N.tolist() == []
    assert placement.loads_BM.tolist() == [[0, 0], [0, 0]]
    assert (placement.imbalance, placement.imbalance_before) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: a_mixed().plan(ClientPlaceTree.of()), "plan .* is mixed; call distribute first"),
        (
            lambda: a_mixed().distribute().plan(ClientPlaceTree.of()),
            "plan .* is distributed; call cost first",
        ),
        (
            lambda: a_mixed().distribute().cost(COST).plan(ClientPlaceTree.of()),
            "plan .* is costed; call balance first",
        ),
        (lambda: a_mixed().balance(), "balance .* is mixed; call distribute first"),
        (lambda: a_mixed().cost(COST), "cost .* is mixed; call distribute first"),
        (lambda: a_mixed().broadcast_at("tp"), "broadcast_at .* call distribute first"),
        (lambda: a_mixed().mix(HALVES, budget=1), "mix .* is mixed already; call it before"),
        (lambda: a_mixed().distribute().distribute(), "distribute .* is distributed already"),
        (lambda: a_balanced().cost(COST, "more"), r"cost .* is balanced already.*balance\("),
        (lambda: a_balanced().balance(), "balance .* is balanced already"),
    ],
)
def test_a_call_out_of_order_is_refused_with_the_call_to_make(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DGraph.of_samples(np.ones(2), np.ones(3)), r"column 'sources' has shape \(3,\)"),
        (lambda: DGraph.of_samples(np.ones(2), columns={"lengths": np.ones(2)}), "is taken"),
        (lambda: DGraph.of_rows(np.ones(2), np.array([0, 3])), r"runs over \(0, 3\) for 2"),
        (
            lambda: DGraph.of_rows(np.ones(2), np.array([0, 2])).mix(HALVES, budget=1),
            "mix draws samples by source",
        ),
        (lambda: DGraph.of_samples(np.ones(2)).mix(HALVES, budget=1), "load them with of_samples"),
        (lambda: a_mixed(budget=10**9), "source '(web|code)' has .* candidates, too few"),
        (lambda: a_mixed(step=-1), "step is -1"),
        (lambda: a_mixed(credits_S=[0]), "credits_S has 1 values for 2 sources"),
        (
            lambda: DGraph.of_samples(np.ones(1, int), np.array([2])).mix(HALVES, budget=1),
            "numbered 2 to 2; the schedule names 2",
        ),
        (lambda: a_mixed().distribute(microbatches=0), "microbatches is 0"),
        (lambda: a_mixed().distribute().cost(COST, of=("pixels",)), r"columns \['pixels'\]"),
        (lambda: a_mixed().distribute().cost(COST).cost(COST), "'backbone' has a cost already"),
        (lambda: a_mixed().distribute().cost(lambda n: n[:1]), r"has shape \(1,\)"),
        (lambda: a_mixed().distribute().cost(lambda n: -n), "'backbone' at 0 is -"),
        (lambda: a_mixed().distribute().cost(COST).balance("best"), "method is 'best'"),
        (lambda: a_balanced().broadcast_at("tp").broadcast_at("tp"), "declared already"),
        (lambda: a_balanced().broadcast_at("dp"), "broadcast along 'dp' is not possible"),
        (lambda: a_balanced().broadcast_at("model"), "broadcast along 'model' is not possible"),
        (
            lambda: (
                a_balanced(axis="world").broadcast_at("tp").plan(ClientPlaceTree.of(dp=2, tp=2))
            ),
            r"rank 1 has samples of its own along 'world' \(bucket 1\) and would be sent those of rank 0",
        ),
        (
            lambda: a_balanced().plan(ClientPlaceTree.of(dp=2)).members_of(2, 0),
            "bucket is 2; there are 2, numbered from 0",
        ),
        (
            lambda: a_balanced(microbatches=2).plan(ClientPlaceTree.of()).members_of(0, -1),
            "microbatch is -1; there are 2",
        ),
        (
            lambda: a_balanced(max_count=1).plan(ClientPlaceTree.of()),
            "1 buckets of 1 microbatches of 1 members hold 1 of",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_graph_describes_its_calls_as_a_table():
    lines = a_balanced(microbatches=2).broadcast_at("tp").describe().splitlines()

    assert [line.split("  ")[0].split("(")[0] for line in lines] == [
        "call",
        "of_samples",
        "mix",
        "distribute",
        "cost",
        "balance",
        "broadcast_at",
    ]
    assert "web 0.5, code 0.5" in lines[2]


def test_a_schedule_comes_from_a_mix_file():
    mix = MixConfig.model_validate(
        {
            "version": 1,
            "seed": 1,
            "sources": {
                "web": {"type": "parquet", "path": "web/*", "tokens": "ids"},
                "code": {"type": "parquet", "path": "code/*", "tokens": "ids"},
            },
            "mix": {
                "level": "sample",
                "stages": [{"from_step": 0, "weights": {"web": 3, "code": 1}}],
            },
            "pack": {"length": 8},
            "batch": {"tokens": 16, "micro_tokens": 8},
        }
    )

    schedule = MixSchedule.of(mix)

    assert schedule.level == "sample"
    assert schedule.shares_at(7) == {"web": 0.75, "code": 0.25}
