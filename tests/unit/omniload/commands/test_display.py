"""Bars, tables and excerpts on a terminal."""

import io
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pytest
from rich.console import Console
from rich.text import Text

from omniload.commands.display import (
    bar,
    colour_of,
    emit_json,
    excerpt,
    fitted_widths,
    lines_of,
    progress,
    row_bar,
    shows_colours,
    stacked_bar,
    table,
)


def printed(*things, width=80):
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(*things)
    return out.getvalue()


@pytest.mark.parametrize(
    ("part", "drawn"),
    [(0, ""), (0.5, "█████"), (1, "██████████"), (0.05, "▌"), (2, "██████████"), (-1, "")],
)
def test_a_bar_is_as_long_as_its_part(part, drawn):
    assert bar(part, 10) == drawn


def test_stacked_parts_are_rounded_together_so_that_the_whole_keeps_its_length():
    drawn = stacked_bar([1 / 3, 1 / 3, 1 / 3], 10)

    assert drawn.plain == "█" * 10
    assert [span.style for span in drawn.spans] == [colour_of(0), colour_of(1), colour_of(2)]


def test_a_part_too_small_for_a_cell_still_shows():
    assert stacked_bar([0.0, 0.001], 10).plain == "▏"
    assert stacked_bar([0.0, 0.0], 10).plain == ""


def test_a_row_is_drawn_in_proportion_with_padding_as_dots():
    drawn = row_bar([50, 25], [0, 3], 100, 8)

    assert drawn.plain == "████▓▓··"


def test_documents_of_one_source_next_to_each_other_can_be_told_apart():
    drawn = row_bar([2, 2, 2], [1, 1, 1], 6, 6)

    assert drawn.plain == "██▓▓██"
    assert {span.style.color.name for span in drawn.spans} == {colour_of(1)}


def test_sources_and_documents_of_a_row_can_be_told_apart_without_colours():
    drawn = row_bar([2, 2, 2, 1], [0, 1, 1, 27], 8, 8, in_colour=False)

    assert drawn.plain == "AAbbBBb·"


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"force_terminal": True, "color_system": "standard"}, True),
        ({"force_terminal": True, "color_system": "standard", "no_color": True}, False),
        ({"file": io.StringIO()}, False),
    ],
)
def test_a_pipe_shows_no_colours_nor_does_a_terminal_that_is_to_have_none(settings, shown):
    assert shows_colours(Console(**settings)) is shown


def test_a_row_without_documents_is_all_padding():
    assert row_bar([], [], 32, 4).plain == "····"


def test_markup_in_a_cell_is_shown_and_not_obeyed():
    assert "[red]x[/red]" in printed(table("t", [("text", False)], [["[red]x[/red]"]]))


def test_markup_in_a_title_or_a_heading_is_shown_and_not_obeyed():
    shown = printed(table("[/t]", [("runs/[red]a", False), ("[/]", True)], [["x", "1"]]))

    assert "[/t]" in shown
    assert "runs/[red]a" in shown
    assert "[/]" in shown


def test_numbers_are_set_flush_right():
    lines = printed(table("t", [("n", True)], [["1"], ["1000"]])).splitlines()

    assert "│    1 │" in lines[4]


def a_table(columns, cell):
    headings = [(f"heading{n}", True) for n in range(columns)]
    return table("t", headings, [[cell] * columns])


def test_a_table_that_fits_has_lines_between_its_columns():
    assert "│    6,144 │" in printed(a_table(7, "6,144"))


def test_a_table_too_wide_for_its_lines_is_set_without_them():
    shown = printed(a_table(8, "6,144"))

    assert "   6,144     6,144" in shown
    assert "│" not in shown


def test_a_table_too_wide_for_columns_is_a_paragraph_for_each_row_without_its_empty_cells():
    rows = [["rank-0", "", *["6,144"] * 7], ["rank-1", *["x"] * 8]]
    shown = printed(table("t", [(f"heading{n}", True) for n in range(9)], rows), width=40)

    assert shown.splitlines()[:4] == [
        "t",
        "heading0 rank-0  heading2 6,144",
        "  heading3 6,144  heading4 6,144",
        "  heading5 6,144  heading6 6,144",
    ]
    assert "heading0 rank-1  heading1 x" in shown


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_no_form_of_a_table_breaks_a_word_or_is_wider_than_the_terminal(width):
    said = "has built every step that was planned, and waits for the ranks"
    columns = [("role", False), ("does", False), ("buffer", True), ("rate", True)]
    shown = printed(
        table("t", columns, [["constructor-0", said, "62 steps", "1.5 MiB/s"]]), width=width
    )

    words = shown.replace("│", " ").split()
    assert {"constructor-0", *said.split(), "buffer", "MiB/s"} <= set(words)
    assert max(map(len, shown.splitlines())) <= width


def test_a_cell_that_is_drawn_stays_on_one_line():
    drawn = Text("▁▃ ▅▅  █▂ ▁", no_wrap=True)

    assert drawn.plain in printed(
        table("", [("a", False), ("", False)], [["word " * 9, drawn]]), width=25
    )


def test_the_widest_columns_are_narrowed_first_and_none_below_its_floor():
    assert fitted_widths([4, 4, 20], [4, 18, 60], 50) == [4, 18, 28]
    assert fitted_widths([4, 4, 20], [4, 18, 60], 30) == [4, 6, 20]
    assert fitted_widths([4, 4, 20], [4, 18, 60], 100) == [4, 18, 60]
    assert fitted_widths([4, 4, 20], [4, 18, 60], 27) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("short", "short"),
        ("0123456789", "0123456789"),
        ("01234567890", "012345678…"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\x1b[31mred", "\\x1b[31mr…"),
    ],
)
def test_an_excerpt_is_one_line_that_moves_no_cursor(text, shown):
    assert excerpt(text, 10) == shown


def test_json_takes_arrays_and_dataclasses(capsys):
    emit_json({"a": np.arange(3), "b": np.float64(0.5)})

    assert orjson.loads(capsys.readouterr().out) == {"a": [0, 1, 2], "b": 0.5}


@dataclass(frozen=True, slots=True)
class Found:
    path: str
    counts: np.ndarray
    _hidden: str = "\udcff"


def test_json_spells_out_names_that_are_not_utf8_and_is_json_all_the_same(capsys):
    name = str(Path("/data") / "a\udcff.jsonl")
    emit_json({"files": (name, "é"), name: Found(name, np.arange(2)), "none": None})

    shown = r"/data/a\udcff.jsonl"
    assert orjson.loads(capsys.readouterr().out) == {
        "files": [shown, "é"],
        shown: {"path": shown, "counts": [0, 1]},
        "none": None,
    }


def test_what_is_no_json_is_refused_beside_a_name_that_is_not_utf8_too():
    with pytest.raises(orjson.JSONEncodeError, match="not JSON serializable"):
        emit_json({"name": "\udcff", "what": object()})


def test_speaking_needs_no_numpy():
    code = "import sys, omniload.commands.display; sys.exit('numpy' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_long_work_says_in_a_log_how_far_it_is_ever_more_seldom():
    seconds = iter([100.0, 104.0, 111.0, 120.0, 123.0, 190.0])
    said = []
    advance = lines_of("measuring", 5, said.append, lambda: next(seconds))

    for _ in range(5):
        advance(1)

    assert said == [
        "measuring: 2 of 5 after 11 s",
        "measuring: 4 of 5 after 23 s",
        "measuring: 5 of 5 after 90 s",
    ]


def test_progress_leaves_standard_output_alone(capsys):
    with progress("work", 2) as advance:
        advance(1)
        advance(1)

    assert capsys.readouterr().out == ""
