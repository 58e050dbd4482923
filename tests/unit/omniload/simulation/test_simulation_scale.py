"""Small planes that are measured for a job: their size, and the properties of the job that they keep."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from omniload.simulation.scale import Reference, lengths_of, with_sources
from tests.support.plane.builders import a_mix
from tests.support.plane.profiles import a_job, a_profile, some_costs


def a_large_mix(tokens=1 << 20, length=1_024, sources=2):
    mix = a_mix(rows=tokens // length, length=length, mix={"stop": "never"})
    return with_sources(mix, sources)


@pytest.mark.parametrize(
    ("length", "ranks", "tokens"),
    [(1_024, 4, 8 << 10), (1 << 16, 1, 1 << 16), (1 << 15, 2, 1 << 16), (3_000, 4, 12_000)],
)
def test_a_step_is_small_in_whole_rows_of_the_job_and_of_fewer_ranks_where_rows_are_long(
    length, ranks, tokens
):
    reference = Reference.few(a_job(a_large_mix(1 << 20, length=length), ranks=4), a_profile())

    assert (reference.tokens, reference.row_length) == (tokens, length)
    assert reference.ranks == ranks


@pytest.mark.parametrize(("ranks", "expected"), [(1, 1), (6, 6), (64, 8)])
def test_it_has_the_ranks_of_a_constructor_of_the_job_up_to_some(tmp_path: Path, ranks, expected):
    spec = Reference.few(a_job(a_large_mix(), ranks=ranks), a_profile()).written(tmp_path)

    assert spec.tree.size_of("dp") == expected
    assert spec.mix.batch.tokens == expected * spec.mix.batch.micro_tokens


def test_one_has_many_tokens_a_step_and_one_few_steps_a_window(tmp_path: Path):
    job, profile = a_job(a_large_mix()), a_profile()
    few, short, many = (
        kind(job, profile).written(tmp_path).mix
        for kind in (Reference.few, Reference.short, Reference.many)
    )

    assert (few.batch.tokens, short.batch.tokens, many.batch.tokens) == (8 << 10, 8 << 10, 64 << 10)
    assert short.steps_at_once == few.steps_at_once / 4 == many.steps_at_once / 4


@pytest.mark.parametrize(("units", "rows"), [(1, 100), (4, 25)])
def test_units_of_the_one_with_blocks_have_as_many_samples_as_those_of_the_job(
    tmp_path: Path, units, rows
):
    source = some_costs(block_positions=100, block_units=units, lengths=(1_000,) * 60)
    profile = a_profile(sources={"web": source, "code": source})

    Reference.many(a_job(a_large_mix()), profile).written(tmp_path)

    assert pq.ParquetFile(tmp_path / "samples.parquet").metadata.row_group(0).num_rows == rows


@pytest.mark.parametrize("kind", [Reference.few, Reference.short])
@pytest.mark.parametrize("length", [60, 900])
def test_a_source_of_few_tokens_a_step_is_one_block_whatever_those_of_the_job_are(
    tmp_path: Path, kind, length
):
    each = {"counts": (1,) * 512, "lengths": (length,) * 512}
    source = some_costs(block_positions=100, block_units=4, **each)
    profile = a_profile(sources={f"s{n}": source for n in range(8)})

    kind(a_job(a_large_mix()), profile).written(tmp_path)

    written = pq.ParquetFile(tmp_path / "samples.parquet")
    assert written.metadata.num_row_groups == 1
    tokens = sum(map(len, written.read()["tokens"]))
    assert 0.7 * (1 << 20) <= tokens <= 1 << 20


def test_units_of_a_few_short_samples_are_not_kept_by_the_thousand(tmp_path: Path):
    source = some_costs(block_positions=100, block_units=50, lengths=(70,) * 60)
    profile = a_profile(sources={"web": source, "code": source})

    Reference.many(a_job(a_large_mix()), profile).written(tmp_path)

    assert 1 < pq.ParquetFile(tmp_path / "samples.parquet").metadata.num_row_groups <= 256


def test_sources_do_not_come_to_their_next_block_in_the_same_step(tmp_path: Path):
    spec = Reference.few(a_job(a_large_mix(sources=4)), a_profile()).written(tmp_path)

    assert len(set(spec.mix.mix.stages[0].weights.values())) == 4


@pytest.mark.parametrize(("sources", "expected"), [(2, 2), (7, 7), (200, 32)])
def test_it_has_as_many_sources_up_to_some(sources, expected):
    mix = a_large_mix(sources=sources)
    job = a_job(mix, originals=("web",) * sources)

    assert Reference.few(job, a_profile()).sources == expected


def test_its_samples_are_as_long_as_those_of_every_source_and_fit_a_row(tmp_path: Path):
    profile = a_profile(
        sources={
            "web": some_costs(counts=[1, 1], lengths=[5, 5_000]),
            "code": some_costs(counts=[1], lengths=[7]),
        }
    )
    reference = Reference.few(a_job(a_large_mix()), profile)

    spec = reference.written(tmp_path)

    assert lengths_of(profile, 1_024) == reference.lengths == (5, 1_024, 7)
    written = pq.read_table(tmp_path / "samples.parquet")["tokens"]
    assert [len(tokens) for tokens in written.slice(0, 6)] == [5, 1_024, 7] * 2
    assert spec.tree.size_of("dp") == 1
    assert spec.mix.batch.tokens == reference.tokens
    assert len(spec.mix.names) == 2
