"""The part of a manifest that is read at every restore, kept beside a tree as JSON."""

import json
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from omniload.base.errors import StateError
from snapshot.env.key.keys import key_of

if TYPE_CHECKING:
    from snapshot.env.format.manifest import Manifest

__all__ = ["VERSION", "TreeHead", "decode_head", "encode_head"]

VERSION = 1


class TreeHead(NamedTuple):
    """What a mount has to know of a snapshot."""

    key: str
    document: dict[str, Any]
    """What the key is made of."""
    targets: list[str]
    """Names of the targets."""
    used: list[int]
    """Numbers of the targets that hold an entry."""
    raw_bytes: int
    """Bytes of all files."""

    @classmethod
    def of(cls, manifest: "Manifest") -> Self:
        """Return the head of a manifest."""
        return cls(
            manifest.head.key,
            manifest.head.document,
            [target.name for target in manifest.head.targets],
            sorted({entry.target for entry in manifest.entries}),
            manifest.raw_bytes,
        )


def encode_head(head: TreeHead) -> str:
    """Return the text of a head."""
    return json.dumps({"version": VERSION, **head._asdict()})


def decode_head(text: bytes) -> TreeHead:
    """Read a head; one without a version is of the first.

    Raises:
        StateError: It is damaged, of another version, or its key is not that of its document.
    """
    try:
        fields = json.loads(text)
        version = fields.pop("version", VERSION)
        if version != VERSION:
            raise StateError(f"head of a tree has version {version!r}, this code reads {VERSION}")
        head = TreeHead(**fields)
        _check(head)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"head of a tree is damaged: {error}; fetch the tree again") from error
    return head


def _check(head: TreeHead) -> None:
    """Raise ``ValueError`` where a field cannot be what was written."""
    if not isinstance(head.document, dict) or key_of(head.document) != head.key:
        raise ValueError(f"key {head.key!r} is not that of its document")
    if not isinstance(head.targets, list) or not all(type(each) is str for each in head.targets):
        raise ValueError(f"targets {head.targets!r} are no names")
    numbers = range(len(head.targets))
    if not isinstance(head.used, list) or not all(
        type(each) is int and each in numbers for each in head.used
    ):
        raise ValueError(f"used targets {head.used!r} of {len(head.targets)}")
    if type(head.raw_bytes) is not int or head.raw_bytes < 0:
        raise ValueError(f"{head.raw_bytes!r} bytes")
