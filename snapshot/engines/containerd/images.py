"""The image to which a layer belongs, found by the layer's labels, and the index that makes the layer lazy."""

import threading
from collections.abc import Sequence
from pathlib import Path

from omniload.base.concurrency.single_flight import SingleFlight
from omniload.base.errors import ConfigError
from omniload.base.lru import Lru
from omniload.base.units import counted
from snapshot.engines.containerd.chain import LayerWanted, chain_ids
from snapshot.image.layer.index import LayerIndex
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import check_diff_id, index_layer
from snapshot.oci.image import Image, KeptImage, fetched, open_store
from snapshot.oci.manifest import Platform
from snapshot.oci.reference import address_of
from snapshot.oci.store import ImageStore

__all__ = ["RegistryImages", "lies_in", "place_of"]


_KEPT_IMAGES = 64
_INDEXED_AT_ONCE = 4


class RegistryImages:
    """Images as their registries have them. Safe in threads.

    Of several platforms, the default is that of this machine. Only images of ``lazy_from``, a list of
    registries and folders of them, are read lazily; if the list is empty, all images are.
    """

    def __init__(
        self,
        cache: Path,
        mirrors: Sequence[str] = (),
        platform: Platform | None = None,
        lazy_from: Sequence[str] = (),
    ) -> None:
        self._lazy_from = tuple(lazy_from)
        self._few = threading.Semaphore(_INDEXED_AT_ONCE)
        self._cache = IndexCache(cache)
        self._mirrors = tuple(mirrors)
        self._platform = platform
        self._known: Lru[tuple[str, str | None], KeptImage] = Lru(_KEPT_IMAGES)
        self._indexing: SingleFlight[str, LayerIndex] = SingleFlight()

    def find(self, wanted: LayerWanted, below: int) -> tuple[KeptImage, int]:
        """Return the image of a layer on top of ``below`` lazy layers, once the layer is ready for reads in parts.

        The number that is returned with it counts the image's layers up to the wanted one, from the lowest.

        Raises:
            ConfigError: The image has no such layer there, or its format cannot be read in parts.
            IntegrityError: The layer does not match its manifest.
            UnavailableError: The registry does not answer.
        """
        # A table of contents does not prove the digest of its layer's tar, by which all images share layers.
        if self._lazy_from and not lies_in(wanted.reference, self._lazy_from):
            raise ConfigError(
                f"{wanted.reference} is in none of {', '.join(self._lazy_from)}; it is unpacked instead"
            )
        asked = (wanted.reference, wanted.manifest)
        # A pull asks for one layer after another; the documents are read for the first one.
        kept = self._known.get(asked)
        store, label = open_store(address_of(wanted.reference), mirrors=self._mirrors)
        try:
            # A tag may have moved since the last layer was asked for.
            if kept is None or place_of(kept.image(), wanted) is None:
                name = wanted.manifest or label
                kept = fetched(store, name, self._platform, reference=wanted.reference)
            image = kept.image()
            place = place_of(image, wanted)
            if place != below:
                raise ConfigError(
                    f"{wanted.reference} ({kept.digest}) has layer {wanted.layer} at {place}, not "
                    f"as {wanted.target} on {counted(below, 'lazy layer')}; it is unpacked instead"
                )
            self._index(store, image, place)
        finally:
            store.close()
        # Not earlier, so that after a failure to index, the registry is asked again.
        self._known.put(asked, kept)
        return kept, place + 1

    def _index(self, store: ImageStore, image: Image, place: int) -> None:
        """Make sure that a layer's index is here."""
        layer, diff_id = image.layers[place], image.config.rootfs.diff_ids[place]

        def read() -> LayerIndex:
            # Each layer that is read whole is in a temporary file meanwhile.
            with self._few:
                return index_layer(store, layer, self._cache)

        # Two concurrent pulls of images that share a layer read it only once.
        check_diff_id(self._indexing.call(layer.digest, read), diff_id)


def place_of(image: Image, wanted: LayerWanted) -> int | None:
    """Return the number of the wanted layer in an image, from 0 at the bottom."""
    # The chain ID names the layer and all layers below it. So a match proves that this image shows what the client
    # means, whatever the tag means now.
    names = chain_ids(image.config.rootfs.diff_ids)
    for place, (layer, name) in enumerate(zip(image.layers, names, strict=True)):
        if name == wanted.target and layer.digest == wanted.layer:
            return place
    return None


def lies_in(reference: str, places: Sequence[str]) -> bool:
    """Return whether an image's repository is one of ``places``, or is in one of them."""
    repository = reference.partition("@")[0]
    # Cut the tag from the last part only, because a registry has a colon before its port.
    folder, slash, last = repository.rpartition("/")
    repository = folder + slash + last.partition(":")[0]
    # Compare with a slash at both ends: ``team`` must not match ``team-evil``.
    return any(f"{repository}/".startswith(f"{place.rstrip('/')}/") for place in places)
