"""Drawn runs: records of any lengths, and everything that must not matter to the steps of a run."""

from typing import Any

from hypothesis import strategies as st

__all__ = ["epochs", "records", "worlds"]

records = st.lists(st.integers(1, 50), min_size=1, max_size=3) | st.just([])
"""Lengths of the samples of one record."""
epochs = st.lists(records, max_size=8).map(lambda rows: [[9], *rows])
"""Records of a source. At least one gives a sample that fits a row; other tests cover sources without any."""


def worlds(**others: list[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw ranks, roles, delays and losses; ``others`` lists other values, or values of other settings."""
    shares = {"dp": [1, 2, 4], "repeat_share": [0.0, 0.3], "shadows": [0, 1], "moves": [0, 3]}
    lost = {"kills": [0, 1, 3], "constructor_kills": [0, 1, 3], "planner_kills": [0, 1, 3]}
    counts = {"num_loaders": [1, 2, 3], "num_constructors": [1, 2, 3, 4]}
    values = counts | shares | lost | others
    drawn = {name: st.sampled_from(each) for name, each in values.items()}
    return st.fixed_dictionaries({"seed": st.integers(0, 1 << 30), **drawn})
