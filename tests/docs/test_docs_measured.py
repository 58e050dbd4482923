"""Figures of the pages stand in the reports that they name, and pictures are drawn from reports as they are."""

import importlib.util
import re

import pytest

from tests.docs.snippets import ROOT

_LINK = re.compile(r"\(([^)\s]*benchmarks/reports/[^)\s]+\.md)\)")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
_RATIOS = {"ratio"}
"""Columns that may hold a quotient of two figures of their row."""


def drawer():
    path = ROOT / "scripts/draw_measured.py"
    spec = importlib.util.spec_from_file_location("draw_measured", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows_of(text, folder):
    """Yield each row of figures by column, with the reports that it, or the line behind its table, names."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if not line.startswith("|") or not lines[at - 1].startswith("| ---"):
            continue
        header, behind = cells_of(lines[at - 2]), at
        while behind < len(lines) and lines[behind].startswith("|"):
            behind += 1
        said = next((after for after in lines[behind:] if after), "")
        for row in lines[at:behind]:
            links = _LINK.findall(row) or _LINK.findall(said)
            if links:
                reports = {(folder / link).resolve() for link in links}
                yield dict(zip(header, cells_of(row), strict=True)), reports


def is_found(number, report):
    """Return whether a report holds a number, or one that rounds to it."""
    digits = len(number.partition(".")[2])
    value = float(number.replace(",", ""))
    numbers = (float(found.replace(",", "")) for found in _NUMBER.findall(report))
    return any(round(found, digits) == value for found in numbers)


def is_quotient(number, others):
    digits = len(number.partition(".")[2])
    value = float(number.replace(",", ""))
    return any(round(a / b, digits) == value for a in others for b in others if b)


def strangers(row, report):
    """Return the figures of a row, its first column and links left out, that the report does not hold."""
    _, *columns = row.items()
    figures = {name: _NUMBER.findall(cell) for name, cell in columns if "](" not in cell}
    others = [
        float(number.replace(",", ""))
        for name, numbers in figures.items()
        for number in numbers
        if name not in _RATIOS
    ]
    return [
        number
        for name, numbers in figures.items()
        for number in numbers
        if not is_found(number, report) and not (name in _RATIOS and is_quotient(number, others))
    ]


@pytest.mark.parametrize(
    ("page", "least"),
    [("docs/measured.md", 100), ("README.md", 6), ("docs/how-to/performance/large-corpora.md", 9)],
)
def test_every_figure_of_a_page_stands_in_the_report_that_it_names(page, least):
    path = ROOT / page
    rows = list(rows_of(path.read_text(encoding="utf-8"), path.parent))
    wrong = [
        (next(iter(row.values())), found)
        for row, reports in rows
        if (
            found := strangers(row, "\n".join(each.read_text(encoding="utf-8") for each in reports))
        )
    ]

    assert len(rows) >= least
    assert wrong == []


def test_the_figures_that_the_readme_opens_with_stand_among_its_measured_ones():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    opening, _, rest = text.partition("\n## ")
    claims = re.sub(r"`[^`]*`", "", "".join(re.findall(r"^\|.*\n", opening, re.MULTILINE)))
    measured = rest.partition("## Measured")[2]

    found = _NUMBER.findall(claims)

    assert len(found) >= 8
    assert [number for number in found if not is_found(number, measured)] == []


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"what": "8k", "omniload": "13.7", "other": "4.7"}, []),
        ({"what": "9k", "omniload": "13.7", "ratio": "2.91", "other": "4.7"}, []),
        ({"what": "8k", "omniload": "13.8", "other": "4.7"}, ["13.8"]),
        ({"what": "8k", "omniload": "13.7", "ratio": "3.91", "other": "4.7"}, ["3.91"]),
        ({"what": "8k", "omniload": "14", "other": "1,502 (torch)"}, []),
        ({"what": "8k", "omniload": "15", "report": "[a](b-2026.md)"}, ["15"]),
    ],
)
def test_a_figure_that_is_in_no_report_is_found(row, wrong):
    assert strangers(row, "| 8k | 13.7 (13.7 to 13.7) | 4.68 | 1,502 |") == wrong


def test_a_table_has_the_reports_of_its_rows_or_of_the_line_behind_it():
    text = "| a | b |\n| --- | --- |\n| x | 1 |\n\nReport: [r](benchmarks/reports/a.md).\n"

    (found,) = rows_of(text, ROOT)

    assert found == ({"a": "x", "b": "1"}, {ROOT / "benchmarks/reports/a.md"})


@pytest.mark.parametrize("name", drawer().PICTURES)
def test_a_picture_is_drawn_from_its_report_as_it_is(name):
    picture = (ROOT / "docs/pictures" / name).read_text(encoding="utf-8")

    assert picture == drawer().drawn(name), "python scripts/draw_measured.py"


def test_a_report_without_the_table_of_a_picture_is_told():
    with pytest.raises(ValueError, match="no table that begins with 'sources'"):
        drawer().memory("# A report\n")
