"""Images that a layer store was asked for, by name: resolved once, and looked up again if their tags moved.

::

    DIR/BASE64/sha256:HEX/diff/     files of the layer, for overlayfs
                         /info      the engine's record of a layer, as JSON
                         /blob      the layer as the registry has it
                         /use       created: the layer is used once more; never exists

BASE64 is the reference of the image as the engine writes it.

Source:
    containers/storage, ``drivers/overlay``, "additional layer store"; its 1.43 (podman 4.3).
"""

import base64
import binascii
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import ClassVar

from pydantic import ValidationInfo, field_validator
from typing_extensions import override

from fusefs.bridge.api.options import BridgeOptions
from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import ConfigError, OmniloadError
from omniload.base.log import get_logger
from snapshot.image.block.loader import BlockTier, RegistryTier
from snapshot.image.layer.index import BlockRef, LayerIndex
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import check_diff_id, index_layer
from snapshot.image.layer.toc import format_of
from snapshot.image.mount.daemon import READ_AHEAD_BYTES, NodeMount
from snapshot.oci.digest import check_digest
from snapshot.oci.image import Image, open_store, resolve
from snapshot.oci.manifest import Descriptor, compression_of
from snapshot.oci.reference import Reference, address_of
from snapshot.oci.store import ImageStore

__all__ = [
    "FILES",
    "ImageOpener",
    "LayerStoreMount",
    "RoutedTier",
    "ServedImage",
    "ServedImages",
    "digest_of_name",
    "info_of",
    "reference_of",
]

FILES = (b"diff", b"info", b"blob")
"""Names in a layer's directory."""
# Numbers of compressions in containers/storage.
_COMPRESSION = {"tar": 0, "gzip": 2, "zstd": 4}


def reference_of(name: bytes, registries: Collection[str] = ()) -> Reference | None:
    """Return the reference that a directory of the store is named by; None if it names none.

    Args:
        name: Base64 in its one canonical form, of a reference with a registry in it.
        registries: Hosts, with ports, that may be asked; all if empty.
    """
    # Programs look for names of all kinds in a folder; a registry is asked only for an exact reference.
    try:
        text = base64.b64decode(name, validate=True)
        if base64.b64encode(text) != name:  # stray bits at the end would make a second name
            return None
        reference = Reference.parse(text.decode("ascii"))
    except (binascii.Error, UnicodeDecodeError, ConfigError):
        return None
    # another spelling would be a second directory of the same reference
    if str(reference) != text.decode("ascii"):
        return None
    return reference if not registries or reference.registry in registries else None


def digest_of_name(name: bytes) -> str | None:
    """Return the digest of the layer that a directory is named by; None if it names none."""
    try:
        return check_digest(name.decode("ascii"))
    except (UnicodeDecodeError, ValueError):
        return None


def info_of(layer: Descriptor, diff_id: str, stream_bytes: int) -> bytes:
    """Return the facts that an engine wants to know of a layer.

    ``stream_bytes`` is its uncompressed size; with a table of contents, the size of its files.
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


_log = get_logger(__name__)

# A lookup must neither fail for long nor ask all the time: for this many seconds, a failed reference is not
# asked for again, and a tag is not looked up again.
PATIENCE_S = 10.0
MAX_IMAGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedImage:
    """An image whose layers are shown, or those of its layers that can be read in parts."""

    reference: Reference
    store: ImageStore
    image: Image
    indexes: tuple[LayerIndex | None, ...]
    """Indexes of the layers, lowest first; None for a layer that is left to the engine."""

    def place_of(self, digest: str) -> int | None:
        """Return the layer, from 0, that has a digest and can be shown; None if there is none."""
        for place, layer in enumerate(self.image.layers):
            if layer.digest == digest and self.indexes[place] is not None:
                return place
        return None

    def shows_as(self, other: "ServedImage") -> bool:
        """Return whether the same layers of the same image are shown."""
        shown, theirs = ([i is None for i in each.indexes] for each in (self, other))
        return self.image.digest == other.image.digest and shown == theirs


class RoutedTier(BlockTier):
    """The registries of all images: each blob is asked for where an image with it was found."""

    # A registry gives a blob by repository, and may refuse it in another repository.
    def __init__(self) -> None:
        self._tiers: dict[str, list[RegistryTier]] = {}
        self._lock = threading.Lock()

    def add(self, served: ServedImage) -> None:
        """Use this image's repository, too, for its layers, before the repositories known so far."""
        tier = RegistryTier(served.store)
        with self._lock:
            for layer in served.image.layers:
                # Limited, because the lowest layers are in every image that is looked up.
                known = self._tiers.get(layer.digest, [])
                self._tiers[layer.digest] = [tier, *known][:4]

    @override
    def fetch(self, index: LayerIndex, blocks: Sequence[BlockRef]) -> tuple[dict[str, bytes], int]:
        """Return blocks from the first repositories that have them undamaged."""
        with self._lock:
            tiers = list(self._tiers.get(index.blob_digest, ()))
        problem: Exception = FileNotFoundError(f"no image with layer {index.blob_digest} is served")
        found, moved, answered = dict[str, bytes](), 0, False
        for tier in tiers:
            absent = [ref for ref in blocks if ref.digest not in found]
            if not absent:
                break
            try:
                came, size = tier.fetch(index, absent)
            # Also if a repository wants a login or holds other bytes, because the layer is the same in the next one.
            except (OmniloadError, FileNotFoundError) as error:
                problem = error
                continue
            found, moved, answered = found | came, moved + size, True
        if not answered:
            raise problem
        return found, moved


class LayerStoreMount(NodeMount):
    """What a layer store needs to know; a ``window`` of 0 records nothing."""

    repeated: ClassVar[Mapping[str, str]] = {"mirror": "mirrors", "registry": "registries"}
    closed: ClassVar[frozenset[str]] = frozenset({"mountpoint", "bridge"})

    registries: tuple[str, ...] = ()
    """Whose images are shown; those of all where none is given."""
    index: bool = False
    """Show layers without a table of contents, too; each is read whole, once, to index it."""
    # Containers have users of their own, and need the devices and set-uid programs of their images.
    bridge: BridgeOptions = BridgeOptions(
        allow_other=True, trusted=True, kernel_read_ahead=READ_AHEAD_BYTES
    )

    @field_validator("registries", "mirrors")
    @classmethod
    def _name_hosts(cls, hosts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        # A malformed host would match no image, ever, without a message.
        for host in hosts:
            bare = host.removeprefix("http://") if info.field_name == "mirrors" else host
            Reference(registry=bare, repository="any", tag="any")
        return hosts


class ImageOpener:
    """Finds an image in its registry, and the indexes of its layers."""

    def __init__(self, settings: LayerStoreMount) -> None:
        self._settings = settings

    def __call__(self, reference: Reference, digest: str | None = None) -> ServedImage:
        """Resolve a reference, or an image of its repository by digest.

        Raises:
            ConfigError: There is no such image.
            UnavailableError: The registry does not answer.
            IntegrityError: Its documents contradict themselves.
        """
        settings = self._settings
        store, name = open_store(address_of(str(reference)), mirrors=settings.mirrors)
        try:
            image = resolve(store, digest or name, settings.platform)
            pairs = zip(image.layers, image.config.rootfs.diff_ids, strict=True)
            indexes = tuple(self._index(store, layer, diff_id) for layer, diff_id in pairs)
        except BaseException:
            # A reference without an image is asked for again and again, so its connections must not add up.
            store.close()
            raise
        return ServedImage(reference=reference, store=store, image=image, indexes=indexes)

    def _index(self, store: ImageStore, layer: Descriptor, diff_id: str) -> LayerIndex | None:
        cache = IndexCache(Path(self._settings.cache) / "indexes")
        found = cache.get(layer.digest)
        if found is None and not self._settings.index and format_of(layer) != "zstd:chunked":
            _log.info("layer %s has no table of contents: left to the engine", layer.digest)
            return None
        try:
            found = found or index_layer(store, layer, cache)
        except ConfigError as error:
            _log.info("%s; it is left to the engine", error)
            return None
        check_diff_id(found, diff_id)
        return found


@dataclass(slots=True)
class _Known:
    """The state of one reference."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    served: ServedImage | None = None
    """Image that its tag means now."""
    in_use: dict[str, ServedImage] = field(default_factory=dict)
    """Images that its tag meant when layers were used, by digest."""
    asked_s: dict[str | None, float] = field(default_factory=dict)
    """Time of the last question to the registry for an image, by digest; None: for the meaning of the tag."""

    def images(self) -> tuple[ServedImage, ...]:
        """Return all known images, the present image of the tag first."""
        return (*filter(None, [self.served]), *self.in_use.values())

    def holding(self, layer: str) -> ServedImage | None:
        """Return a known image that has a layer."""
        return next((each for each in self.images() if each.place_of(layer) is not None), None)


class ServedImages:
    """The images of a layer store, by reference. Safe in threads.

    ``pinned`` returns the image of a layer in use, by reference and layer, because its tag may
    have moved on. ``opened`` is called with each image that was found.
    """

    def __init__(
        self,
        opener: Callable[[Reference, str | None], ServedImage],
        pinned: Callable[[Reference, str], str | None] = lambda *_: None,
        opened: Callable[[ServedImage], None] = lambda _: None,
        clock: Clock | None = None,
    ) -> None:
        self._opener, self._pinned, self._opened = opener, pinned, opened
        self._clock = clock or SystemClock()
        self._known: dict[str, _Known] = {}
        self._all: list[ServedImage] = []
        self._lock = threading.Lock()

    def of(self, reference: Reference) -> ServedImage | None:
        """Return the image of a reference; None if there is none, or if it is not available now."""
        known = self._entry(reference)
        if known is None:
            return None
        # One lock for each reference, so that a slow registry delays only its own images.
        with known.lock:
            known.served = known.served or self._ask(known, reference)
            return known.served

    def holding(self, reference: Reference, layer: str) -> ServedImage | None:
        """Return an image of a reference that has a layer; None if there is none."""
        known = self._entry(reference)
        if known is None:
            return None
        with known.lock:
            if (found := known.holding(layer)) is not None:
                return found
            # Before the tag is looked at: the engine has kept the path of this layer, whatever the tag means now.
            digest = self._pinned(reference, layer)
            if digest is not None and (found := self._ask(known, reference, digest)) is not None:
                known.in_use[digest] = found
                known.served = known.served or found
            # Ask only if the engine wants a layer that the known image of the tag lacks: the tag may have moved.
            if known.holding(layer) is None:
                known.served = self._ask(known, reference) or known.served
            return known.holding(layer)

    def close(self) -> None:
        """Close the connections."""
        for served in self._all:
            served.store.close()

    def _entry(self, reference: Reference) -> _Known | None:
        with self._lock:
            found = self._known.get(str(reference))
            if found is None:
                # References that led to nothing are forgotten first.
                if len(self._known) >= MAX_IMAGES:
                    self._known = {name: each for name, each in self._known.items() if each.served}
                if len(self._known) >= MAX_IMAGES:
                    _log.warning("%d images are shown; %s is one too many", MAX_IMAGES, reference)
                    return None
                found = self._known[str(reference)] = _Known()
            return found

    def _ask(
        self, known: _Known, reference: Reference, digest: str | None = None
    ) -> ServedImage | None:
        """Find an image in its registry, unless it was asked for a moment ago; the reference's lock is held."""
        if self._clock.now_s() - known.asked_s.get(digest, -inf) < PATIENCE_S:
            return None
        try:
            found = self._opener(reference, digest)
        except (OmniloadError, OSError) as error:
            _log.warning("%s is left to the engine: %s", reference, error)
            return None
        finally:
            # Ask the clock again, because an outage may have lasted longer than the patience.
            known.asked_s[digest] = self._clock.now_s()
        for old in known.images():
            if old.shows_as(found):  # otherwise each such look would keep another tree in memory
                found.store.close()
                return old
        with self._lock:
            self._all.append(found)
        self._opened(found)
        return found
