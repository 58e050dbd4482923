"""Images from the texts that a user writes: the store that holds an image, and the image itself."""

import platform as machine
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.secrets import note_secrets_of
from omniload.base.units import counted
from snapshot.oci.auth import credentials_of
from snapshot.oci.digest import verified
from snapshot.oci.layout import OciLayout
from snapshot.oci.manifest import (
    Descriptor,
    ImageConfig,
    Manifest,
    Platform,
    parse_config,
    parse_manifest,
)
from snapshot.oci.reference import Reference
from snapshot.oci.registry import Registry
from snapshot.oci.store import ImageStore, MirroredStore, small_blob
from snapshot.oci.transport import RegistrySettings, Transport

__all__ = [
    "Image",
    "KeptImage",
    "fetched",
    "open_store",
    "opened_image",
    "platform_here",
    "resolve",
]

_MAX_INDEX_DEPTH = 4
_PLAIN = "http://"
_ARCHITECTURE_OF = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A resolved image of one platform; its digest never means anything else."""

    digest: str
    """Digest of the manifest."""
    manifest: Manifest
    config: ImageConfig

    @property
    def layers(self) -> tuple[Descriptor, ...]:
        """Layers, lowest first."""
        return self.manifest.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptImage:
    """An image as its registry gave it, with the documents to resolve it again without the registry."""

    digest: str
    """Digest of the manifest."""
    reference: str
    """Reference under which its layers are read."""
    media_type: str
    manifest: bytes
    config: bytes

    def image(self) -> Image:
        """Return the image, resolved without its registry.

        Raises:
            IntegrityError: A document has another digest, or they contradict each other.
        """
        name = self.reference
        data = verified(self.manifest, self.digest, name=name)
        manifest = parse_manifest(data, self.media_type, name=name)
        if not isinstance(manifest, Manifest):
            raise IntegrityError(f"{name}: {self.digest} is no manifest; pull it again")
        config = parse_config(verified(self.config, manifest.config.digest, name=name), name=name)
        if len(config.rootfs.diff_ids) != len(manifest.layers):
            raise IntegrityError(
                f"{name}: {counted(len(manifest.layers), 'layer')}, but the configuration has "
                f"{len(config.rootfs.diff_ids)}; build the image anew"
            )
        return Image(digest=self.digest, manifest=manifest, config=config)


def platform_here() -> Platform:
    """Return the platform of this machine."""
    found = machine.machine()
    return Platform(architecture=_ARCHITECTURE_OF.get(found, found), os="linux")


def open_store(
    text: str, *, mirrors: tuple[str, ...] = (), create: bool = False
) -> tuple[ImageStore, str]:
    """Open the store of an image, and return it with the image's name there.

    Args:
        text: ``REGISTRY/REPOSITORY:TAG``, or ``oci:FOLDER:TAG``; the tag of a layout may be
            left out if it holds one image. ``http://`` before a registry, or a mirror,
            means without TLS, which otherwise is used only for this machine itself.
        mirrors: Registries that may hold the same repositories, in the order in which they are asked.
        create: Make the layout if there is none.

    Raises:
        ConfigError: The text names nothing, or the directory is no layout.
    """
    for named in (text, *mirrors):  # a user name before a registry is refused, and shown
        note_secrets_of(f"{_PLAIN}{named.removeprefix(_PLAIN)}")
    if text.startswith("oci:"):
        return _open_layout(text.removeprefix("oci:"), create=create)
    reference = Reference.parse(text.removeprefix(_PLAIN))
    scheme = _PLAIN if text.startswith(_PLAIN) else ""
    origin = _registry(scheme + reference.registry, reference.repository)
    if not mirrors:
        return origin, reference.name
    others = [_registry(mirror, reference.repository) for mirror in mirrors]
    return MirroredStore(origin, others), reference.name


@contextmanager
def opened_image(
    text: str, *, mirrors: tuple[str, ...] = (), platform: Platform | None = None
) -> Iterator[tuple[ImageStore, Image]]:
    """Open the store of an image inside a block, and resolve the image; raises the errors of both."""
    store, name = open_store(text, mirrors=mirrors)
    with closing(store):
        yield store, resolve(store, name, platform)


def resolve(store: ImageStore, name: str, platform: Platform | None = None) -> Image:
    """Read manifest and configuration of an image, for ``platform`` if there are several.

    Raises:
        ConfigError: There is no image of that name or platform, or it is an artifact.
        IntegrityError: The store's documents contradict themselves.
    """
    return fetched(store, name, platform).image()


def fetched(
    store: ImageStore, name: str, platform: Platform | None = None, *, reference: str = ""
) -> KeptImage:
    """Return the documents of an image as they came; arguments and errors are those of ``resolve``."""
    where = f"{store.location}: {name}"
    # Limited, because indexes that name each other would be followed without end.
    for _ in range(_MAX_INDEX_DEPTH):
        try:
            stored = store.manifest(name)
        except FileNotFoundError as error:
            raise ConfigError(f"{where}: no such image: {error}") from error
        parsed = parse_manifest(stored.data, stored.media_type, name=where)
        if isinstance(parsed, Manifest):
            return KeptImage(
                digest=stored.digest,
                reference=reference or where,
                media_type=stored.media_type,
                manifest=stored.data,
                config=small_blob(store, parsed.config),
            )
        name = parsed.manifest_for(platform or platform_here()).digest
    raise IntegrityError(f"{where}: indexes name indexes more than {_MAX_INDEX_DEPTH} deep")


def _open_layout(text: str, *, create: bool) -> tuple[ImageStore, str]:
    folder, _, tag = text.partition(":")
    layout = OciLayout.create(folder) if create else OciLayout(Path(folder))
    if tag:
        return layout, tag
    tags = layout.tags()
    # With several tags, none is the default; a new layout gets the tag that engines use if none is given.
    if len(tags) != 1:
        if create:
            return layout, "latest"
        raise ConfigError(f"oci:{folder} holds {list(tags)}; name one as oci:{folder}:TAG")
    return layout, tags[0]


def _registry(address: str, repository: str) -> ImageStore:
    registry = address.removeprefix(_PLAIN).rstrip("/")
    # Parse it as a reference, because a mirror must not name a path or a user.
    Reference.parse(f"{registry}/{repository}")
    settings = RegistrySettings(plain_http=True if address.startswith(_PLAIN) else None)
    return Registry(Transport(registry, settings, credentials_of(registry)), repository)
