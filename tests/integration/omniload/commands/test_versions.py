"""Runs over a data set that others keep writing: a run keeps one version from start to end."""

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.actors.versions import with_versions
from omniload.base.errors import StateError
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.builders import a_mix

STEPS = 6


@pytest.fixture
def root(tmp_path):
    lance.write_dataset(texts(0, 400), tmp_path / "own.lance", max_rows_per_file=150)
    return tmp_path / "own.lance"


def texts(first, count):
    return pa.table({"text": [f"row {i} {'x' * (i % 31)}" for i in range(first, first + count)]})


def a_spec(root: Path, state=None, **changes):
    source = {"type": "lance", "path": "own.lance", "text": "text", "unit": 1_000, **changes}
    mix = a_mix(sources={"web": source}, tokenizer={"type": "bytes"})
    return PlaneSpec(
        mix=mix, base_dir=root.parent, tree=ClientPlaceTree.of(), state=state, num_steps=STEPS
    )


def steps(spec, stop=STEPS):
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        taken = [client.next_batch() for _ in range(stop - client.next_step)]
        rows = [[each.tokens_RT.tolist() for each in batch.microbatches] for batch in taken]
        return rows, client.state_dict()


def test_a_resume_reads_the_version_that_the_run_began_with(root):
    whole, _ = steps(a_spec(root))
    first, state = steps(a_spec(root), stop=3)
    lance.dataset(root).insert(texts(400, 100))
    lance.dataset(root).delete("text like 'row 1%'")

    rest, _ = steps(a_spec(root, state))

    assert first + rest == whole
    assert steps(a_spec(root))[0] != whole


def test_a_version_may_be_named_or_left_out_at_a_resume(root):
    lance.dataset(root).insert(texts(400, 100))
    whole, _ = steps(a_spec(root, version=1))
    _, state = steps(a_spec(root, version=1), stop=3)

    assert steps(a_spec(root, state))[0] == whole[3:]
    with pytest.raises(StateError, match=r"sources\.web"):
        steps(a_spec(root, state, version=2))


def test_every_process_of_a_run_is_told_the_version_that_was_the_newest(root):
    named = with_versions(a_spec(root))
    lance.dataset(root).insert(texts(400, 100))

    assert named.mix.sources["web"].version == (1,)
    assert with_versions(named) is named
    assert with_versions(a_spec(root)).mix.sources["web"].version == (2,)


def test_a_mix_without_data_sets_of_versions_stays_as_it_is(root):
    spec = PlaneSpec(mix=a_mix(), base_dir=root.parent, tree=ClientPlaceTree.of())

    assert with_versions(spec) is spec
