"""Names that an engine asks a layer store for, checked, and what the store says of a layer.

::

    DIR/BASE64/sha256:HEX/diff/     files of the layer, for overlayfs
                         /info      what the engine keeps of a layer, as JSON
                         /blob      the layer as the registry has it
                         /use       created: the layer is used once more; never there

BASE64 is the reference of the image as the engine writes it. A name that is not exactly
one of these is not there: nothing is asked of any registry for it.

Source:
    containers/storage, ``drivers/overlay``, "additional layer store"; its 1.43 (podman 4.3).
"""

import base64
import binascii
import json
from collections.abc import Collection

from omniload.base.errors import ConfigError
from snapshot.oci.digest import check_digest
from snapshot.oci.manifest import Descriptor, compression_of
from snapshot.oci.reference import Reference, address_of

__all__ = ["FILES", "digest_of_name", "info_of", "reference_of", "store_address"]

FILES = (b"diff", b"info", b"blob")
"""What a layer's directory holds."""
_COMPRESSION = {"tar": 0, "gzip": 2, "zstd": 4}
"""Numbers that containers/storage gives them."""


def reference_of(name: bytes, registries: Collection[str] = ()) -> Reference | None:
    """Return the reference that a directory of the store is named by; None where it names none.

    Args:
        name: Base64 in its one canonical form, of a reference with a registry in it.
        registries: Hosts, with ports, that may be asked; all where none is given.
    """
    try:
        text = base64.b64decode(name, validate=True)
        if base64.b64encode(text) != name:  # stray bits at the end would be a second name
            return None
        reference = Reference.parse(text.decode("ascii"))
    except (binascii.Error, UnicodeDecodeError, ConfigError):
        return None
    if str(reference) != text.decode("ascii"):  # another spelling would be a second directory of it
        return None
    return reference if not registries or reference.registry in registries else None


def digest_of_name(name: bytes) -> str | None:
    """Return the digest of the layer that a directory is named by; None where it names none."""
    try:
        return check_digest(name.decode("ascii"))
    except (UnicodeDecodeError, ValueError):
        return None


def store_address(reference: Reference, plain: Collection[str] = ()) -> str:
    """Return a reference as ``open_store`` takes it; registries among ``plain`` are spoken to without TLS."""
    return f"{'http://' if reference.registry in plain else ''}{address_of(str(reference))}"


def info_of(layer: Descriptor, diff_id: str, stream_bytes: int) -> bytes:
    """Return what an engine wants to know of a layer.

    ``stream_bytes`` is its uncompressed size; with a table of contents that of its files.
    """
    return json.dumps(
        {
            "compressed-diff-digest": layer.digest,
            "compressed-size": layer.size,
            "diff-digest": diff_id,
            "diff-size": stream_bytes,
            "compression": _COMPRESSION[compression_of(layer)],
        }
    ).encode()
