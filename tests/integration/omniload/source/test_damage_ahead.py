"""A damaged part of a file costs the steps that need it, and no earlier step, however far it was read ahead."""

import json
import logging
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import omniload
from omniload.commands.runs.doctor import doctor

GROUPS, ROWS, DAMAGED = 40, 64, 30
MIX = """
version: 2
seed: 3
sources: {web: {type: parquet, path: a.parquet, tokens: ids, shuffle: {method: none}%s}}
mix: {stages: [{from_step: 0, weights: {web: 1}}]}
pack: {length: 256}
batch: {tokens: 1024, micro_tokens: 512}
%s"""


def written(folder, *, is_damaged, on_error="", more=""):
    """Write documents that repeat their own number, in row groups, one of which may be damaged."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    lengths = rng.integers(20, 200, GROUPS * ROWS)
    documents = [[number] * length for number, length in enumerate(lengths.tolist())]
    path = folder / "a.parquet"
    pq.write_table(pa.table({"ids": documents}), path, row_group_size=ROWS, compression="zstd")
    if is_damaged:
        column = pq.read_metadata(path).row_group(DAMAGED).column(0)
        data = bytearray(path.read_bytes())
        at = column.dictionary_page_offset + 30
        data[at : at + 30] = b"\xff" * 30
        path.write_bytes(data)
    (folder / "mix.yaml").write_text(MIX % (on_error, more))
    return folder / "mix.yaml"


def steps_of(mix, runtime):
    """Return the tokens of every step before the first one that needs the damaged group, and the error of the run."""
    steps = []
    with omniload.open(mix, runtime=runtime, arrays="numpy", rank=0, world_size=1) as loader:
        try:
            for batch in loader:
                steps.append(batch.tokens.copy())
                if (batch.tokens // ROWS == DAMAGED).any():
                    break
        except omniload.IntegrityError as error:
            return steps, str(error)
    return steps, ""


def require_all_before(folder, runtime, more=""):
    whole, _ = steps_of(written(folder / "whole", is_damaged=False, more=more), "local")

    found, error = steps_of(written(folder / "damaged", is_damaged=True, more=more), runtime)

    assert f"row group {DAMAGED}" in error
    assert len(found) == len(whole) - 1 > 200
    assert all(np.array_equal(a, b) for a, b in zip(found, whole, strict=False))


def test_every_step_before_the_first_that_needs_it_is_given(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        require_all_before(tmp_path, "local")

    told = [said for said in caplog.messages if "the run ends before the first step that" in said]
    assert len(told) == 1
    assert f"row group {DAMAGED}" in told[0]


def test_it_is_so_where_several_read_the_source(tmp_path):
    require_all_before(tmp_path, "local", more="loader: {readers: {web: 3}}\n")


def test_a_look_at_the_run_tells_of_it_while_there_are_steps_before_it(tmp_path):
    mix, run = written(tmp_path / "damaged", is_damaged=True), tmp_path / "run"

    with omniload.open(
        mix, runtime="local", arrays="numpy", rank=0, world_size=1, run_dir=run
    ) as loader:
        for _ in zip(range(100), loader, strict=False):
            pass
        until_s, found = time.monotonic() + 30, []
        while not found:
            assert time.monotonic() < until_s, "a status is written each second"
            shown = CliRunner().invoke(doctor, [str(run), "--seconds", "0", "--json"])
            findings = json.loads(shown.stdout)["findings"]
            found = [
                each for each in findings if each["what"].startswith("web cannot be read further")
            ]
        assert f"row group {DAMAGED}" in found[0]["seen"]
        assert "omniload mix skip RUN --shard" in found[0]["do"]


@pytest.mark.ray
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_it_is_so_through_ray(tmp_path):
    require_all_before(tmp_path, "ray")
