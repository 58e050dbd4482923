"""Digests: names of bytes that also prove that the bytes are right."""

import hashlib
import re

from omniload.base.errors import IntegrityError

__all__ = ["check_digest", "digest_of", "hasher_of", "verified"]

# md5 and sha1, which the grammar allows, are left out, because other bytes with the same digest can be made.
_PATTERN = re.compile(r"(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})\Z")


def check_digest(text: str) -> str:
    """Return ``text`` if it is a digest of an algorithm that is safe to rely on.

    Raises:
        ValueError: It is not ``sha256:`` or ``sha512:`` and lower-case hexadecimal digits.
    """
    if _PATTERN.match(text) is None:
        raise ValueError(
            f"digest {text[:150]!r} is not sha256: with 64 or sha512: with 128 hexadecimal digits"
        )
    return text


def hasher_of(digest: str) -> "hashlib._Hash":
    """Return a fresh hash of the algorithm ``digest`` names."""
    return hashlib.new(check_digest(digest).partition(":")[0])


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Return the sha256 digest of ``data``."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def verified(data: bytes, digest: str, *, name: str) -> bytes:
    """Return ``data`` if it has ``digest``.

    Raises:
        IntegrityError: It has another digest.
    """
    # Use the algorithm that the digest names, because the digest of another one would never match.
    hasher = hasher_of(digest)
    hasher.update(data)
    found = f"{hasher.name}:{hasher.hexdigest()}"
    if found != digest:
        raise IntegrityError(
            f"{name}: {len(data)} bytes have digest {found}, not {digest}; "
            "what stores or carries them has altered them"
        )
    return data
