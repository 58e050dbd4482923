"""What must stay the same for a run to resume with the same samples.

Only what decides membership counts: seed, sources, weights, packing, tokens of a step,
tokenizer, and the records found. Ranks, microbatches, balance and runtime may
change freely.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from omniload.mix.config import MixConfig
from omniload.mix.sources import SourceBase

__all__ = ["SourceFacts", "fingerprint_of", "source_parts"]

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
    "overlong",
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
