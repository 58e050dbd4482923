"""Records that were skipped are counted one by one, and told of a few times."""

import logging

from omniload.actors.heartbeat_board import Figures
from omniload.actors.roles.planner_metrics import count_skipped
from omniload.machine.status import SKIPPED

_LOGGER = "omniload.actors.roles.planner_metrics"


def test_ten_thousand_reads_with_a_bad_record_each_are_a_dozen_lines_and_the_last_total_is_a_figure(
    caplog,
):
    figures = Figures()

    with caplog.at_level(logging.WARNING, logger=_LOGGER):
        for _ in range(10_000):
            count_skipped("web", 1, figures)

    assert figures.read()[SKIPPED + "web"] == 10_000
    assert len(caplog.messages) == 14  # at 1, 2, 4, ... 8,192
    assert caplog.messages[0].startswith("source web: ")
    assert "skipped once so far; told again at 2" in caplog.messages[0]
    assert "8192 times so far; told again at 16384" in caplog.messages[-1]


def test_each_source_is_told_of_by_itself_and_a_read_without_a_bad_record_is_not(caplog):
    figures = Figures()

    with caplog.at_level(logging.WARNING, logger=_LOGGER):
        count_skipped("web", 5, figures)
        count_skipped("web", 2, figures)
        count_skipped("code", 0, figures)
        count_skipped("books", 1, figures)

    assert [message.split(":")[0] for message in caplog.messages] == ["source web", "source books"]
    assert "5 times so far; told again at 8" in caplog.messages[0]
