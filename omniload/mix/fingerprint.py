"""Digests of everything that must stay the same for a run to resume with the same samples.

Only what decides membership counts: seed, sources, weights, packing, tokens of a step, tokenizer, and the records
found. Ranks, microbatches, balance and runtime may change freely.
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
"""Keys that may change. The contents of files have digests of their own, and a cap either stops a run or does
nothing."""
_LATER_KEYS = (
    *("columns", "transforms", "images", "splits", "split", "key", "where", "dedupe"),
    *("overlong", "known_by"),
)
"""Keys that were added after the first release. An unused key leaves the digest as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """Facts that were found when a source was opened."""

    positions_per_epoch: int
    """Number of records."""
    order_digest: str
    """Digest of everything that decides the order: shards, their units, and the number of records of each unit."""
    shards_digest: str
    """Digest of the shards' names and sizes."""
    content_digest: str
    """Digest of the contents of the shards. It changes when a shard is replaced by another of the same name and
    size."""
    transforms_digest: str = ""
    """Digest of the files that its transforms read, such as a chat template; empty if they read none."""
    drawn_before_digest: str = ""
    """Digest of the records that another loader had drawn; empty if no records are left out for this reason."""


_NAMED = 3
"""Number of sources that a message names when several differ in the same way."""
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
"""Descriptions of the digests of ``fingerprint_of``."""


def fingerprint_of(
    mix: MixConfig,
    facts_S: Sequence[SourceFacts],
    *,
    tokenizer_digest: str = "",
    tokenizer_library: str = "",
) -> dict[str, str]:
    """Return a short digest of every part of the mix that decides the samples of a run.

    Args:
        mix: The declared mix.
        facts_S: Facts found in each source.
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
    """Return the parts of the fingerprint that belong to one source."""
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
    # An empty part is left out, so that states of releases without this part can still be resumed.
    if facts.transforms_digest:
        parts[f"sources.{name}.transforms"] = facts.transforms_digest
    if facts.drawn_before_digest:
        parts[f"sources.{name}.drawn_before"] = facts.drawn_before_digest
    return parts


def _digest(value: Mapping[str, object]) -> str:
    # The keys are sorted so that a release may reorder the keys of a model without refusing every state. The digest is
    # short because messages show it.
    return hashlib.blake2b(
        orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=6
    ).hexdigest()


def differences(
    saved: Mapping[str, Json], now: Mapping[str, str], *, before: str = "saved"
) -> list[str]:
    """Return the differences between two fingerprints, in words.

    Of many sources that differ in the same way, the first few are named and the rest are counted.

    Args:
        saved: The earlier fingerprint.
        now: The later fingerprint.
        before: What messages call the earlier fingerprint.
    """
    changed = sorted(k for k in saved.keys() | now.keys() if saved.get(k) != now.get(k))
    # Files of other names or sizes have other contents too, so the contents are not reported as a second difference.
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
    """Return the source of a digest, if any, and what the digest covers; ``there``: both fingerprints have it."""
    if not part.startswith("sources."):
        return "", _MEANING.get(part, "")
    # Split from the right: names of sources may contain dots, but names of parts do not.
    name = part.removeprefix("sources.")
    source, _, found = name.rpartition(".")
    if source and found in _MEANING:
        return f"of source {source!r}", _MEANING[found]
    return (
        (f"of source {name!r}", _KEYS) if there else (f"source {name!r}", "is in one of both alone")
    )
