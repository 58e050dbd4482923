"""Costs and strategies that use tags of samples, in whole planes: even work, and the same steps after any kill."""

import os
import signal
from itertools import pairwise

import numpy as np
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.mix.config import BalanceConfig
from omniload.mix.journal.place import JOURNAL_NAME
from omniload.plan.forecast.figures import figures_of
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.rehearsal import Rehearsal
from tests.support.plane.sources.tagged import DEAR, a_tagged_corpus, install

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")
STEPS = 6


@pytest.fixture
def mix(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    return a_tagged_corpus(tmp_path)


def balanced_by(mix, **balance):
    return mix.model_copy(update={"balance": BalanceConfig(**balance)})


def a_spec(folder, mix, **changes):
    return PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=2), **changes)


def steps_of(plane, count=STEPS):
    clients = [Client(plane.handle(rank)) for rank in range(2)]
    return [[client.next_batch(120) for client in clients] for _ in range(count)]


def local_steps(folder, mix, **changes):
    with LocalPlane(a_spec(folder, mix, **changes)) as plane:
        return steps_of(plane)


def documents_of(batch):
    """Yield language and tokens of each document of a batch, as a trainer finds them."""
    for part in batch.microbatches:
        of_pieces = iter(part.columns_K["lang"])
        for source, (start, stop) in zip(
            part.sources_D.tolist(), pairwise(part.cu_seqlens.tolist()), strict=True
        ):
            if source >= 0:  # everything outside a document is padding
                yield bytes(next(of_pieces)).decode(), stop - start


def cost_of(batch):
    return sum(n * (DEAR if lang == "de" else 1.0) for lang, n in documents_of(batch))


def digests_of(steps):
    return [combined(map(batch_digest, batches)) for batches in steps]


def test_ranks_are_even_by_a_cost_that_reads_a_tag_and_have_the_samples_that_any_cost_gives(
    mix, tmp_path
):
    by_tag = local_steps(tmp_path, balanced_by(mix, cost="dear_german"))
    by_length = local_steps(tmp_path, mix)

    assert digests_of(by_tag) == digests_of(by_length)
    off_by_tag, off_by_length = (
        sum(np.ptp([cost_of(batch) for batch in batches]) for batches in steps)
        for steps in (by_tag, by_length)
    )
    assert off_by_tag < off_by_length / 3


def test_a_strategy_deals_rows_by_a_tag_that_it_reads_itself(mix, tmp_path):
    steps = local_steps(tmp_path, balanced_by(mix, strategy="german_first"))

    begins = [
        [
            bytes(part.columns_K["lang"][0]).decode()
            for batch in batches
            for part in batch.microbatches
        ]
        for batches in zip(*steps, strict=True)
    ]
    german = [of_rank.count("de") for of_rank in begins]
    assert german[0] > 2 * german[1]
    assert digests_of(steps) == digests_of(local_steps(tmp_path, mix))


def test_the_journal_has_nothing_of_tags_and_a_run_goes_on_under_another_cost(mix, tmp_path):
    by_tag = balanced_by(mix, cost="dear_german")
    for name, each in (("tags", by_tag), ("plain", mix)):
        local_steps(tmp_path, each, run_dir=tmp_path / name, num_steps=STEPS)
    journals = [(tmp_path / name / JOURNAL_NAME).read_bytes() for name in ("tags", "plain")]
    assert journals[0] == journals[1]

    with LocalPlane(a_spec(tmp_path, by_tag)) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(2)]
        whole = [[client.next_batch() for client in clients] for _ in range(STEPS)]
        state = clients[0].state_dict()
        whole += [[client.next_batch() for client in clients] for _ in range(STEPS)]
    resumed = local_steps(tmp_path, by_tag, state=state)
    assert [list(map(batch_digest, each)) for each in resumed] == [
        list(map(batch_digest, each)) for each in whole[STEPS:]
    ]
    assert digests_of(local_steps(tmp_path, mix, state=state)) == digests_of(resumed)


def test_a_cost_that_reads_what_batches_have_not_is_refused_before_anything_is_read(mix, tmp_path):
    without = mix.model_copy(update={"batch": mix.batch.model_copy(update={"columns": ()})})

    with pytest.raises(
        ConfigError,
        match=r"balance\.cost 'dear_german' reads 'columns\.lang', and "
        r"batches have no column of whole samples; name 'lang' under batch\.columns",
    ):
        LocalPlane(a_spec(tmp_path, balanced_by(without, cost="dear_german")))


def test_a_plan_that_is_foretold_is_costed_by_tags(mix, tmp_path):
    mix = balanced_by(mix, cost="dear_german")
    rehearsal = Rehearsal(a_spec(tmp_path, mix, num_steps=3))
    for plan in rehearsal.plans():
        costs = [cost_of(batch) for batch in rehearsal.build(plan)]
        figures = figures_of(mix, plan, 2, rehearsal.tags_of(plan))

        assert figures.imbalance == pytest.approx(max(costs) / np.mean(costs))
        # Each of the two ranks has half of the rows: in order they are further apart than balanced.
        assert figures.imbalance < figures.imbalance_before <= 2
        with pytest.raises(ConfigError, match=r"failed on .*'columns\.lang'.*load them"):
            figures_of(mix, plan, 2)
    rehearsal.close()


# Processes start one after another, each in up to a minute on a busy machine.
@pytest.mark.timeout(600)
@pytest.mark.ray
@pytest.mark.slow
def test_two_ranks_through_ray_have_the_rows_of_a_local_run_though_loader_and_planner_are_killed(
    mix, tmp_path
):
    pytest.importorskip("ray")
    mix = balanced_by(mix, cost="dear_german")
    with LocalPlane(a_spec(tmp_path, mix)) as plane:
        local = steps_of(plane, 3 * STEPS)

    runtime = {"kind": "ray", "loaders": 2, "constructors": 2}
    spread = mix.model_copy(update={"runtime": mix.runtime.model_copy(update=runtime)})
    with open_plane(a_spec(tmp_path, spread, run_dir=tmp_path / "run")) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(2)]
        steps = []
        for role in ("loader-1", "planner", None):
            steps += [[client.next_batch(120) for client in clients] for _ in range(STEPS)]
            if role is not None:
                os.kill(plane.pids()[role], signal.SIGKILL)
        holders = plane.holders()

    assert [holders[role] for role in ("loader-1", "planner")] == ["loader-1+1", "planner+1"]
    # Rank by rank, because rows are placed by the same cost and the same tags.
    assert [list(map(batch_digest, each)) for each in steps] == [
        list(map(batch_digest, each)) for each in local
    ]
