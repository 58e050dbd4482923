"""``omniload mix audit``: which samples were in a step, on which rank, with proof."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, isnan
from pathlib import Path
from typing import Any, cast

import click
import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.secrets import without_secrets
from omniload.base.units import counted
from omniload.base.writing import write_whole
from omniload.batch.rows import pieces_of
from omniload.commands.corpus.sample_page import (
    Document,
    Drawer,
    page_of,
    sample_images,
)
from omniload.commands.display import Cell, colour_of, emit_json, excerpt, output, say, table
from omniload.commands.opening import tokenizer_of
from omniload.commands.options import cache_option, json_option, run_argument
from omniload.commands.runs.looks import said_of_untaken
from omniload.commands.runs.tag_shares import said_of_tag, tags_json, tags_of_step
from omniload.commands.samples import SampleTexts, image_transforms
from omniload.mix.columns import COLUMNS, TagValue, column_kind
from omniload.mix.config import MixConfig
from omniload.mix.edits.edits_file import read_history
from omniload.mix.journal.losses import StepLosses, losses_of_step
from omniload.mix.journal.place import journal_of
from omniload.mix.journal.reading import read_extent, read_journal, read_worlds
from omniload.mix.journal.storage import JournalStorage
from omniload.mix.progress import state_json_at
from omniload.mix.run_record import PLACEMENT, RunLife, read_run_record
from omniload.plan.place_tree import ClientPlaceTree, MeshAxis
from omniload.plan.records import StepPlan
from omniload.plan.world import World
from omniload.simulation.rehearsal import Rehearsal
from omniload.source.access.index_folders import index_folder
from omniload.source.formats.format import COUNTED
from omniload.source.survey.tag_shares import TagShares

__all__ = ["audit"]

_TEXT_WIDTH = 60
_NAME_WIDTH = 24
_OTHER_RANKS = (
    "the release that dealt this step placed rows in another way: the samples are those of the step, but ranks and "
    "microbatches are those that this release gives them; install that release to see the ranks that trained on them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A piece of a sample that was trained on."""

    source: str
    position: int
    sub: int
    first_token: int
    stop_token: int
    dp_rank: int
    microbatch: int
    text: str
    shard: str
    """File with the sample's record."""
    place: str
    """Common name of the record in that file; empty if the file is the record, or if several records are joined."""
    loss: float | None
    """Mean loss of a label, as reported by the trainer; ``None`` without a report."""
    loss_of: str | None
    """Scope of that mean: the ``document``, its ``row``, all ``rows`` of a call, or its ``source``."""
    tokens: NDArray[np.int32] = field(repr=False)
    """Token ids of the piece."""
    columns: Mapping[str, TagValue] = field(default_factory=dict)
    """Values of its sample in the user's own columns of whole samples, by name."""


@click.command
@run_argument
@click.option("--step", type=click.IntRange(min=0), required=True, help="Step to look at.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this data-parallel rank.")
@click.option(
    "--grep",
    help="Only samples whose text in this step contains this text, with or without special tokens.",
)
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page with the whole documents, and their images as they were trained on.",
)
@cache_option
@json_option
def audit(  # noqa: PLR0913, PLR0917 -- one for each option
    run: Path,
    step: int,
    rank: int | None,
    grep: str | None,
    page: Path | None,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Show which samples were in a step and on which rank, and prove it.

    The step is planned again from the journal, with the mix and the ranks that it was trained with. The command fails
    unless the plan has the digest in the journal. The digest covers the samples of a step and not their ranks, so the
    ranks come with a warning if another release dealt the step. If the trainer reported losses of documents, the
    highest losses come first. Your own columns of whole samples that batch.columns names are shown with each sample,
    and so are their shares of the tokens.

    \b
    Example:
      omniload mix audit demo/run --step 12 --grep socket
      omniload mix audit demo/run --step 12 --html step-12.html
    """  # noqa: D301 -- click's own marker
    record = read_run_record(run)
    life = record.life_at(step)
    index = cache_dir or index_folder(life.mix_path)
    spec, journaled = _spec_before(run, life, step, index)
    if rank is not None and rank >= (num_ranks := spec.tree.size_of("dp")):
        raise ConfigError(
            f"--rank {rank}: step {step} had data-parallel ranks 0 to {num_ranks - 1}; give one of them"
        )
    rehearsal = Rehearsal(spec)
    plan = rehearsal.plan_of(step)
    digest = None if plan is None else plan.membership_digest()
    if plan is None or digest != journaled:
        raise IntegrityError(
            f"step {step} planned again has digest {digest}, but its journal says {journaled}: these are not the "
            "samples that were trained on; compare the data and the release with those of the run"
        )
    spec = replace(spec, mix=spec.history.latest, edits=())  # contains sources that edits added
    looked_at = plan if rank is None else plan.part_of([rank])
    found = _with_losses(_found(rehearsal, looked_at, spec, grep), losses_of_step(run, step))
    found = _with_columns(found, rehearsal, plan, spec.mix)
    title = f"step {step}, digest {digest} as journaled"
    warnings = [] if life.placement == PLACEMENT else [_OTHER_RANKS]
    warnings += said_of_untaken(run, step) if life == record.last else []
    if page is not None:
        write_whole(page, _page(rehearsal, plan, spec, found, f"{run}: {title}").encode())
    if as_json:
        shown = [_as_json(piece) for piece in found]
        told = {"step": step, "digest": digest, "warnings": warnings, "samples": shown}
        emit_json({**told, "tags": tags_json(_tags_of(found))})
        return
    said = f"{counted(len(found), 'sample')} or pieces of samples"
    if grep is not None:
        of = len(looked_at.pieces)
        said = f"{len(found)} of {of} samples or pieces of samples contain {grep!r}"
    _print(found, spec.mix, f"{title}: {said}", warnings)
    if page is not None:
        say(output(), f"page: {page}")


def _spec_before(
    run: Path,
    life: RunLife,
    step: int,
    cache_dir: Path | None,
) -> tuple[PlaneSpec, str]:
    """Return a run that plans ``step`` alone, and the journaled digest of the step.

    Raises:
        StateError: The journal does not contain the step, or belongs to another mix.
    """
    journal = journal_of(run)
    base, records = read_journal(journal, step)
    if not records or records[-1]["step"] != step:
        extent = read_extent(journal)
        raise StateError(
            f"the journal holds {counted(extent.next_step - extent.first_step, 'step')} from step {extent.first_step}, "
            f"step {step} is not among them; choose one within"
        )
    mix = life.mix()
    revision = int(str(records[-1]["revision"]))
    history = read_history(run, mix)
    # One step ahead, so that nothing is read for later steps; the content of the step does not depend on it.
    mix = mix.model_copy(update={"runtime": mix.runtime.model_copy(update={"prefetch_steps": 1})})
    # The planner compares the fingerprint of the present data when it takes the state over.
    state = state_json_at(history, base, records, step)
    spec = PlaneSpec(
        mix=mix,
        base_dir=life.base_dir,
        tree=_tree_at(journal, life, step),
        state=state,
        num_steps=step + 1,
        cache_dir=cache_dir,
        # Only edits that applied then: steps that were skipped later stay in the journal until the run continues.
        edits=history.edits[:revision],
    )
    return spec, str(records[-1]["digest"])


def _tree_at(journal: Path | JournalStorage, life: RunLife, step: int) -> ClientPlaceTree:
    """Return the ranks that trained on a step: those of a start, or those that replaced them."""
    worlds = [World.from_json(noted) for noted in read_worlds(journal)]
    later = [world for world in worlds if life.from_step <= world.step <= step]
    if later:
        return later[-1].tree
    return ClientPlaceTree.from_sizes(cast("Mapping[MeshAxis, int]", life.sizes))


def _found(rehearsal: Rehearsal, part: StepPlan, spec: PlaneSpec, grep: str | None) -> list[_Found]:
    """Return the pieces of a step, or of a part of it, that contain ``grep``."""
    rows_P = np.repeat(np.arange(part.num_rows), np.diff(part.row_offsets))
    texts = SampleTexts(spec.mix, tokenizer_of(spec.mix.tokenizer, spec.base_dir))
    found, pieces = [], part.pieces
    for p, tokens in enumerate(rehearsal.tokens_of(pieces)):
        source, position = int(pieces.sources_P[p]), int(pieces.positions_P[p])
        # The whole text is searched, because ``grep`` may match after the words that are shown.
        text = texts.of(source, tokens, 0 if grep else _TEXT_WIDTH)
        # Also within special tokens, such as those of a chat.
        if grep is not None and grep not in text:
            text = texts.of(source, tokens, special=True)
        if grep is None or grep in text:
            shard, place = rehearsal.place_at(source, position)
            found.append(
                _Found(
                    source=spec.mix.names[source],
                    position=position,
                    sub=int(pieces.subs_P[p]),
                    first_token=int(pieces.starts_P[p]),
                    stop_token=int(pieces.stops_P[p]),
                    dp_rank=int(part.dp_ranks_R[rows_P[p]]),
                    microbatch=int(part.microbatches_R[rows_P[p]]),
                    text=_around(text, grep),
                    # A source's URL may contain a key of its store.
                    shard=without_secrets(shard),
                    place=place,
                    loss=None,
                    loss_of=None,
                    tokens=tokens,
                )
            )
    return sorted(found, key=lambda piece: (piece.dp_rank, piece.microbatch))


def _as_json(piece: _Found) -> dict[str, object]:
    return {name: value for name, value in asdict(piece).items() if name != "tokens"}


def _page(
    rehearsal: Rehearsal, plan: StepPlan, spec: PlaneSpec, found: Sequence[_Found], title: str
) -> str:
    """Return the page of pieces of the step, with their images."""
    mix = spec.mix
    # Batches are built only if there are images, because tokens are in memory already.
    batches = rehearsal.build(plan) if image_transforms(mix) else ()
    drawer = Drawer(mix, tokenizer_of(mix.tokenizer, spec.base_dir), sample_images(batches))
    documents = []
    for piece in found:
        loss = f", loss {said}" if (said := _said_of_loss(piece)) else ""
        own = "".join(f", {name} {value}" for name, value in piece.columns.items())
        key = (mix.names.index(piece.source), piece.position, piece.sub)
        documents.append(
            Document(
                heading=f"{piece.source} {_position(piece)}, {_said_of_file(piece)}, tokens {_tokens(piece)}; "
                f"rank {piece.dp_rank}, microbatch {piece.microbatch}{loss}{own}",
                parts=drawer.parts(key, piece.tokens),
            )
        )
    return page_of(title, documents, "--rank and --grep choose others")


def _position(piece: _Found) -> str:
    return f"{piece.position:,}" + (f".{piece.sub}" if piece.sub else "")


def _said_of_file(piece: _Found) -> str:
    return f"{piece.place} of {piece.shard}" if piece.place else piece.shard


def _tokens(piece: _Found) -> str:
    return f"{piece.first_token:,} to {piece.stop_token - 1:,}"


def _said_of_loss(piece: _Found) -> str:
    if piece.loss is None:
        return ""
    of = "" if piece.loss_of == "document" else f" of its {piece.loss_of}"
    return f"{piece.loss:.3f}{of}"


def _with_losses(found: Sequence[_Found], losses: StepLosses) -> Sequence[_Found]:
    """Return pieces with their reported losses, the highest first if any are reported."""
    if not losses:
        return found
    told = []
    for piece in found:
        key = (piece.source, piece.position, piece.sub, piece.first_token)
        own = losses.of_piece(key)
        mean = None if own is None else own.mean
        of = None if own is None or mean is None else own.over
        told.append(replace(piece, loss=mean, loss_of=of))
    return sorted(told, key=_from_the_highest)


def _with_columns(
    found: Sequence[_Found], rehearsal: Rehearsal, plan: StepPlan, mix: MixConfig
) -> Sequence[_Found]:
    """Return pieces with the values of their samples, if batches bring any of the user's own columns."""
    if not any(column_kind(name).is_tag for name in mix.columns_used):
        return found
    held = {
        piece.key: _values(piece.columns)
        for batch in rehearsal.build(plan)
        for part in batch.microbatches
        for piece in pieces_of(part)
    }
    numbers = {name: number for number, name in enumerate(mix.names)}
    return [
        replace(
            piece,
            columns=held[numbers[piece.source], piece.position, piece.sub, piece.first_token],
        )
        for piece in found
    ]


def _values(columns: Mapping[str, NDArray[Any]]) -> dict[str, TagValue]:
    """Return the values of a piece in the user's own columns, of which only texts are bytes."""
    return {
        name: values.tobytes().decode() if values.dtype == np.uint8 else values.item()
        for name, values in sorted(columns.items())
        if name not in COLUMNS
    }


def _tags_of(found: Sequence[_Found]) -> list[TagShares]:
    return tags_of_step((piece.columns, len(piece.tokens)) for piece in found)


def _from_the_highest(piece: _Found) -> float:
    """Key that orders pieces by loss: NaN above all numbers, and pieces without a report below."""
    if piece.loss is None:
        return inf
    return -inf if isnan(piece.loss) else -piece.loss


def _around(text: str, grep: str | None) -> str:
    """Return the start of a text, or of the line in which ``grep`` is found."""
    at = 0 if grep is None else text.rfind("\n", 0, text.index(grep)) + 1
    # One character more than is shown, which tells an excerpt that there is more.
    return text[at : at + _TEXT_WIDTH + 1]


def _print(found: Sequence[_Found], mix: MixConfig, said: str, warnings: Sequence[str]) -> None:
    rows: list[list[Cell]] = [
        [
            str(piece.dp_rank),
            str(piece.microbatch),
            Text(piece.source, colour_of(mix.names.index(piece.source))),
            _position(piece),
            excerpt(piece.shard.rpartition("/")[2], _NAME_WIDTH),
            piece.place.partition(f", {COUNTED}")[0],
            _tokens(piece),
            _said_of_loss(piece),
            *(excerpt(str(value), _NAME_WIDTH) for value in piece.columns.values()),
            excerpt(piece.text, _TEXT_WIDTH),
        ]
        for piece in found
    ]
    columns = [("rank", True), ("microbatch", True), ("source", False), ("position", True)]
    columns += [
        ("file", False),
        ("in the file", False),
        ("tokens", True),
        ("loss", True),
        *((name, False) for name in (found[0].columns if found else ())),
        ("text", False),
    ]
    console = output()
    if rows:
        console.print(table("", columns, rows))
    if any(COUNTED in piece.place for piece in found):
        say(
            console,
            f"records of files are {COUNTED}0, those of CSV behind the header; lines from 1",
        )
    say(console, said)
    for shares in _tags_of(found):
        say(console, said_of_tag(shares))
    for warning in warnings:
        say(console, f"warning: {warning}", "yellow")
