"""Rows of token ids, masks and scores with any damage: each is a sample as written, or a counted bad record."""

import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from omniload.mix.config import OnError
from omniload.mix.sources import ArrowSource, ParquetSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

LARGEST, LARGEST_SCORE = 2**31 - 1, float(np.finfo(np.float32).max)
ids = st.one_of(
    st.integers(0, 5), st.sampled_from([LARGEST, LARGEST + 1, 2**32, 2**63 - 1, -1, -(2**63), None])
)
cells = st.one_of(st.none(), st.lists(ids, max_size=4))
masks = st.one_of(
    st.none(), st.lists(st.sampled_from([0, 1, 1, 1, 2, -1, 2**40, None]), max_size=4)
)
numbers = st.one_of(
    st.sampled_from([0.5, -3.0, 3e38, 1e39, -1e300, math.inf, -math.inf, math.nan, None])
)
scores = st.one_of(st.none(), st.lists(numbers, max_size=3))
kinds = st.sampled_from([pa.list_(pa.int64()), pa.large_list(pa.int64())])


@st.composite
def rows(draw):
    """Draw a row whose mask mostly has the length of its ids."""
    found = draw(cells)
    as_long = found is not None and draw(st.booleans())
    mask = [1] * len(found) if as_long else draw(masks)
    return found, mask, draw(scores)


def is_sound(found, mask, values):
    return (
        None not in (found, mask, values)
        and all(each is not None and 0 <= each <= LARGEST for each in found)
        and len(mask) == len(found)
        and all(each in (0, 1) for each in mask)
        and all(
            each is not None and not (math.isfinite(each) and abs(each) > LARGEST_SCORE)
            for each in values
        )
    )


def written(folder, table, kind, size):
    columns = {"loss_mask": "mask", "scores": "scores"}
    name = {"parquet": "a.parquet", "arrow": "a.arrow"}[kind]
    more = {"tokens": "ids", "columns": columns, "on_error": OnError(policy="skip", limit=10**6)}
    if kind == "parquet":
        pq.write_table(table, folder / name, row_group_size=size)
        return ParquetSource(type=kind, path=name, **more)
    with pa.OSFile(str(folder / name), "wb") as out, pa.ipc.new_file(out, table.schema) as to:
        to.write_table(table, max_chunksize=size)
    return ArrowSource(type=kind, path=name, **more)


def as_shown(tokens, mask, values):
    """Return the values of a sample in a comparable form, because NaN does not equal itself."""
    return (*map(int, tokens), "|", *map(bool, mask), "|", *map(str, np.float32(list(values))))


@given(
    st.lists(rows(), min_size=1, max_size=12),
    kinds,
    kinds,
    st.sampled_from(["parquet", "arrow"]),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_what_is_sound_comes_as_it_is_written_and_all_else_is_counted(
    tmp_path_factory, given_rows, of_ids, of_masks, kind, size, cut
):
    columns = [list(column) for column in zip(*given_rows, strict=True)]
    table = pa.table(
        {
            "ids": pa.array(columns[0], of_ids),
            "mask": pa.array(columns[1], of_masks),
            "scores": pa.array(columns[2], pa.list_(pa.float64())),
        }
    )
    # The rest of a slice has offsets that do not begin at 0.
    table, left = table.slice(min(cut, len(table) - 1)), given_rows[min(cut, len(given_rows) - 1) :]
    folder = tmp_path_factory.mktemp("columns")
    source = open_source(
        SourceSpec("web", written(folder, table, kind, size), seed=1, base_dir=folder)
    )

    block = source.read(0, len(left))

    sound = [row for row in left if is_sound(*row)]
    assert block.skipped == len(left) - len(sound)
    numbers_of_bad = {
        int(place.rpartition("record ")[2].split(",")[0]) for place in block.table.places
    }
    assert numbers_of_bad == {i for i, row in enumerate(left) if not is_sound(*row)}
    found = Counter(
        as_shown(block.tokens[i], block.others["loss_mask"][i], block.others["scores"][i])
        for i in range(len(block.tokens))
    )
    assert found == Counter(as_shown(*row) for row in sound if row[0])
