"""What sources of images, of preference pairs and of joined documents ask of the rest of a mix: what may not be cut.

And of the source itself: what a transform may not join or rearrange.

And what weights that count sequences ask of sources: samples of the length of a row.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from pydantic_core import PydanticCustomError

from omniload.base.config import fault_at
from omniload.mix.columns import LABELS, LOSS_MASK, column_kind, name_outside
from omniload.mix.schema.packing.source_packs import is_cut
from omniload.mix.schema.records import Overlong
from omniload.mix.schema.transforms import FilterTransform

if TYPE_CHECKING:
    from omniload.mix.schema.source_base import SourceBase

__all__ = [
    "Packing",
    "documents_cut",
    "no_sequences",
    "packs_at_odds",
    "require_joinable",
    "require_plain",
]


# A protocol, as the model of ``pack`` is in ``mix.config``, which asks this module.
class Packing(Protocol):
    """What of ``pack`` may cut documents."""

    @property
    def length(self) -> int:
        """Tokens in a row."""
        ...

    @property
    def method(self) -> str:
        """How documents become rows."""
        ...

    @property
    def overlong(self) -> Overlong:
        """What becomes of one that is longer than a row, unless its source says."""
        ...


def documents_cut(
    sources: Mapping[str, "SourceBase"], pack: Packing
) -> Iterator[PydanticCustomError]:
    """Yield packing that would cut images, pairs or joined documents, and sources whose patches differ.

    Args:
        sources: The sources by name.
        pack: How documents become rows.
    """
    yield from _images_cut(sources, pack)
    yield from _pairs_cut(sources, pack)
    yield from _joined_cut(sources, pack)


def no_sequences(
    sources: Mapping[str, "SourceBase"], pack: Packing, level: str
) -> Iterator[PydanticCustomError]:
    """Yield why weights cannot count sequences: sources whose samples are no rows, and packing that would cut them.

    Args:
        sources: The sources by name.
        pack: How documents become rows.
        level: What weights count.
    """
    if level != "sequence":
        return
    for name, source in sources.items():
        found = source.sequence_tokens
        if found != pack.length:
            has = (
                "has documents of any length" if found is None else f"has samples of {found} tokens"
            )
            yield fault_at(
                f"level is sequence, and sources.{name} {has}: a row of pack.length {pack.length} would hold several, "
                f"of several sources, which no weight can count; give every source the transform {{type: concat, "
                f"tokens: {pack.length}}}, or use token or sample",
                *("mix", "level"),
            )
            return
    if pack.method == "concat_and_split":
        yield fault_at(
            "method is concat_and_split, which fills rows up behind each short sample, the last of a unit, and so cuts "
            "the sequences that level counts; use best_fit or none",
            *("pack", "method"),
        )


def _cut_anywhere(
    sources: Mapping[str, "SourceBase"], held: Iterable[str], pack: Packing, what: str, remedy: str
) -> Iterator[PydanticCustomError]:
    """Yield packing that cuts documents where a row ends, of the first of sources whose documents stay whole."""
    for name in held:
        own = sources[name].pack
        if not is_cut(own, pack.method):
            continue
        if own is not None and own.cut is not None:
            yield fault_at(
                f"cut is allow, which cuts documents anywhere, and sources.{name} {what}; say never",
                *("sources", name, "pack", "cut"),
            )
        else:
            yield fault_at(
                f"method is concat_and_split, which cuts documents anywhere, and sources.{name} {what}; {remedy}, or "
                f"say pack: {{cut: never}} of this source",
                *("pack", "method"),
            )
        return


def packs_at_odds(
    sources: Mapping[str, "SourceBase"], pack: Packing, level: str
) -> Iterator[PydanticCustomError]:
    """Yield what sources say of their packing and the rest of the mix does not let them have.

    Args:
        sources: The sources by name.
        pack: How documents become rows.
        level: What weights count.
    """
    for name, source in sources.items():
        at, own = ("sources", name, "pack"), source.pack
        if own is None:
            continue
        overlong = source.overlong or pack.overlong
        if pack.method == "none":
            yield fault_at(
                f"sources.{name} has pack, and pack.method is none, which gives every document a row of its own; use "
                "best_fit or concat_and_split, or leave it out",
                *at,
            )
        elif own.cut == "never" and overlong == "split":
            yield fault_at(
                f"cut is never, and overlong is split, which cuts documents of sources.{name} that are longer than "
                f"pack.length {pack.length}; say overlong of the source: truncate, drop or refuse",
                *(*at, "cut"),
            )
        elif own.cut == "allow" and level == "sequence":
            yield fault_at(
                f"cut is allow, which cuts the sequences of sources.{name} that level counts; leave it out",
                *(*at, "cut"),
            )


def _images_cut(
    sources: Mapping[str, "SourceBase"], pack: Packing
) -> Iterator[PydanticCustomError]:
    """Yield packing that would cut images, and sources whose patches differ."""
    found = {
        name: transform
        for name, source in sources.items()
        if (transform := source.images_transform) is not None
    }
    yield from _cut_anywhere(
        sources, found, pack, "holds images, which are never cut", "use best_fit or none"
    )
    for name in found:
        own = sources[name].overlong
        if (own or pack.overlong) == "truncate":
            yield fault_at(
                f"overlong is truncate, which may cut an image of sources.{name}; use split or drop",
                *(("sources", name) if own else ("pack",)),
                "overlong",
            )
            break
    for name, transform in found.items():
        tiles = transform.tiles
        # Words of tiles come to these: what a tokenizer makes of them is not known here.
        most = 0 if tiles is None else tiles.most_tokens(transform.patch * transform.merge)
        if tiles is not None and most > pack.length:
            yield fault_at(
                f"an image may become {tiles.most_images} tiles, the thumbnail among them, which have {most} tokens "
                f"and stay in one row, and pack.length is {pack.length}; raise that, or lower {transform.bound}",
                *("sources", name, "transforms", sources[name].transforms.index(transform)),
                *("tiles", tiles.bound),
            )
    for name, transform in found.items():
        first, other = next(iter(found.items()))
        if (transform.patch, transform.merge) != (other.patch, other.merge):
            yield fault_at(
                f"patch and merge are {transform.patch} and {transform.merge}, and {other.patch} and {other.merge} "
                f"in sources.{first}; a model takes patches of one size",
                *("sources", name, "transforms", sources[name].transforms.index(transform)),
            )


def _pairs_cut(sources: Mapping[str, "SourceBase"], pack: Packing) -> Iterator[PydanticCustomError]:
    """Yield packing that would cut a pair: half of one says nothing."""
    held = [name for name, source in sources.items() if source.pair_columns]
    yield from _cut_anywhere(
        sources, held, pack, "holds preference pairs, which stay whole", "use best_fit or none"
    )
    for name in held:
        own = sources[name].overlong
        overlong = own or pack.overlong
        if overlong not in ("drop", "refuse"):
            yield fault_at(
                f"overlong is {overlong}, which cuts a pair of sources.{name} that is longer than a row; use drop, for "
                "all or for this source alone, and a length that most pairs fit into",
                *(("sources", name) if own else ("pack",)),
                "overlong",
            )
            # Once: where it is said for all sources, each of them would say it again.
            break


def _joined_cut(
    sources: Mapping[str, "SourceBase"], pack: Packing
) -> Iterator[PydanticCustomError]:
    """Yield packing that would lose what was joined, or cut documents that a sample keeps apart."""
    for name, source in sources.items():
        at = ("sources", name, *source.sequence_key)
        tokens, overlong = source.sequence_tokens, source.overlong or pack.overlong
        if tokens is None or tokens <= pack.length:
            continue
        # Of rows that lie in files it may be meant: a run of shorter ones has the first tokens of each.
        if overlong != "split" and source.concat_transform is not None:
            lost = (
                "every whole sequence would be left out"
                if overlong == "drop"
                else "the first whole sequence would end the run"
                if overlong == "refuse"
                else f"{tokens - pack.length} tokens of every whole sequence would be cut off"
            )
            yield fault_at(
                f"sequences are {tokens} tokens, more than pack.length {pack.length}, and overlong is {overlong}: "
                f"{lost}; use {pack.length} tokens, or overlong: split",
                *at,
            )
        elif source.keeps_documents_apart:
            yield fault_at(
                f"sequences are {tokens} tokens, more than pack.length {pack.length}, and their documents stay apart, "
                f"which a cut would lose; use at most {pack.length} tokens",
                *at,
            )
    apart = [name for name, source in sources.items() if source.keeps_documents_apart]
    yield from _cut_anywhere(
        sources,
        apart,
        pack,
        "joins documents that stay apart, which is lost where a sequence is cut",
        "use best_fit or none, or leave the joining out: concat_and_split fills rows to the last token too, and keeps "
        "documents apart",
    )


def require_joinable(source: "SourceBase", i: int) -> None:
    """Refuse to join documents that something of a whole sample goes with, and to change what was joined.

    Raises:
        PydanticCustomError: Transform ``i`` of the source does so.
    """
    at = ("transforms", i)
    whole = [
        f"columns.{name_outside(name)}"
        for name in source.columns_read
        if not column_kind(name).aligned
    ]
    holds_images = source.image_members or source.images_transform
    held = "preference pairs" if source.pair_columns else "images" if holds_images else None
    if held or whole:
        raise fault_at(
            f"transforms[{i}]: concat joins documents and cuts them anywhere, and the source has {held or whole[0]}, "
            f"which belong{'' if held else 's'} to whole samples; leave {'concat' if held else 'one of them'} out",
            *at,
        )
    for behind in source.transforms[i + 1 :]:
        if not isinstance(behind, FilterTransform):
            raise fault_at(
                f"transforms[{i}]: {behind.type} comes behind concat, and is of documents; put it before, as a filter "
                "alone goes by the length of what was joined",
                *at,
            )


def require_plain(source: "SourceBase", i: int, does: str) -> None:
    """Refuse to change tokens that something else goes with.

    Raises:
        PydanticCustomError: Transform ``i`` of the source ``does`` so.
    """
    masked = source.is_nested or not {LOSS_MASK, LABELS}.isdisjoint(source.columns_read)
    # A value of the whole record stays what it is.
    own = next((name for name, said in source.own_columns.items() if not said.is_tag), None)
    if masked or source.image_members or own:
        between = f"columns.{own} with a value for each" if own else "images between them"
        has = "a mask of them" if masked else between
        raise fault_at(
            f"transforms[{i}]: {does}, and the source has {has}; use it on plain text or token ids",
            *("transforms", i),
        )
