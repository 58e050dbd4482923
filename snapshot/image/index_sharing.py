"""Indexes of layers beside their image, so that a layer is read whole by one node and not by each.

An index says which bytes of a layer are right, and nothing in the manifest says whether the
index is. So it is used only where somebody vouches for it: who knows the *key* signed it, or
who mounts says that whoever may write to the repository is trusted.
"""

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omniload.base.errors import ConfigError, IntegrityError, OmniloadError
from omniload.base.log import get_logger
from snapshot.image.index_checking import check_index
from snapshot.image.index_file import MAX_INDEX_BYTES, VERSION, decode_index, encode_index
from snapshot.image.layer_index import LayerIndex
from snapshot.oci.artifacts import push_artifact
from snapshot.oci.manifest import Descriptor, Manifest, parse_manifest
from snapshot.oci.store import ImageStore

__all__ = ["INDEX_TYPE", "SharedIndexes", "key_of", "push_index", "signature_of"]

_log = get_logger(__name__)

INDEX_TYPE = f"application/vnd.omniload.layer-index.v{VERSION}"
"""Media type of an index beside an image."""
_LAYER = "io.omniload.index.layer"
_SIGNATURE = "io.omniload.index.signature"
_MAX_REFERRERS = 1000
_MAX_KEY_BYTES = 4096


def key_of(path: str) -> bytes:
    """Return the key in a file.

    Raises:
        ConfigError: It cannot be read, or is too short to be one.
    """
    try:
        with Path(path).open("rb") as file:
            key = file.read(_MAX_KEY_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"index_key_file={path} cannot be read: {error}") from error
    if len(key) < 16:
        raise ConfigError(f"index_key_file={path} holds {len(key)} bytes; write 16 or more")
    return key


def signature_of(key: bytes, layer: str, diff_id: str, data: bytes) -> str:
    """Return what shows that who knows the key made this index for this layer: HMAC-SHA256, in hex."""
    said = f"{INDEX_TYPE}\n{layer}\n{diff_id}\n{hashlib.sha256(data).hexdigest()}"
    return hmac.new(key, said.encode(), hashlib.sha256).hexdigest()


def push_index(store: ImageStore, image: str, index: LayerIndex, key: bytes | None = None) -> str:
    """Keep the index of a layer beside an image; return the digest of the artifact.

    Args:
        store: Where the image is.
        image: Digest of its manifest.
        index: Built from the whole layer, and so proved.
        key: Signs it.

    Raises:
        FileNotFoundError: The image is not there.
    """
    data = encode_index(index)
    annotations = {_LAYER: index.blob_digest}
    if key is not None:
        annotations[_SIGNATURE] = signature_of(key, index.blob_digest, index.diff_id, data)
    return push_artifact(store, image, INDEX_TYPE, data, annotations)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedIndexes:
    """The indexes beside one image, and whose are believed."""

    store: ImageStore
    image: str
    """Digest of the manifest."""
    key: bytes | None = None
    """Those signed with it are used."""
    any_pusher: bool = False
    """All are: whoever may write to the repository is trusted."""

    def find(self, layer: Descriptor, diff_id: str) -> LayerIndex | None:
        """Return the index of a layer, if one is there that may be believed; never one that fails a check.

        What goes wrong costs a warning: the layer can still be read whole.
        """
        if self.key is None and not self.any_pusher:
            return None
        try:
            listed = self.store.referrers(self.image, INDEX_TYPE)[:_MAX_REFERRERS]
        except (OmniloadError, OSError, ValueError) as error:
            _log.warning("no indexes from %s: %s", self.store.location, error)
            return None
        for found in listed:
            if found.annotations.get(_LAYER) != layer.digest:
                continue
            try:
                return self._checked(found, layer, diff_id)
            except (OmniloadError, OSError, ValueError) as error:
                _log.warning("index %s: %s; it is passed over", found.digest, error)
        return None

    def _checked(self, found: Descriptor, layer: Descriptor, diff_id: str) -> LayerIndex:
        name = f"index {found.digest}"
        signature = found.annotations.get(_SIGNATURE, "")
        if self.key is not None and not self.any_pusher and not signature:
            raise IntegrityError("is not signed")
        stored = self.store.manifest(found.digest)
        manifest = parse_manifest(stored.data, stored.media_type, name=name)
        if not isinstance(manifest, Manifest) or len(manifest.layers) != 1:
            raise IntegrityError("is no document of one layer")
        data = b"".join(_bounded(self.store, manifest.layers[0]))
        if not self.any_pusher:
            assert self.key is not None
            expected = signature_of(self.key, layer.digest, diff_id, data)
            if not hmac.compare_digest(signature.encode(), expected.encode()):
                raise IntegrityError("is not signed with this key, or was altered since")
        return check_index(decode_index(data, name=name), layer, diff_id)


def _bounded(store: ImageStore, blob: Descriptor) -> Iterator[bytes]:
    if blob.size > MAX_INDEX_BYTES:
        raise IntegrityError(f"has {blob.size} bytes, more than {MAX_INDEX_BYTES}")
    return store.blob_chunks(blob)
