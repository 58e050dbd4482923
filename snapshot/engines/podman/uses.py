"""Layers that an engine uses, kept on disk so that a restarted store finds them again.

::

    FOLDER/v1/KEY/LAYER.json     KEY is sha256 of the mount point and the reference

    {"omniload_layer_use": 1, "reference": ..., "layer": ..., "image": ..., "uses": 2}

An engine keeps the path of a layer for as long as it has an image.
"""

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger
from omniload.base.reading import read_kept_file
from omniload.base.writing import write_whole
from snapshot.oci.digest import check_digest
from snapshot.oci.reference import Reference
from snapshot.private_folder import private_folder

__all__ = ["VERSION", "LayerUses"]

_log = get_logger(__name__)

VERSION = 1
_KEY = "omniload_layer_use"
_MAX_BYTES = 64 << 10


class LayerUses:
    """Counts of uses, one file for each used layer. For one process; safe in its threads."""

    def __init__(self, folder: str | Path, mountpoint: str) -> None:
        self._folder = Path(folder) / f"v{VERSION}"
        self._mountpoint = mountpoint
        self._lock = threading.Lock()

    def image_of(self, reference: Reference, layer: str) -> str | None:
        """Return the digest of the image of a layer in use; None for a layer that is not used."""
        with self._lock:
            found = self._read(reference, layer)
        return None if found is None else found[0]

    def has(self, reference: Reference) -> bool:
        """Return whether any layer of a reference is used."""
        return any(self._folder_of(reference).glob("*.json"))

    def add(self, reference: Reference, layer: str, image: str) -> int:
        """Count one use more and return the number of uses."""
        with self._lock:
            found = self._read(reference, layer)
            # The digest of the image, not its tag, which may name another image by the next look.
            uses = 1 + (0 if found is None else found[1])
            self._write(reference, layer, check_digest(image), uses)
            return uses

    def release(self, reference: Reference, layer: str) -> int:
        """Count one use less and return the number of remaining uses."""
        with self._lock:
            found = self._read(reference, layer)
            if found is None:
                return 0
            image, uses = found
            if uses > 1:
                self._write(reference, layer, image, uses - 1)
            else:
                # Remove the file instead of writing 0, because ``has`` looks for any file.
                self._path(reference, layer).unlink(missing_ok=True)
            return uses - 1

    def _folder_of(self, reference: Reference) -> Path:
        # Include the mount point, because another store may use the same folder.
        text = f"{self._mountpoint}\0{reference}"
        return self._folder / hashlib.sha256(text.encode()).hexdigest()

    def _path(self, reference: Reference, layer: str) -> Path:
        return self._folder_of(reference) / f"{check_digest(layer).replace(':', '-')}.json"

    def _read(self, reference: Reference, layer: str) -> tuple[str, int] | None:
        path = self._path(reference, layer)
        try:
            held = read_kept_file(path, most_bytes=_MAX_BYTES, what="a count of uses")
            return _decoded(json.loads(held), layer)
        except FileNotFoundError:
            return None
        except (OmniloadError, OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            _log.warning("%s: no count of uses: %r; it is begun anew", path, error)
            return None

    def _write(self, reference: Reference, layer: str, image: str, uses: int) -> None:
        path = self._path(reference, layer)
        value = {_KEY: VERSION, "reference": str(reference), "layer": layer}
        try:
            private_folder(self._folder)
            path.parent.mkdir(exist_ok=True)
            write_whole(path, json.dumps({**value, "image": image, "uses": uses}).encode())
        except OSError as error:
            # The container starts nevertheless; without this record the layer is found as long as its tag stays.
            _log.warning("%s: the use of a layer is not kept: %s", path, error)


def _decoded(value: Any, layer: str) -> tuple[str, int]:  # noqa: ANN401 -- any JSON
    if value[_KEY] != VERSION or value["layer"] != layer:
        raise ValueError(f"version {value[_KEY]!r} of layer {value['layer']!r}")
    return check_digest(value["image"]), max(int(value["uses"]), 1)
