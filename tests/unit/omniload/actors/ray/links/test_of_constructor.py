"""The links of a constructor to source loaders: for each source, the latest hand-over counts."""

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.links.of_constructor import LoaderHolders, Loaders, Serving

LOADERS = Loaders(
    of={0: "first", 1: "first"},
    names={"first": "loader-0"},
    roles={0: "loader-0", 1: "loader-0"},
    turn=4,
    limit_s=1.0,
)


def test_a_constructor_says_which_hand_over_it_knows_of_and_hears_no_older_news():
    holders = LoaderHolders(LOADERS)

    holders.replace(Serving(sources=(1,), actor="second", name="loader-1", role="loader-1", turn=7))
    holders.replace(
        Serving(sources=(0, 1), actor="third", name="loader-0+3", role="loader-0", turn=6)
    )

    assert holders.turns((0, 1)) == (6, 7)
    assert holders.names() == ("loader-0+3", "loader-1")


def test_of_a_source_that_nobody_has_told_of_a_constructor_knows_no_hand_over():
    holders = LoaderHolders(LOADERS)

    assert holders.turns((0, 2)) == (4, -1)
