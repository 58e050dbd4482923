"""What the checkpoint benchmark works out from its seconds."""

from click.testing import CliRunner

from benchmarks.fusefs.checkpoint import Work, main, tables


def a_work(**changes):
    given = {"size_mib": 64, "ranks": 4, "tensors": 2, "stripes": 4}
    return Work(**given | {"stream_mb": 5.0, "datanodes": 2} | changes)


def test_the_tensors_of_all_ranks_are_the_checkpoint():
    assert a_work().size_bytes == 64 << 20
    assert a_work().elements * 4 * 4 * 2 == 64 << 20
    assert a_work().files["striping"] == {"unit": 1 << 20, "count": 4}


def test_gains_are_over_the_plain_way_of_the_same_run():
    seconds = {"save plain": 40.0, "load plain": 30.0, "save mount": 20.0, "load mount": 10.0}
    seconds |= {"save striped": 16.0, "load striped": 30.0}
    loads = {"whole": [2.0, 4.0], "mapped": [3.0, 2.5]}

    ways, others = tables(a_work(), seconds, loads, {"write": 18.0, "read": 21.0})

    assert [row[4] for row in ways.rows] == ["1.00", "1.00", "2.00", "3.00", "2.50", "1.00"]
    assert [row[1] for row in others.rows[2:]] == ["1.25", "0.90", "1.05"]


def test_sizes_are_flags():
    shown = CliRunner().invoke(main, ["--help"]).output

    assert all(flag in shown for flag in ("--size-mib", "--ranks", "--stream-mb", "--stripes"))
