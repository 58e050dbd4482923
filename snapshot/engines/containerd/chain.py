"""Chains of layers: their names, the labels that ask for a lazy layer, and the mounts for a container.

Source:
    OCI image specification, "Layer ChainID"; labels as containerd's clients set them.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from snapshot.engines.containerd.records import Snapshot
from snapshot.oci.digest import check_digest

__all__ = [
    "IMAGE",
    "LAYER",
    "MANIFEST",
    "TARGET",
    "LayerWanted",
    "MountEntry",
    "chain_ids",
    "layer_wanted",
    "mounts_of",
    "split_chain",
]

TARGET = "containerd.io/snapshot.ref"
"""Label: the name under which a client looks for the layer if it is there already."""
IMAGE = "containerd.io/snapshot/cri.image-ref"
"""Label: reference of the image."""
LAYER = "containerd.io/snapshot/cri.layer-digest"
"""Label: digest of the layer's blob."""
MANIFEST = "containerd.io/snapshot/cri.manifest-digest"
"""Label: digest of the image's manifest; older clients do not set it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWanted:
    """A layer that a client would prefer not to download."""

    target: str
    """Chain ID of this layer on top of the layers below it."""
    reference: str
    layer: str
    manifest: str | None
    """Digest that ``reference`` meant to the client, if the client says so."""


@dataclass(frozen=True, slots=True)
class MountEntry:
    """A mount that containerd is to make."""

    type: str
    source: str
    options: tuple[str, ...]


def chain_ids(diff_ids: Sequence[str]) -> tuple[str, ...]:
    """Return the chain ID of each layer, which identifies it together with all layers below it.

    Args:
        diff_ids: Digests of the uncompressed layers, lowest first.
    """
    found: list[str] = []
    # The chain ID of the lowest layer is its own digest, because there is nothing below it to hash.
    for diff_id in diff_ids:
        text = f"{found[-1]} {diff_id}" if found else ""
        found.append("sha256:" + hashlib.sha256(text.encode()).hexdigest() if text else diff_id)
    return tuple(found)


def layer_wanted(labels: Mapping[str, str]) -> LayerWanted | None:
    """Return the layer that labels ask for; None if they ask for none, or break the grammar."""
    # A plain unpack has none of these labels, and a part of them does not suffice to look up a layer.
    if not all(labels.get(key) for key in (TARGET, IMAGE, LAYER)):
        return None
    manifest = labels.get(MANIFEST) or None
    try:
        for digest in (labels[TARGET], labels[LAYER], manifest):
            if digest is not None:
                check_digest(digest)
    except ValueError:
        # Any client may set labels: layers with malformed ones are unpacked, and no registry is asked.
        return None
    return LayerWanted(
        target=labels[TARGET], reference=labels[IMAGE], layer=labels[LAYER], manifest=manifest
    )


def split_chain(chain: Sequence[Snapshot]) -> tuple[tuple[Snapshot, ...], Snapshot | None]:
    """Return the parents with a folder, uppermost first, and the uppermost lazy one below them, or None.

    Args:
        chain: Parents, uppermost first.
    """
    # Lazy layers are always at the bottom, and one view shows a lazy layer and all below it, merged.
    folders = tuple(parent for parent in chain if not parent.is_lazy)
    lazy = next((parent for parent in chain if parent.is_lazy), None)
    return folders, lazy


def mounts_of(
    snapshot: Snapshot,
    chain: Sequence[Snapshot],
    folder_of: Callable[[int], str],
    view_of: Callable[[int], str],
) -> tuple[MountEntry, ...]:
    """Return the mounts for an active snapshot or a view.

    Args:
        snapshot: The snapshot that a container will use.
        chain: Its parents, uppermost first.
        folder_of: Folder of a snapshot, by its number; it has ``fs`` and ``work``.
        view_of: Mount point of the merged lazy layers, by the number of the uppermost.
    """
    folders, lazy = split_chain(chain)
    # Uppermost first, as the kernel reads ``lowerdir``.
    lower = [f"{folder_of(parent.number)}/fs" for parent in folders]
    if lazy is not None:
        lower.append(view_of(lazy.number))
    own = folder_of(snapshot.number)
    writable = snapshot.kind == "active"
    if not lower:
        access = "rw" if writable else "ro"
        return (MountEntry("bind", f"{own}/fs", (access, "rbind")),)
    # Without an upper folder the kernel needs two lower ones.
    if not writable and len(lower) == 1:
        return (MountEntry("bind", lower[0], ("ro", "rbind")),)
    options = ["index=off"]  # the same option as in containerd's own snapshotter of overlays
    if writable:
        options += [f"workdir={own}/work", f"upperdir={own}/fs"]
    options.append("lowerdir=" + ":".join(lower))
    return (MountEntry("overlay", "overlay", tuple(options)),)
