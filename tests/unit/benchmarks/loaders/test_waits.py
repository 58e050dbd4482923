"""The table of waits: percentiles of each loader, and what its steps take over those in the process."""

from benchmarks.loaders.waits import IN_PROCESS, NOTHING, Steps, table_of


def steps_of(wait_ms, compute_ms, count=100, last_ms=0.0):
    """So many equal steps, the last of which waits longer."""
    waits_s = [wait_ms / 1e3] * (count - 1) + [(wait_ms + last_ms) / 1e3]
    return Steps(waits_s=waits_s, wholes_s=[each + compute_ms / 1e3 for each in waits_s])


def test_steps_are_compared_with_those_in_the_process():
    table = table_of(
        50,
        {
            NOTHING: [steps_of(0, 48)],
            IN_PROCESS: [steps_of(1, 49), steps_of(1, 49)],
            "elsewhere": [steps_of(3, 49.5)],
        },
    )

    assert table.rows == (
        (NOTHING, "0.00", "0.00", "48.0", "48.0", "-4.0%", "-4.0%"),
        (IN_PROCESS, "1.00", "1.00", "50.0", "50.0", "+0.0%", "+0.0%"),
        ("elsewhere", "3.00", "3.00", "52.5", "52.5", "+5.0%", "+5.0%"),
    )
    assert len(table.columns) == len(table.rows[0])
    assert "50 ms of computing; 200 of each" in table.caption


def test_a_rare_long_wait_shows_in_the_last_percentile_alone():
    (row,) = table_of(50, {IN_PROCESS: [steps_of(1, 49, last_ms=100)]}).rows

    assert row[1:5] == ("1.00", "2.00", "50.0", "51.0")
