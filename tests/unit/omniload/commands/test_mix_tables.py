"""Tables of a mix of a thousand sources stay readable."""

from pathlib import Path

import numpy as np
import pytest

from omniload.commands.display import output
from omniload.commands.mix_tables import (
    SourceStats,
    Stats,
    print_stats,
    said_of_files,
    said_of_step,
    shares_table,
)
from omniload.mix.sources import SOURCE_TYPES
from omniload.source.kept_findings import FoundSource
from omniload.source.survey.documents import LengthHistogram
from omniload.source.survey.duplicates import Duplicates
from tests.support.plane.builders import a_mix


@pytest.mark.parametrize(
    ("sources", "rows", "last"), [(64, 64, "s063"), (1000, 65, "and 936 more: --json")]
)
def test_a_long_table_says_how_much_it_leaves_out(sources, rows, last, capsys):
    shares = shares_table(a_mix(sources=[f"s{i:03}" for i in range(sources)]))

    output().print(shares)

    assert len(shares.rows) == rows
    assert last in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stages", "columns", "said"), [(16, 17, ""), (1000, 17, "and at 984 more steps: --json")]
)
def test_a_table_of_many_stages_says_how_many_it_leaves_out(stages, columns, said):
    every = [{"from_step": step, "weights": {"web": 1, "code": 1}} for step in range(stages)]
    mix = a_mix(mix={"stages": every})

    shares = shares_table(mix)

    assert len(shares.columns) == columns
    assert str(shares.title).endswith(said or "token")


@pytest.mark.parametrize(
    ("rows", "micro_rows", "dp", "said"),
    [
        (8, 2, 1, "1 data-parallel rank, with 4 microbatches of 2 rows"),
        (8, 2, 2, "2 data-parallel ranks, each with 2 microbatches of 2 rows"),
        (8, 3, 2, "2 data-parallel ranks, each with 2 microbatches of up to 3 rows"),
        (8, 1, 8, "8 data-parallel ranks, each with 1 microbatch of 1 row"),
        (8, 4, 3, "3 data-parallel ranks, each with 1 microbatch of up to 4 rows"),
    ],
)
def test_a_step_is_told_with_the_shape_of_its_microbatches(rows, micro_rows, dp, said):
    mix = a_mix(rows=rows, micro_rows=micro_rows)

    assert said_of_step(mix, dp) == f"8 rows of 32 tokens over {said}"


def a_source_of_files(kind):
    sizes = {"units": 3, "records": 9, "size_bytes": 99, "tokens_per_record": 1.0}
    return FoundSource(name="web", format=kind, shards=3, looked=1, **sizes)


@pytest.mark.parametrize("kind", sorted(SOURCE_TYPES))
def test_columns_of_all_files_are_told_of_where_an_index_has_them(kind):
    knows = kind in {"arrow", "csv", "lance", "mds", "parquet"}
    said = "looked at the first records of 1 of 3 files"

    found = said_of_files([a_source_of_files(kind)])

    assert found == said + ("; of tables, at the columns of all" if knows else "")


def stats_of(num_sources, **changes):
    """Return the stats of sources with 10 documents of 8 tokens each."""
    lengths = LengthHistogram()
    lengths.add(np.full(10, 8))
    source = {"records": 10, "looked_at": 10, "bad": 0, "lengths": lengths, "epoch_tokens": 80}
    source |= {"steps_per_epoch": 1, "epochs": 1.0}
    source |= changes
    none_S = np.zeros(num_sources, np.int64)
    return Stats(
        steps=1,
        tokens_per_step=80.0,
        sources=[SourceStats(name=f"s{i:03}", **source) for i in range(num_sources)],
        duplicates=Duplicates(
            one_in=1, documents_S=none_S + 10, repeated_S=none_S, elsewhere_S=none_S, pairs=()
        ),
        rate=None,
    )


@pytest.mark.parametrize(
    ("sources", "more"), [(64, ""), (65, "and 1 more: --json"), (1000, "and 936 more: --json")]
)
def test_stats_list_as_many_sources_in_either_table_and_say_how_many_more_there_are(
    sources, more, capsys
):
    print_stats(output(), Path("mix.yaml"), stats_of(sources))

    printed = capsys.readouterr().out
    assert printed.count("s063") == 2
    assert printed.count("s064") == 0
    assert printed.count("more: --json") == (2 if more else 0)
    assert more in printed


@pytest.mark.parametrize(
    ("sources", "more"), [(10, ""), (1000, "and so of 990 more sources: --json")]
)
def test_the_same_warning_is_given_of_a_few_sources(sources, more, capsys):
    print_stats(output(), Path("mix.yaml"), stats_of(sources, epochs=9.0, bad=1))

    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("is gone through 9.0 times") == 10
    assert printed.count("cannot be decoded") == 10
    assert printed.count("more sources: --json") == (2 if more else 0)
    assert more in printed


@pytest.mark.parametrize(
    ("skips", "remedy"),
    [(False, "leave them out with on_error"), (True, "they are left out, as its on_error says")],
)
def test_a_source_that_skips_is_not_told_to(skips, remedy, capsys):
    print_stats(output(), Path("mix.yaml"), stats_of(1, bad=3, skips=skips))

    assert remedy in " ".join(capsys.readouterr().out.split())
