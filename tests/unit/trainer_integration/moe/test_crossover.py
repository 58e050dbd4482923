import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from trainer_integration.moe.parallel.crossover_table import (
    Crossover,
    Measured,
    last_below,
    read_crossover,
)


def a_table(**changes):
    rows = tuple(
        Measured(
            top_k=k,
            seconds={"a2a": a2a, "ag_rs": 2.5},
            sent_bytes={"a2a": 100 * k, "ag_rs": 200},
        )
        for k, a2a in ((1, 1.0), (2, 2.0), (3, 2.4), (4, 3.0), (5, 2.0))
    )
    given = {"sp": 2, "tokens": 64, "dim": 8, "hidden": 8, "num_experts": 8, "rows": rows}
    return Crossover(**(given | changes))


def test_the_crossover_is_the_last_number_before_the_first_that_is_slower():
    assert (a_table().by_time, a_table().by_bytes) == (3, 2)


@given(st.dictionaries(st.integers(1, 9), st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_up_to_the_crossover_none_is_dearer_and_the_next_is(costs):
    found = last_below({k: {"a2a": a, "ag_rs": b} for k, (a, b) in costs.items()})

    assert all(costs[k][0] <= costs[k][1] for k in costs if k <= found)
    later = sorted(k for k in costs if k > found)
    assert not later or costs[later[0]][0] > costs[later[0]][1]


def test_a_file_is_read_back_for_as_many_ranks_and_refused_for_others(tmp_path):
    file = tmp_path / "crossover.json"
    file.write_text(a_table().model_dump_json())

    assert read_crossover(file, sp=2) == a_table()
    with pytest.raises(ConfigError, match="measured with 2 ranks, and sp is 4"):
        read_crossover(file, sp=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "is no measured crossover of this release"),
        ('{"version": 2}', "is no measured crossover of this release"),
        (
            a_table().model_dump_json().replace('"a2a":1.0,', ""),
            "is no measured crossover of this release",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_with_what_writes_one(tmp_path, text, said):
    file = tmp_path / "crossover.json"
    if text is not None:
        file.write_text(text)

    with pytest.raises(ConfigError, match=rf"{said}.*omniload train crossover"):
        read_crossover(file, sp=2)
