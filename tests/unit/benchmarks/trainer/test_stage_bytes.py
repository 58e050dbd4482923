"""What came to the stages of a pipeline, as a table."""

from benchmarks.trainer.stage_bytes import table_of


def test_each_stage_is_the_mean_of_its_ranks_but_for_the_one_that_fetches():
    ranks = [
        {"stage": stage, "bytes": came, "whole": 0.0}
        for stage, came in ((0, 0.0), (0, 3000.0), (1, 50.0), (1, 150.0), (2, 2000.0), (2, 2000.0))
    ]
    ranks[0]["whole"] = 4000.0

    found = table_of("text", ranks).rows

    assert found == (
        ("first", "4", "3.0", "0.750"),
        ("middle", "4", "0.1", "0.025"),
        ("last", "4", "2.0", "0.500"),
    )
