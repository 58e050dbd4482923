"""Attributes of a file besides its bytes, and the manifest that carries both."""

import errno
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fusefs.format.content import Content
from fusefs.format.manifest import Manifest, encode_manifest
from fusefs.format.manifest_header import check_xattrs_fit

__all__ = ["PLAIN_MODE", "Attributes", "checked_xattrs", "encoded", "manifest_for"]

PLAIN_MODE = 0o644
"""Mode of a file that was given none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """Attributes of a file besides its bytes; default values need no manifest."""

    mode: int | None = None
    mtime_ns: int | None = None
    """Time of the last change; None: the time of writing."""
    xattrs: Mapping[str, bytes] | None = None

    @property
    def are_default(self) -> bool:
        """Return whether a plain file can carry them."""
        return self.mode is None and self.mtime_ns is None and not self.xattrs

    @property
    def given(self) -> dict[str, Any]:
        """Attributes that are not None, by name: the fields to change in a manifest, or in other attributes."""
        named = {"mode": self.mode, "mtime_ns": self.mtime_ns, "xattrs": self.xattrs}
        return {name: value for name, value in named.items() if value is not None}

    def over(self, known: Manifest | None) -> "Attributes":
        """Return the attributes of the version after ``known``: these, and for the rest those of ``known``."""
        if known is None:
            return self
        # The mode of a plain file needs no manifest, so the next version may be plain again.
        kept_mode = known.mode if known.mode != PLAIN_MODE else None
        return Attributes(
            mode=self.mode if self.mode is not None else kept_mode,
            mtime_ns=self.mtime_ns,
            # Given attributes replace all earlier ones, because the last one may have been removed.
            xattrs=dict(known.xattrs if self.xattrs is None else self.xattrs) or None,
        )


def manifest_for(content: Content, attributes: Attributes) -> Manifest:
    """Return the manifest of durable content with attributes."""
    return Manifest(
        mtime_ns=attributes.mtime_ns if attributes.mtime_ns is not None else time.time_ns(),
        mode=attributes.mode if attributes.mode is not None else PLAIN_MODE,
        xattrs=dict(attributes.xattrs or {}),
        segments=() if isinstance(content, bytes) else content,
        inline=content if isinstance(content, bytes) else b"",
    )


def encoded(manifest: Manifest, path: str) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        OSError: ``ENOSPC``: the attributes do not fit its header; ``EINVAL``: JSON cannot hold them as text.
    """
    _check_text((manifest.target or "", *manifest.xattrs), path)
    try:
        return encode_manifest(manifest)
    except ValueError as error:
        raise OSError(errno.ENOSPC, str(error), path) from error


def checked_xattrs(xattrs: Mapping[str, bytes], path: str | None) -> Mapping[str, bytes]:
    """Return extended attributes that will fit whenever the file is published.

    Raises:
        OSError: ``ENOSPC``: they do not fit; ``EINVAL``: a name is not UTF-8. Raised now, because an error at the close
            would lose the content.
    """
    _check_text(xattrs, path)
    try:
        check_xattrs_fit(xattrs)
    except ValueError as error:
        raise OSError(errno.ENOSPC, str(error), path) from error
    return xattrs


def _check_text(given: Iterable[str], path: str | None) -> None:
    """Refuse text that JSON cannot hold; otherwise the error would be that it is too long, or a defect."""
    for text in given:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise OSError(
                errno.EINVAL, f"{text!r} is no UTF-8, which a manifest holds", path
            ) from error
