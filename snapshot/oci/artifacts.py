"""Artifacts: small documents about an image, kept in its registry and found by its digest."""

import io
from collections.abc import Mapping

import orjson

from omniload.base.errors import IntegrityError
from snapshot.oci.digest import digest_of
from snapshot.oci.manifest import (
    EMPTY_CONFIG,
    MANIFEST_TYPE,
    Descriptor,
    Manifest,
    encode,
    parse_manifest,
)
from snapshot.oci.store import ImageStore, small_blob

__all__ = ["artifact", "push_artifact"]


def push_artifact(
    store: ImageStore,
    subject: str,
    artifact_type: str,
    data: bytes,
    annotations: Mapping[str, str] | None = None,
) -> str:
    """Store a document that refers to an image; the same one again changes nothing.

    Args:
        store: Where the image is.
        subject: Digest of the image's manifest.
        artifact_type: What the document is, as a media type.
        data: The document.
        annotations: What its readers may choose by, without fetching it.

    Returns:
        Digest of the artifact's manifest.

    Raises:
        FileNotFoundError: The image is not there.
    """
    stored = store.manifest(subject)
    config = _pushed(store, EMPTY_CONFIG, b"{}")
    layer = _pushed(store, artifact_type, data)
    manifest = Manifest(
        schema_version=2,
        media_type=MANIFEST_TYPE,
        artifact_type=artifact_type,
        config=config,
        layers=(layer,),
        subject=Descriptor(
            media_type=stored.media_type, digest=stored.digest, size=len(stored.data)
        ),
        annotations=dict(sorted((annotations or {}).items())),
    )
    # Keys in one order, so that the same document has the same digest wherever it was made.
    data = orjson.dumps(orjson.loads(encode(manifest)), option=orjson.OPT_SORT_KEYS)
    return store.push_manifest(data, MANIFEST_TYPE)


def artifact(store: ImageStore, found: Descriptor) -> bytes:
    """Return the document of an artifact that the store lists for an image.

    It is what somebody with access to the repository wrote: right as bytes, and no more
    to be relied on than that.

    Raises:
        IntegrityError: It is not what its manifest says.
    """
    stored = store.manifest(found.digest)
    manifest = parse_manifest(stored.data, stored.media_type, name=f"artifact {found.digest}")
    if not isinstance(manifest, Manifest) or len(manifest.layers) != 1:
        raise IntegrityError(f"artifact {found.digest}: is no document of one layer")
    return small_blob(store, manifest.layers[0])


def _pushed(store: ImageStore, media_type: str, data: bytes) -> Descriptor:
    blob = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
    store.push_blob(blob, lambda: io.BytesIO(data))
    return blob
