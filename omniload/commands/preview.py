"""``omniload mix preview``: a few real rows, as a rank would get them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from omniload.base.errors import ConfigError
from omniload.base.units import counted
from omniload.base.writing import write_whole
from omniload.batch.microbatch import IGNORE_LABEL, Batch, CpSlice, Microbatch
from omniload.batch.rows import documents_of
from omniload.commands.corpus.sample_page import Document, Drawer, page_of, sample_images
from omniload.commands.display import (
    Cell,
    colour_of,
    emit_json,
    excerpt,
    letter_of,
    output,
    row_bar,
    say,
    shows_colours,
    table,
)
from omniload.commands.faults import raise_together, sources_in_silence
from omniload.commands.opening import open_spec, tokenizer_of
from omniload.commands.options import (
    cache_option,
    dp_option,
    json_option,
    mix_argument,
    store_option,
)
from omniload.commands.samples import SampleTexts
from omniload.simulation.rehearsal import Rehearsal

__all__ = ["preview"]

_BAR_WIDTH = 96
_DOCUMENTS_SHOWN = 6
_TEXT_WIDTH = 60
_ARRAYS = ("tokens", "trained_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    source: str
    source_number: int
    position: int
    sub: int
    first_token: int
    length: int
    tokens: NDArray[np.int32]
    trained: int
    """Labels that are trained on."""
    trained_T: NDArray[np.bool_] | None
    """Whether each token is the label of an earlier one; ``None`` if no mask leaves any out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    dp_rank: int
    microbatch: int
    row: int
    cu_seqlens: tuple[int, ...]
    """Document bounds within the row; padding, if any, is the last document."""
    documents: tuple[_Document, ...]
    padding: int


@click.command
@mix_argument
@click.option(
    "--step", type=click.IntRange(min=0), default=0, show_default=True, help="Step to show."
)
@click.option(
    "--rows", type=click.IntRange(min=1), default=4, show_default=True, help="Rows to show."
)
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page with the whole documents and their images, in which the trained tokens are marked.",
)
@dp_option
@cache_option
@store_option
@json_option
def preview(  # noqa: PLR0913 -- options
    *,
    file: Path,
    step: int,
    rows: int,
    page: Path | None,
    dp: int,
    cache_dir: Path | None,
    store_timeout: float,
    as_json: bool,
) -> None:
    """Show a few real rows of a step: their documents, bounds and first words.

    For conversations, and all other samples with a mask, the command shows which words are trained on, including
    special tokens. Earlier steps are planned too, because they decide which samples are in this one.

    \b
    Example:
      omniload mix preview examples/quickstart.yaml --step 3 --rows 2
      omniload mix preview examples/quickstart.yaml --html rows.html
    """  # noqa: D301 -- click's own marker
    # One step ahead, so that the planner plans no more than is shown.
    spec = open_spec(file, dp=dp, cache_dir=cache_dir, ahead=1)
    tokenizer = tokenizer_of(spec.mix.tokenizer, spec.base_dir)
    raise_together([*dict.fromkeys(sources_in_silence(spec.mix, store_timeout, file).values())])
    rehearsal = Rehearsal(replace(spec, num_steps=step + 1))
    planned = rehearsal.plan_of(step)
    if planned is None:
        raise ConfigError(
            f"mix.stop {spec.mix.mix.stop!r} ends the run before step {step}; show an earlier one"
        )
    batches = rehearsal.build(planned)
    shown = _rows(batches, spec.mix.names, rows)
    texts = SampleTexts(spec.mix, tokenizer)
    if page is not None:
        drawer = Drawer(spec.mix, tokenizer, sample_images(batches))
        write_whole(page, _page(shown, drawer, f"{file.name}: step {step}").encode())
    if as_json:
        emit_json({"step": step, "rows": [_as_json(row, texts) for row in shown]})
        return
    console = output()
    in_colour = shows_colours(console)
    for row in shown:
        console.print(*_row_text(row, spec.mix.pack.length, texts, console), sep="\n")
    legend = Text("sources: ")
    for s, name in enumerate(spec.mix.names):
        legend.append(f"{'█' if in_colour else letter_of(s)} {name}  ", colour_of(s))
    console.print(legend)
    if page is not None:
        say(console, f"page: {page}")


def _rows(batches: Sequence[Batch], names: Sequence[str], most: int) -> list[_Row]:
    """Return ``most`` rows, evenly over ranks and microbatches."""
    places = [
        (dp_rank, number, row)
        for dp_rank, batch in enumerate(batches)
        for number, microbatch in enumerate(batch.microbatches)
        for row in range(_whole(microbatch).tokens_RT.shape[0])
    ]
    chosen = np.linspace(0, len(places) - 1, min(most, len(places))).astype(int).tolist()
    return [
        _row(_whole(batches[places[i][0]].microbatches[places[i][1]]), names, places[i])
        for i in chosen
    ]


def _whole(microbatch: Microbatch | CpSlice) -> Microbatch:
    assert isinstance(microbatch, Microbatch), "a preview has no context parallelism"
    return microbatch


def _row(
    microbatch: Microbatch,
    names: Sequence[str],
    place: tuple[int, int, int],
) -> _Row:
    dp_rank, number, row = place
    length = microbatch.tokens_RT.shape[1]
    starts = microbatch.cu_seqlens[:-1].astype(np.int64)
    sources_D = microbatch.sources_D
    held = sources_D >= 0  # padding is a document without a key
    keys_D4 = np.zeros((len(starts), 4), np.int64)
    keys_D4[held] = microbatch.keys_K4
    # Bounds continue through all rows of a microbatch; no document crosses from one row into the next.
    inside = np.flatnonzero(starts // length == row)
    bounds = [*(starts[inside] - row * length).tolist(), length]
    # The bounds as a model sees them, including those between the sides of a pair and between joined documents.
    begin, seen = row * length, documents_of(microbatch).cu_seqlens
    documents = []
    for d, start, stop in zip(inside.tolist(), bounds, bounds[1:], strict=False):
        if held[d]:
            source, position, sub, first = keys_D4[d].tolist()
            is_label = microbatch.labels_RT[row, start:stop] != IGNORE_LABEL
            documents.append(
                _Document(
                    source=names[source],
                    source_number=source,
                    position=position,
                    sub=sub,
                    first_token=first,
                    length=stop - start,
                    tokens=microbatch.tokens_RT[row, start:stop],
                    trained=int(np.count_nonzero(is_label)),
                    # The label at a token is the next token.
                    trained_T=None
                    if microbatch.trained_RT is None
                    else np.concatenate([[False], is_label[:-1]]),
                )
            )
    return _Row(
        dp_rank=dp_rank,
        microbatch=number,
        row=row,
        cu_seqlens=tuple((seen[(seen >= begin) & (seen <= begin + length)] - begin).tolist()),
        documents=tuple(documents),
        padding=length - sum(document.length for document in documents),
    )


def _as_json(row: _Row, texts: SampleTexts) -> dict[str, object]:
    documents = [
        {name: value for name, value in asdict(document).items() if name not in _ARRAYS}
        | {
            "text": _text(document, texts),
            "trained_text": None if document.trained_T is None else _trained_text(document, texts),
        }
        for document in row.documents
    ]
    return {**asdict(row), "documents": documents}


def _page(rows: Sequence[_Row], drawer: Drawer, title: str) -> str:
    documents = [
        Document(
            heading=f"{each.source} {_record(each)}, {each.length:,} tokens from {each.first_token:,} on; rank "
            f"{row.dp_rank}, microbatch {row.microbatch}, row {row.row}",
            parts=drawer.parts(
                (each.source_number, each.position, each.sub), each.tokens, each.trained_T
            ),
        )
        for row in rows
        for each in row.documents
    ]
    return page_of(title, documents, "--rows shows fewer")


def _text(document: _Document, texts: SampleTexts) -> str:
    special = document.trained_T is not None
    return texts.of(document.source_number, document.tokens, _TEXT_WIDTH, special=special)


def _trained_text(document: _Document, texts: SampleTexts) -> str:
    """Return the beginning of the text that is trained on; nothing is inserted between turns."""
    tokens = document.tokens[document.trained_T]
    return texts.of(document.source_number, tokens, _TEXT_WIDTH, special=True)


def _record(document: _Document) -> str:
    return f"{document.position}" + (f".{document.sub}" if document.sub else "")


def _row_text(row: _Row, capacity: int, texts: SampleTexts, console: Console) -> list[object]:
    documents = row.documents
    lengths = [document.length for document in documents]
    sources = [document.source_number for document in documents]
    held = counted(len(documents), "document")
    title = (
        f"rank {row.dp_rank}, microbatch {row.microbatch}, row {row.row}: {held}, "
        f"{row.padding} of {capacity:,} tokens padding"
    )
    bounds = ", ".join(map(str, row.cu_seqlens))
    cells: list[list[Cell]] = [
        [
            Text(document.source, colour_of(document.source_number)),
            _record(document),
            f"{document.first_token:,}",
            f"{document.length:,}",
            excerpt(_text(document, texts), _TEXT_WIDTH),
        ]
        for document in documents[:_DOCUMENTS_SHOWN]
    ]
    columns = [("source", False), ("position", True), ("from token", True), ("tokens", True)]
    columns.append(("text", False))
    if any(document.trained_T is not None for document in documents):
        columns += [("trained", True), ("trained on", False)]
        for line, document in zip(cells, documents, strict=False):
            shown = excerpt(_trained_text(document, texts), _TEXT_WIDTH)
            line += [f"{document.trained:,}", shown]
    more = len(documents) - _DOCUMENTS_SHOWN
    return [
        table(title, columns, cells),
        *([Text(f"... and {counted(more, 'more document')}")] if more > 0 else []),
        row_bar(
            lengths,
            sources,
            capacity,
            min(_BAR_WIDTH, console.width),
            in_colour=shows_colours(console),
        ),
        Text(excerpt(f"cu_seqlens {bounds}", _BAR_WIDTH + 20), "dim"),
        "",
    ]
