"""Faults of a mix file as messages for the user, each with the line to change and all at once; and warnings."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from omniload.base.config import line_of
from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)
from omniload.mix.columns import column_kind, name_outside
from omniload.mix.config import MixConfig, SourceConfig
from omniload.mix.schema.messages import CompletionTransform, PreferenceTransform
from omniload.mix.schema.splits import TRAIN, share_of
from omniload.mix.schema.transforms import FilterTransform, encoding_of
from omniload.plan.costs.words import fault_of_words, unfit_words
from omniload.source.formats.format import Records
from omniload.source.kept_findings import FoundSource
from omniload.source.stores.asking import silent_stores
from omniload.source.survey.documents import said_of_longer
from omniload.source.tokenize import Tokenizer

__all__ = [
    "FIRST_RECORDS",
    "bears_none",
    "doubt_of_lengths",
    "doubt_of_words",
    "doubts_of_tokenizer",
    "held_out_of_nothing",
    "joined_without_an_end",
    "key_of_message",
    "of_source",
    "outcome_of",
    "raise_together",
    "read_alike",
    "require_words",
    "said_of_dropped",
    "sources_in_silence",
    "why_nothing",
    "with_line",
]

FIRST_RECORDS = 64
"""Records of a source whose tokens are counted."""
_MANY_CUT = 0.1
"""Part of the first conversations that may be cut: a few long ones are in most sets, and meant to be."""
_FEW_OF_A_SPLIT = 64
"""Records about, of the split that is drawn, below which it may well have none."""
_NAMED = 3
"""Sources named in a message."""
_GRAVITY = (IntegrityError, ConfigError, StateError, UnavailableError, OmniloadError)
"""Classes of errors, those that are least likely to go away by themselves first."""

Found = TypeVar("Found")


def with_line(said: str, at: Sequence[str], file: Path | None) -> str:
    """Put the file and the line of a key before a message."""
    line = None if file is None else line_of(file, *at)
    return said if line is None else f"{file}:{line}: {said}"


def key_of_message(said: str, source: str) -> tuple[str, ...]:
    """Return the key of the mix file that must be changed, which begins a message about a source."""
    key = f"sources.{source}"
    below = said.removeprefix(f"{key}.").partition(":")[0] if said.startswith(f"{key}.") else ""
    return ("sources", source, below) if below.isidentifier() else ("sources", source)


def of_source(
    result: Found | OmniloadError, source: str, file: Path | None
) -> Found | OmniloadError:
    """Add to an error the source it belongs to, if its message names only a file, and the line of the key to change."""
    if not isinstance(result, OmniloadError):
        return result
    key, said = f"sources.{source}", str(result)
    if key not in said:
        said = f"{key}: {said}"
    named = type(result)(with_line(said, key_of_message(said, source), file))
    # The cause is kept, because it identifies a fault of the tokenizer, which many sources raise but is reported once.
    named.__cause__ = result
    return named


def outcome_of(check: Callable[[], Found], file: Path | None = None) -> Found | OmniloadError:
    """Return the result of ``check``, or its error, prefixed with the line in ``file`` of the key it begins with."""
    try:
        return check()
    except OmniloadError as error:
        key = re.match(r"\w+(?:\.[\w-]+)+", str(error)) if file else None
        return type(error)(with_line(str(error), key[0].split("."), file)) if key else error


def raise_together(errors: Sequence[OmniloadError]) -> None:
    """Raise all faults as one error, with each message on a line of its own.

    The class of the error is the one that is least likely to go away by itself.
    """
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    gravest = min(errors, key=lambda error: _GRAVITY.index(type(error)))
    raise type(gravest)("\n".join(str(error) for error in errors)) from gravest


def sources_in_silence(mix: MixConfig, limit_s: float, file: Path) -> dict[str, OmniloadError]:
    """Ask every store of a mix, and return an error for each source whose store did not answer.

    Args:
        mix: The mix.
        limit_s: Seconds that the stores have, all at the same time.
        file: The mix file, for messages.
    """
    patterns = {name: source.paths for name, source in mix.sources.items()}
    silent = silent_stores(patterns, limit_s)
    found: dict[str, OmniloadError] = {}
    for store, (first, *others) in silent.items():
        more = f", nor for {len(others):,} more source{'s' * (len(others) > 1)}" if others else ""
        said = (
            f"sources.{first}.path: {store} gave no answer within {limit_s:g} s{more}; see whether it can be reached "
            "from here, or give it longer: --store-timeout 5m"
        )
        # All sources of a store share the error, so that the store is reported once.
        error = UnavailableError(with_line(said, ("sources", first, "path"), file))
        found |= dict.fromkeys((first, *others), error)
    return found


def held_out_of_nothing(mix: MixConfig, found: Sequence[FoundSource]) -> list[str]:
    """Return warnings of splits that hold out less than one record in total, so that an evaluation has no data."""
    said = []
    for split in mix.splits:
        shares = [(share_of(mix.sources[each.name].splits or {}, split), each) for each in found]
        if mix.split == TRAIN and sum(share * each.records for share, each in shares) < 1:
            records = sum(each.records for each in found)
            said.append(
                f"splits.{split}: {mix.splits[split]:.3g} of {records:,} records is less than one, and most likely "
                "none is held out; raise the share, or add data"
            )
    return said


def bears_none(mix: MixConfig, found: Sequence[FoundSource]) -> Iterator[tuple[str, str]]:
    """Yield sources whose allowed percentage of bad records is less than one record: the first one would end a run."""
    for each in found:
        on_error = mix.sources[each.name].on_error
        is_none = isinstance(on_error.limit, str) and not on_error.most_of(each.records)
        if on_error.policy == "skip" and is_none:
            said = (
                f"sources.{each.name}.on_error: a limit of {on_error.said_of(each.records)} bears none, and the first "
                "record that cannot be decoded ends the run; raise it, or write a count"
            )
            yield each.name, said


def read_alike(mix: MixConfig) -> Iterator[tuple[str, str]]:
    """Yield sources with the same settings as an earlier source, like a line that was copied but not changed."""
    firsts: dict[str, str] = {}
    for name in mix.names:
        first = firsts.setdefault(mix.sources[name].model_dump_json(), name)
        if first != name:
            said = (
                f"sources.{name}: reads the files of sources.{first} in the same way, and each of their records comes "
                "in both; name other files, or leave one out and give the other the weight of both"
            )
            yield name, said


def said_of_dropped(mix: MixConfig, found: Sequence[FoundSource], file: Path) -> str:
    """Return how many first records are left out because they exceed a row; empty if no source leaves such out."""
    drops = [
        each
        for each, overlong in zip(found, mix.overlong_S, strict=True)
        if overlong == "drop" and mix.sources[each.name].concat_transform is None
    ]
    if not drops:
        return ""
    longer = sorted((each for each in drops if each.longer), key=lambda each: -each.longer)
    of = ", ".join(f"{each.name} {each.longer:,}" for each in longer[:_NAMED])
    of += f" and {len(longer) - _NAMED:,} more" if len(longer) > _NAMED else ""
    firsts, count = sum(each.firsts for each in drops), sum(each.longer for each in longer)
    where = drops[0].name if len(drops) == 1 else f"{len(drops):,} sources{of and f' ({of})'}"
    said = "how many" if not firsts else f"{count:,}" if count else "none"
    known = f"of the first {firsts:,} records of {where}" if firsts else f"of {where} is not known"
    return (
        f"overlong: drop leaves out what is longer than pack.length {mix.pack.length:,}: {said} {known}; omniload mix "
        f"stats {file} looks at more"
    )


def joined_without_an_end(mix: MixConfig) -> Iterator[str]:
    """Yield a warning if a model cannot see where one joined text ends and the next begins."""
    # The byte tokenizer always has an end, and templates of conversations have their own. A begin token also works.
    around = [getattr(mix.tokenizer, key, "") for key in ("begin_of_document", "end_of_document")]
    if mix.tokenizer is None or any(token is not None for token in around):
        return
    joined = [
        name
        for name, source in mix.sources.items()
        if source.concat_transform is not None
        and source.holds_text
        and not source.is_nested
        and not source.keeps_documents_apart
    ]
    if joined:
        more = f" and of {len(joined) - 1} more" if len(joined) > 1 else ""
        yield (
            f"tokenizer.end_of_document is not set, and concat joins texts of sources.{joined[0]}{more} with nothing "
            "between the last token of one and the first of the next; name the token that ends documents, or have "
            "concat keep them apart (documents: apart)"
        )


def _writes_its_own_ends(source: SourceConfig) -> bool:
    """Whether a template decides how the samples of a source begin and end."""
    encoding = encoding_of(source.transforms)
    if isinstance(encoding, CompletionTransform | PreferenceTransform):
        return encoding.form == "chat"
    return source.is_nested


def doubts_of_tokenizer(mix: MixConfig, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield that ranks may be of another encoding, and that texts begin without what transformers puts before them."""
    if doubt := getattr(tokenizer, "doubt", ""):
        yield f"tokenizer.encoding: {doubt}"
    token, _ = getattr(tokenizer, "puts_around", ("", ""))
    if not token or tokenizer is None or tokenizer.begin_of_document_id is not None:
        return
    texts = [n for n, s in mix.sources.items() if s.holds_text and not _writes_its_own_ends(s)]
    if texts:
        more = f" and of {len(texts) - 1} more" if len(texts) > 1 else ""
        yield (
            f"tokenizer.begin_of_document is not set: where transformers encodes a text this tokenizer puts {token!r} "
            f"before it, and documents of sources.{texts[0]}{more} begin without; name that token, unless the model "
            "was trained without it"
        )


def why_nothing(
    mix: MixConfig,
    name: str,
    first: Records,
    lengths_N: NDArray[np.integer[Any]] | None,
    records: int,
    gives_any: Callable[[], bool] | None = None,
) -> str:
    """Return why a source may give no samples, from its first records; empty if these give some.

    Args:
        mix: The mix.
        name: Name of the source.
        first: First records of the source.
        lengths_N: Tokens of each first record; ``None`` if unknown.
        records: Number of records in the source.
        gives_any: Reads all records, and returns whether one gives a sample; ``None`` if they are too many.

    Raises:
        ConfigError: The first records are all records of the source, or no other record gives a sample either.
    """
    source, tried = mix.sources[name], len(first.column)
    key, why, remedy = _why_none_of_first(mix, name, first, lengths_N)
    if lengths_N is not None and len(lengths_N):
        tried = tried if len(lengths_N) < FIRST_RECORDS else len(lengths_N)
    split = source.split or TRAIN
    if not why:
        if gives_any is not None and _may_give_none(mix, name, first, records) and not gives_any():
            raise ConfigError(
                f"{key}: none of its {records:,} records gives a sample that fits pack.length {mix.pack.length:,}; "
                "change its transforms, its conditions, its splits or overlong, or remove the source"
            )
        if records * source.share_drawn >= 1:
            return ""
        return (
            f"{key}: split {split!r} takes {source.share_drawn:.3g} of its {records:,} records, less than one: most "
            "likely it has none; raise the share, or add data"
        )
    if tried >= records:
        raise ConfigError(f"{key}: none of its {records:,} records {why}; {remedy}")
    return _of_first(key, f"of its first {tried:,} records", records, f"{why}; {remedy}", gives_any)


def _why_none_of_first(
    mix: MixConfig, name: str, first: Records, lengths_N: NDArray[np.integer[Any]] | None
) -> tuple[str, str, str]:
    """Return what none of the first records does, between its key and the remedy; empty where one does."""
    source, key = mix.sources[name], f"sources.{name}"
    if first.kept_B is not None and len(first.kept_B) and not first.kept_B.any():
        return f"{key}.where", "meets its conditions", "correct them, or remove the source"
    if lengths_N is None or not len(lengths_N) or source.images_transform is not None:
        return key, "", ""  # not known: images are tokens too
    if not lengths_N.any():
        if not source.transforms:
            return key, "gives a token", "correct its text"
        return f"{key}.transforms", "gives a token", "correct them, or remove the source"
    is_dropped = (source.overlong or mix.pack.overlong) == "drop" and not source.concat_transform
    if is_dropped and lengths_N[lengths_N > 0].min() > mix.pack.length:
        why = f"fits pack.length {mix.pack.length:,}, and longer ones are dropped"
        return key, why, "raise it, change overlong, or remove the source"
    return key, "", ""


def _may_give_none(mix: MixConfig, name: str, first: Records, records: int) -> bool:
    """Return whether a source may give no sample although its first records do, so that a run would be refused."""
    source, amount = mix.sources[name], (mix.mix.amounts or {}).get(name)
    ends = mix.mix.stop == "each_once" or (amount is not None and amount.kind == "epochs")
    if ends and source.may_end_empty:
        return False
    if source.concat_transform is not None:
        # Sequences have other lengths than the documents that were looked at.
        return any(isinstance(each, FilterTransform) for each in source.transforms)
    kept = 1.0 if first.kept_B is None or not len(first.kept_B) else float(first.kept_B.mean())
    return source.share_drawn < 1 and records * kept * source.share_drawn < _FEW_OF_A_SPLIT


def _of_first(
    key: str, first: str, records: int, why: str, gives_any: Callable[[], bool] | None
) -> str:
    """Return the warning that no record of a source may give a sample because none of the first does.

    Raises:
        ConfigError: None of all records gives a sample.
    """
    if gives_any is None:
        return f"{key}: none {first} of {records:,} {why}, unless others stand further on"
    if gives_any():
        return f"{key}: none {first} of {records:,} {why}, unless those further on are enough"
    raise ConfigError(f"{key}: none of its {records:,} records gives a sample: none {first} {why}")


def doubt_of_lengths(
    mix: MixConfig, config: SourceConfig, lengths_N: NDArray[np.integer[Any]] | None
) -> str:
    """Return what happens to first records that are longer than a row; empty if that is likely intended.

    Args:
        mix: The mix.
        config: The source.
        lengths_N: Tokens of each first record; ``None`` if unknown.
    """
    if lengths_N is None or config.concat_transform is not None:
        return ""
    length, overlong = mix.pack.length, config.overlong or mix.pack.overlong
    count, records = int((lengths_N > length).sum()), f"its first {len(lengths_N):,} records"
    if overlong == "refuse":
        return said_of_longer(count, records, length)
    # A user who joins and cuts all records has chosen to cut them.
    cuts = overlong == "split" and mix.pack.method != "concat_and_split"
    if not (config.is_nested and cuts and count > _MANY_CUT * len(lengths_N)):
        return ""
    return (
        f"{count:,} of {records} are longer than pack.length {length:,}, and overlong is split: pieces behind the "
        "first are trained on without what they answer; use longer rows, or say overlong: drop"
    )


def require_words(source: str, first: Records, tags: Sequence[str]) -> str:
    """Return the result of ``doubt_of_words``, for a source of which some first records have texts with a given cost.

    Raises:
        ConfigError: No record has such a text, so no step could be planned.
    """
    doubt = doubt_of_words(first, tags)
    if doubt and any(
        unfit_words(first.others[tag])[first.usable_B].all() for tag in _texts_among(first, tags)
    ):
        raise ConfigError(f"sources.{source}: no step can be planned of its first records: {doubt}")
    return doubt


def doubt_of_words(first: Records, tags: Sequence[str], path: str = "") -> str:
    """Return a warning if first records have a text as a tag without a given cost: drawing one ends a run.

    Args:
        first: First records of the source, or of the file that ``path`` names.
        tags: Columns of whole samples that costs and strategies read, by their internal names.
        path: One of the source's later files.
    """
    for tag in _texts_among(first, tags):
        if fault := fault_of_words(first.others[tag], first.usable_B):
            whose = f"{path}'s" if path else "its"
            return (
                f"balance reads columns.{name_outside(tag)} of every sample, and one of {whose} first "
                f"{len(first.column):,} records has {fault}"
            )
    return ""


def _texts_among(first: Records, tags: Sequence[str]) -> list[str]:
    return [tag for tag in tags if tag in first.others and column_kind(tag).dtype == np.uint8]
