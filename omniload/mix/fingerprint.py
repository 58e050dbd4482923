"""What must stay the same for a run to resume with the same samples.

Only what decides membership counts: seed, sources, weights, packing, tokens of a step,
tokenizer, and the records found. Ranks, microbatches, balance and runtime may
change freely.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from omniload.base.state import Json
from omniload.base.units import counted
from omniload.mix.config import MixConfig
from omniload.mix.sources import SourceBase

__all__ = ["SourceFacts", "differences", "fingerprint_of", "source_parts"]

_NOT_MEMBERSHIP = {
    "tags",
    "on_error",
    "path",
    "max_repetition",
    "max_fraction",
    "drawn_before",
    "version",
}
"""What may change: what lies in files is told by what they hold, and a cap stops a run or does nothing."""
_LATER_KEYS = (
    *("columns", "transforms", "images", "splits", "split", "key", "where", "dedupe"),
    *("overlong", "known_by"),
)
"""Keys that came after the first release: one that is not used leaves the digest as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """What was found when a source was opened."""

    positions_per_epoch: int
    """Records."""
    order_digest: str
    """Digest of what their order is made from: shards, their units, and how many records each has."""
    shards_digest: str
    """Digest of the shards' names and sizes."""
    content_digest: str
    """Digest of what the shards hold: one that was replaced by another of its name and size is another."""
    transforms_digest: str = ""
    """Digest of the files that its transforms read, such as a chat template; empty where they read none."""
    drawn_before_digest: str = ""
    """Digest of the records that another loader had drawn; empty where none are left out for that."""


_NAMED = 3
"""Sources that a message names of those that differ alike."""
_KEYS = "keys other than path, tags and on_error, or the splits of the mix"
_MEANING = {
    "mix": "the section mix: weights, stages or groups",
    "pack": "the section pack",
    "tokenizer": "the file of the tokenizer",
    "tokenizer.library": "the library that reads it",
    "records": "how many records it has",
    "order": "its shards, their units or their records",
    "shards": "the names or sizes of its files",
    "content": "the bytes in files of the same names and sizes",
    "transforms": "the files that its transforms read, such as a chat template",
    "drawn_before": "the records that another loader had drawn",
}
"""What the digests of ``fingerprint_of`` are of."""


def fingerprint_of(
    mix: MixConfig,
    facts_S: Sequence[SourceFacts],
    *,
    tokenizer_digest: str = "",
    tokenizer_library: str = "",
) -> dict[str, str]:
    """Return a short digest of every part of the mix that decides what is trained on.

    Args:
        mix: The declared mix.
        facts_S: What was found in each source.
        tokenizer_digest: Digest of the tokenizer's file.
        tokenizer_library: Name and version of the library that reads it.

    Returns:
        Digests by part: ``seed``, ``mix``, ``pack``, ``batch.tokens``, ``tokenizer``,
        ``tokenizer.library``, and for each source ``sources.NAME`` (what was declared),
        ``sources.NAME.records``, ``.order``, ``.shards``, ``.content``, ``.transforms`` and ``.drawn_before`` (what
        was found).
    """
    parts: dict[str, str] = {
        "seed": str(mix.seed),
        "batch.tokens": str(mix.batch.tokens),
        "mix": _digest(mix.mix.model_dump(mode="json")),
        "pack": _digest(mix.pack.model_dump(mode="json")),
        "tokenizer": tokenizer_digest,
        "tokenizer.library": tokenizer_library,
    }
    for (name, source), facts in zip(mix.sources.items(), facts_S, strict=True):
        parts |= source_parts(name, source, facts)
    return parts


def source_parts(name: str, source: SourceBase, facts: SourceFacts) -> dict[str, str]:
    """Return the parts of the fingerprint that speak of one source."""
    declared = source.model_dump(mode="json", exclude=_NOT_MEMBERSHIP)
    for key in _LATER_KEYS:
        if not declared.get(key):
            declared.pop(key, None)
    if "splits" in declared:  # their order counts
        declared["splits"] = list(declared["splits"].items())
    parts = {
        f"sources.{name}": _digest(declared),
        f"sources.{name}.records": str(facts.positions_per_epoch),
        f"sources.{name}.order": facts.order_digest,
        f"sources.{name}.shards": facts.shards_digest,
        f"sources.{name}.content": facts.content_digest,
    }
    # Left out where there is none: states of releases that did not know the part are gone on from.
    if facts.transforms_digest:
        parts[f"sources.{name}.transforms"] = facts.transforms_digest
    if facts.drawn_before_digest:
        parts[f"sources.{name}.drawn_before"] = facts.drawn_before_digest
    return parts


def _digest(value: Mapping[str, object]) -> str:
    # Sorted: a release that moves the keys of a model must not turn every state away. Short, as they stand in
    # messages.
    return hashlib.blake2b(
        orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=6
    ).hexdigest()


def differences(
    saved: Mapping[str, Json], now: Mapping[str, str], *, before: str = "saved"
) -> list[str]:
    """Return what differs between two fingerprints, in words; of many sources alike the first, and how many more.

    Args:
        saved: The earlier one.
        now: The later one.
        before: What messages call the earlier one.
    """
    changed = sorted(k for k in saved.keys() | now.keys() if saved.get(k) != now.get(k))
    # Files of other names or sizes hold other bytes: that is no second thing that differs.
    found = {
        k.removesuffix(".shards") for k in changed if k.count(".") > 1 and k.endswith(".shards")
    }
    said: list[str] = []
    alike = Counter[str]()
    for part in changed:
        if part.removesuffix(".content") in found and part not in found:
            continue
        of, what = _meaning(part, there=part in saved and part in now)
        alike[what] += bool(of)
        if alike[what] <= _NAMED:
            digests = (
                f"{part}: {saved.get(part) or 'absent'} {before}, {now.get(part) or 'absent'} now"
            )
            said.append(", ".join(filter(None, (digests, f"{of} {what}".strip()))))
    more = {what: count - _NAMED for what, count in alike.items() if count > _NAMED}
    return [
        *said,
        *(f"and of {counted(count, 'more source')} {what}" for what, count in more.items()),
    ]


def _meaning(part: str, *, there: bool) -> tuple[str, str]:
    """Return which source a digest is of, or nothing, and what of it; ``there``: in both fingerprints."""
    if not part.startswith("sources."):
        return "", _MEANING.get(part, "")
    # From the right: names of sources may have dots, and names of parts have none.
    name = part.removeprefix("sources.")
    source, _, found = name.rpartition(".")
    if source and found in _MEANING:
        return f"of source {source!r}", _MEANING[found]
    return (
        (f"of source {name!r}", _KEYS) if there else (f"source {name!r}", "is in one of both alone")
    )
