"""Bad records of every kind in a run whose loader is killed: the steps and the end of a run that nothing broke."""

import os
import signal
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.base.config import parse_yaml
from omniload.base.errors import IntegrityError
from omniload.batch.digest import batch_digest
from omniload.client import Client
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing_behind")]

ROWS, LIMIT = 240, 30
MIX = """
version: 1
seed: 3
sources:
  columns:
    type: parquet
    path: "*.parquet"
    tokens: ids
    columns: {loss_mask: mask, scores: score}
    on_error: {policy: skip, limit: 30}
  matrix: {type: numpy, path: "*.npy", on_error: {policy: skip, limit: 30}}
  documents: {type: megatron, path: "*.bin", on_error: {policy: skip, limit: 30}}
mix: {stages: [{from_step: 0, weights: {columns: 4, matrix: 1, documents: 1}}]}
pack: {length: 64, lookahead_rows: 0}
batch: {tokens: 64, micro_tokens: 64, columns: [scores]}
runtime: {kind: KIND, loaders: 1, prefetch_steps: 2}
"""


def spoilt(rows, rng):
    """Return columns in which every fifth row has one fault or another."""
    ids = [rng.integers(0, 90, int(rng.integers(4, 12))).tolist() for _ in range(rows)]
    masks, scores = [[1] * len(each) for each in ids], [[0.5]] * rows
    for i in range(0, rows, 5):
        match i // 5 % 7:
            case 0:
                ids[i][1] = -1
            case 1:
                ids[i][2] = 2**40
            case 2:
                ids[i][0] = None
            case 3:
                masks[i] = [1]
            case 4:
                masks[i][0] = 7
            case 5:
                masks[i][3] = None
            case 6:
                scores[i] = [None]
    return {"ids": ids, "mask": masks, "score": scores}


def write_sources(folder):
    rng = np.random.default_rng(5)
    for part in range(3):
        table = pa.table(spoilt(ROWS, rng))
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=16)
    matrix = rng.integers(1, 90, (ROWS, 8))
    matrix[::40, 3] = -4
    np.save(folder / "rows.npy", matrix)
    documents = rng.integers(1, 90, (ROWS, 8)).astype(np.int32)
    documents[::40, 0] = -9
    documents.tofile(folder / "a.bin")
    lengths, starts = np.full(ROWS, 8, np.int32), np.arange(ROWS, dtype=np.int64) * 32
    (folder / "a.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 4, ROWS, ROWS + 1)
        + lengths.tobytes()
        + starts.tobytes()
        + np.arange(ROWS + 1, dtype=np.int64).tobytes()
    )


def a_spec(folder, kind):
    mix = parse_yaml(MIX.replace("KIND", kind), MixConfig, name="mix.yaml")
    return PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(), run_dir=folder / kind)


def to_its_end(client, between):
    """Return the digests of all steps, and what ended them; ``between`` is called before each."""
    steps = []
    try:
        while True:
            between(len(steps))
            steps.append(batch_digest(client.next_batch()))
    except IntegrityError as error:
        return steps, str(error).split("; what is wrong")[0]


@pytest.mark.timeout(300)  # processes are started one after the other, each in up to a minute
def test_a_run_whose_loader_is_killed_ends_at_the_bad_record_that_an_unbroken_one_ends_at(tmp_path):
    write_sources(tmp_path)
    with LocalPlane(a_spec(tmp_path, "local")) as plane, Client(plane.handle(0)) as client:
        whole, said = to_its_end(client, lambda _: None)

    killed = []
    with open_plane(a_spec(tmp_path, "ray")) as plane, Client(plane.handle(0)) as client:

        def kill(step):
            if step in (2, len(whole) - 1):
                killed.append(plane.pids()["loader-0"])
                os.kill(killed[-1], signal.SIGKILL)

        broken = to_its_end(client, kill)

    assert len(whole) > 6
    assert len(set(killed)) == 2, "the first of them was replaced"
    assert broken == (whole, said)
    assert f"sources.columns: {LIMIT + 1} records" in said
    place = said.rpartition(", the last of them ")[2]
    assert place.startswith(str(tmp_path))
    assert int(place.partition(": record ")[2].split(",")[0]) % 5 == 0
