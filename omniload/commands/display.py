"""Output of commands: tables and bars on standard output, progress on standard error."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias

import click
import orjson
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.measure import measure_renderables
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from omniload.base.message_text import message_text

__all__ = [
    "Cell",
    "Column",
    "FittedTable",
    "bar",
    "colour_of",
    "emit_json",
    "excerpt",
    "fitted_widths",
    "letter_of",
    "lines_of",
    "output",
    "progress",
    "row_bar",
    "say",
    "shows_colours",
    "stacked_bar",
    "table",
]

Cell: TypeAlias = str | Text
"""Content of a table's cell; text is shown as it is, never as markup."""
Column: TypeAlias = tuple[str, bool]
"""Heading of a column, and whether the column contains numbers."""

_FIRST_LINE_S = 10.0
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_GAP = 2
_LONG_WORD = 20
_WIDTH_WITHOUT_TERMINAL = 120


def output() -> Console:
    """Return the console of standard output; lines in a pipe are 120 wide."""
    # Highlighting is off because rich colours whatever looks like a number, a path or a URL in names of sources.
    console = Console(highlight=False)
    if not console.is_terminal:
        # In a pipe, rich would use 80 columns, and fold lines that grep is to find whole.
        console = Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)
    return console


def emit_json(value: object) -> None:
    r"""Print a value as JSON; numpy's arrays and numbers are fine.

    Names of files that are not UTF-8 appear as in tables: ``\udcff`` stands for the byte 255.
    """
    option = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
    try:
        text = orjson.dumps(value, option=option)
    except orjson.JSONEncodeError:
        # Python represents such bytes as lone surrogates, which JSON text cannot contain. Any other value that JSON
        # cannot represent stays as it is, and is refused again.
        text = orjson.dumps(_spelt_out(value), option=option)
    click.echo(text.decode())


def _spelt_out(value: object) -> object:
    """Return a value with the surrogates in its texts spelt out, at any depth."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case Mapping():
            return {_spelt_out(key): _spelt_out(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_spelt_out(inner) for inner in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            # Only the fields that orjson would show: none that begins with an underscore.
            shown = [each.name for each in fields(value) if not each.name.startswith("_")]
            return {name: _spelt_out(getattr(value, name)) for name in shown}
        case _:
            return value


def say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence; only the terminal breaks its lines, so that paths can be copied."""
    console.print(Text(message_text(text), style), soft_wrap=True)


@contextmanager
def progress(what: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show the progress of long work on standard error; call the value with the amount just done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lines_of(what, total, partial(click.echo, err=True), time.monotonic)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as shown:
        task = shown.add_task(what, total=total)
        yield lambda amount: shown.advance(task, amount)


def lines_of(
    what: str, total: float, echo: Callable[[str], object], now_s: Callable[[], float]
) -> Callable[[float], None]:
    """Return a function that logs the progress of work: a line after ten seconds, and at each doubling of the time.

    Args:
        what: The work.
        total: Amount of the work.
        echo: Receives each line.
        now_s: The clock.
    """
    began_s, done, next_s = now_s(), 0.0, _FIRST_LINE_S

    def advance(amount: float) -> None:
        nonlocal done, next_s
        done += amount
        passed_s = now_s() - began_s
        if passed_s >= next_s:
            next_s = 2 * passed_s
            echo(f"{what}: {done:,.0f} of {total:,.0f} after {passed_s:.0f} s")

    return advance


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table that breaks no word of up to 20 characters, and no cell with ``no_wrap``, however narrow the terminal.

    What does not fit between lines is set without them, and what does not fit then either, as a paragraph for each row.
    """

    title: Text
    columns: Sequence[tuple[Text, bool]]
    """Heading of each column, and whether it contains numbers."""
    rows: Sequence[Sequence[Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the first of the three forms that fits."""
        unbounded = options.update(width=1 << 16)
        found = [
            measure_renderables(console, unbounded, [heading, *(row[at] for row in self.rows)])
            for at, (heading, _) in enumerate(self.columns)
        ]
        widths = [each.maximum for each in found]
        # A cell of prose has about three lines, because it would be a column of single words otherwise.
        floors = [min(_LONG_WORD, max(each.minimum, -(-each.maximum // 3))) for each in found]
        for row in self.rows:
            whole = (cell.cell_len if cell.no_wrap else 0 for cell in row)
            floors = list(map(max, floors, whole))
        lines = 3 * len(widths) + 1
        if between := fitted_widths(floors, widths, options.max_width - lines):
            yield self._laid_out(Table(), between)
        elif without := fitted_widths(floors, widths, options.max_width - _GAP * (len(widths) - 1)):
            yield self._laid_out(Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False), without)
        else:
            yield from self._paragraphs(options.max_width)

    def _laid_out(self, laid: Table, widths: Sequence[int]) -> Table:
        laid.title, laid.title_justify, laid.header_style = self.title, "left", "dim"
        for (heading, is_number), width in zip(self.columns, widths, strict=True):
            # Folded and not cut, because a path or a name that ends in dots cannot be copied.
            justify: JustifyMethod = "right" if is_number else "left"
            laid.add_column(heading, justify=justify, overflow="fold", width=width)
        for row in self.rows:
            laid.add_row(*row)
        return laid

    def _paragraphs(self, width: int) -> Iterator[Text]:
        """Yield the lines of each row: every cell that is not empty, behind its heading."""
        if self.title:
            yield self.title
        for row in self.rows:
            line = Text(overflow="fold")
            for (heading, _), cell in zip(self.columns, row, strict=True):
                if not cell:
                    continue
                pair = Text.assemble((heading.plain, "dim"), " " if heading else "", cell)
                if line and line.cell_len + _GAP + pair.cell_len > width:
                    yield line
                    line = Text(" " * _GAP, overflow="fold")
                elif line:
                    line.append(" " * _GAP)
                line.append_text(pair)
            yield line


def fitted_widths(floors: Sequence[int], widths: Sequence[int], room: int) -> Sequence[int] | None:
    """Narrow columns until they fit, the widest first; None if their floors do not fit.

    Args:
        floors: Least width of each column.
        widths: Width of each column in which no cell is broken; at least its floor.
        room: Cells for all columns together.
    """
    if sum(floors) > room:
        return None
    fitted = list(widths)
    for _ in range(sum(widths) - room):
        spare = (at for at, floor in enumerate(floors) if fitted[at] > floor)
        fitted[max(spare, key=fitted.__getitem__)] -= 1
    return fitted


def table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> FittedTable:
    """Lay out a table; strings are shown as they are, never as markup."""
    # As ``Text``: in a plain string, rich would take [...] for markup, and ``diff`` has paths in its headings.
    return FittedTable(
        Text(message_text(title), "bold"),
        [(Text(message_text(heading)), is_number) for heading, is_number in columns],
        [
            [cell if isinstance(cell, Text) else Text(message_text(cell)) for cell in row]
            for row in rows
        ],
    )


def colour_of(source: int) -> str:
    """Return the colour of a source by its number."""
    return _COLOURS[source % len(_COLOURS)]


def shows_colours(console: Console) -> bool:
    """Whether colours can be distinguished: not in a pipe or a file, nor under ``NO_COLOR``."""
    return console.color_system is not None and not console.no_color


def letter_of(source: int) -> str:
    """Return the letter that stands for a source, by its number, if there are no colours."""
    return chr(ord("A") + source % 26)


def bar(part: float, width: int) -> str:
    """Draw ``part`` of 1 as a bar of at most ``width`` cells, to an eighth of a cell."""
    eighths = round(min(max(part, 0.0), 1.0) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def stacked_bar(parts: Sequence[float], width: int) -> Text:
    """Draw parts of 1 end to end in the colours of their sources; each part above 0 shows at least a sliver."""
    # The ends are rounded, not the lengths, whose errors would add up to a bar that is too long or too short.
    ends = [round(end * width) for end in accumulate(parts)]
    drawn = Text()
    for source, (start, end) in enumerate(pairwise([0, *ends])):
        drawn.append("█" * (end - start), colour_of(source))
    # If a bar rounds to nothing, its largest part is shown, because no bar would mean that there is no part.
    if not drawn and any(parts):
        drawn.append(_EIGHTHS[1], colour_of(max(range(len(parts)), key=parts.__getitem__)))
    return drawn


def row_bar(
    lengths_D: Sequence[int],
    sources_D: Sequence[int],
    capacity: int,
    width: int,
    *,
    in_colour: bool = True,
) -> Text:
    """Draw a row of documents: a colour for each source, two shades for neighbours, dots for padding.

    Without colours, a letter stands for each source, in lower case for every other document.

    Args:
        lengths_D: Tokens of each document of the row, in order.
        sources_D: Number of each document's source.
        capacity: Tokens in the row.
        width: Cells to draw; each shows the document at its middle.
        in_colour: Whether the output shows colours.
    """
    ends_D = list(accumulate(lengths_D))
    drawn = Text()
    for cell in range(width):
        document = bisect_right(ends_D, (cell + 0.5) * capacity / width)
        if document == len(ends_D):
            drawn.append("·", Style(dim=True))
        elif not in_colour:
            letter = letter_of(sources_D[document])
            drawn.append(letter.lower() if document % 2 else letter)
        else:
            shade = "█▓"[document % 2]
            drawn.append(shade, Style(color=colour_of(sources_D[document])))
    return drawn


def excerpt(text: str, width: int) -> str:
    """Return the start of a text on one line; control characters are shown, never sent to a terminal."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:width])
    return shown if len(text) <= width >= len(shown) else shown[: width - 1] + "…"
