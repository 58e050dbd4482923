"""The process behind the lazy layers of one chain: ``python -m snapshot.engines.containerd.daemon READY_FD``.

It outlives the snapshotter, so that a snapshotter that is killed, or replaced by a newer
one, disturbs no container.
"""

from collections.abc import Callable

from pydantic import ConfigDict

from fusefs.bridge.process.launch import run_daemon
from omniload.base.config import StrictModel
from snapshot.engines.containerd.store import KeptImage
from snapshot.image.mount import daemon as mounting
from snapshot.image.mount.daemon import ImageMount
from snapshot.oci.image import Image

__all__ = ["ChainMount", "lowest_layers", "main", "serve"]


class ChainMount(StrictModel):
    """What a mount of the lowest layers of an image needs to know; its registry is asked for blocks only."""

    # An image's digest is over its bytes, and JSON has none.
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    mount: ImageMount
    kept: KeptImage
    layers: int
    """How many of them, from the lowest."""


def lowest_layers(image: Image, layers: int) -> Image:
    """Return an image of the lowest layers of another; its digest, by which traces are found, stays."""
    rootfs = image.config.rootfs
    rootfs = rootfs.model_copy(update={"diff_ids": rootfs.diff_ids[:layers]})
    return Image(
        digest=image.digest,
        manifest=image.manifest.model_copy(update={"layers": image.layers[:layers]}),
        config=image.config.model_copy(update={"rootfs": rootfs}),
    )


def serve(settings: ChainMount, ready: Callable[[], None]) -> None:
    """Show the layers, merged, until they are unmounted.

    Raises:
        IntegrityError: The documents are not what their digests say.
    """
    shown = lowest_layers(settings.kept.image(), settings.layers)
    mounting.serve(settings.mount, ready, shown)


def main() -> None:
    """Be the daemon."""
    run_daemon(
        lambda settings, ready: serve(ChainMount.model_validate_json(settings), ready), role="chain"
    )


if __name__ == "__main__":
    main()
