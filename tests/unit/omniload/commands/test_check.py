"""Tables of a mix of a thousand sources stay readable."""

import pytest

from omniload.commands.check import shares_table
from omniload.commands.display import output
from tests.support.plane.builders import a_mix


@pytest.mark.parametrize(
    ("sources", "rows", "last"), [(64, 64, "s063"), (1000, 65, "and 936 more: --json")]
)
def test_a_long_table_says_how_much_it_leaves_out(sources, rows, last, capsys):
    shares = shares_table(a_mix(sources=[f"s{i:03}" for i in range(sources)]))

    output().print(shares)

    assert shares.row_count == rows
    assert last in capsys.readouterr().out
