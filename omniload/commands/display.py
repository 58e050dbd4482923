"""How commands speak: tables and bars on standard output, progress on standard error."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from omniload.base.message_text import message_text

__all__ = [
    "Cell",
    "Column",
    "bar",
    "colour_of",
    "emit_json",
    "excerpt",
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
"""What a table holds; text as it is, never markup."""
Column: TypeAlias = tuple[str, bool]
"""Heading of a column, and whether it holds numbers."""

_FIRST_LINE_S = 10.0
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_WIDTH_WITHOUT_TERMINAL = 120


def output() -> Console:
    """Return the console of standard output; lines in a pipe are 120 wide."""
    # Without highlighting: rich colours whatever looks like a number, a path or a URL in names of sources.
    console = Console(highlight=False)
    if not console.is_terminal:
        # By itself rich takes 80 columns here, and folds what grep is to find on one line.
        console = Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)
    return console


def emit_json(value: object) -> None:
    r"""Print a value as JSON; numpy's arrays and numbers are fine.

    Names of files that are not UTF-8 are in it as tables show them: ``\udcff`` stands for the byte 255.
    """
    option = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
    try:
        text = orjson.dumps(value, option=option)
    except orjson.JSONEncodeError:
        # Python has such bytes as lone surrogates, which are no text of JSON's. What else JSON cannot say stays as it
        # is, and is refused once more.
        text = orjson.dumps(_spelt_out(value), option=option)
    click.echo(text.decode())


def _spelt_out(value: object) -> object:
    """Return a value with the surrogates in its texts spelt out, however deep they are."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case Mapping():
            return {_spelt_out(key): _spelt_out(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_spelt_out(inner) for inner in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            # Those that orjson shows itself: none that begins with an underscore.
            shown = [each.name for each in fields(value) if not each.name.startswith("_")]
            return {name: _spelt_out(getattr(value, name)) for name in shown}
        case _:
            return value


def say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence; it is broken by the terminal, never by us, so that paths can be copied."""
    console.print(Text(message_text(text), style), soft_wrap=True)


@contextmanager
def progress(what: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show how far long work is on standard error; call the value with the amount just done."""
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
    """Return what says how far work is in a log: a line after ten seconds, and whenever twice as many went by.

    Args:
        what: The work.
        total: Of it.
        echo: Is given each line.
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


def table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> Table:
    """Lay out a table; strings are shown as they are, never as markup."""
    # As texts: of a title or a heading that is a string, rich would take [...] for markup, and diff heads its
    # columns with paths.
    laid = Table(title=Text(message_text(title), "bold"), title_justify="left", header_style="dim")
    for heading, numeric in columns:
        # Folded, not cut: a path or a name that ends in dots cannot be copied.
        laid.add_column(
            Text(message_text(heading)), justify="right" if numeric else "left", overflow="fold"
        )
    for row in rows:
        laid.add_row(
            *(cell if isinstance(cell, Text) else Text(message_text(cell)) for cell in row)
        )
    return laid


def colour_of(source: int) -> str:
    """Return the colour of a source by its number."""
    return _COLOURS[source % len(_COLOURS)]


def shows_colours(console: Console) -> bool:
    """Whether what differs by colour alone can be told apart: not in a pipe or a file, nor under ``NO_COLOR``."""
    return console.color_system is not None and not console.no_color


def letter_of(source: int) -> str:
    """Return what stands for a source, by its number, where there are no colours."""
    return chr(ord("A") + source % 26)


def bar(part: float, width: int) -> str:
    """Draw ``part`` of 1 as a bar of at most ``width`` cells, to an eighth of a cell."""
    eighths = round(min(max(part, 0.0), 1.0) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def stacked_bar(parts: Sequence[float], width: int) -> Text:
    """Draw parts of 1 end to end in the colours of their sources; what is above 0 shows at least a sliver."""
    # The ends are rounded, not the lengths, whose errors would add up to a bar that is too long or too short.
    ends = [round(end * width) for end in accumulate(parts)]
    drawn = Text()
    for source, (start, end) in enumerate(pairwise([0, *ends])):
        drawn.append("█" * (end - start), colour_of(source))
    # Of a bar that rounds to nothing the largest part is shown: no bar would mean that there is none.
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

    Without colours a letter stands for each source, and a small one for every other document.

    Args:
        lengths_D: Tokens of each document of the row, in order.
        sources_D: Number of the source of each.
        capacity: Tokens in the row.
        width: Cells to draw; each shows the document at its middle.
        in_colour: Whether colours are shown where this is printed.
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
