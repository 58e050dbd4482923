"""The table of starts: medians, ranges, and ratios taken within a round."""

from benchmarks.startup.containerd import WAYS, Took, starts_table


def test_a_ratio_is_taken_within_a_round_and_its_median_is_told():
    samples = {way: [] for way in WAYS}
    for pulled_s, lazy_s in ((10.0, 5.0), (20.0, 2.0), (40.0, 20.0)):
        samples["pulled"].append(Took(pulled_s - 1, 1.0, 100_000_000))
        for way in WAYS[1:]:
            samples[way].append(Took(lazy_s / 2, lazy_s / 2, 5_500_000))

    rows = {row[0]: row for row in starts_table(samples).rows}

    assert tuple(rows) == WAYS
    assert rows["pulled"][1:] == ("19.00", "1.00", "20.00", "10.00 to 40.00", "1.00", "100.0")
    assert rows["lazy"][1:] == ("2.50", "2.50", "5.00", "2.00 to 20.00", "0.50", "5.5")
    assert rows["here"][1:] == rows["traced"][1:] == rows["lazy"][1:]


def test_one_round_is_enough_for_a_table():
    samples = {way: [Took(1.0, 2.0, 3_000_000)] for way in WAYS}

    table = starts_table(samples)

    assert {row[5] for row in table.rows} == {"1.00"}
    assert {row[4] for row in table.rows} == {"3.00 to 3.00"}
