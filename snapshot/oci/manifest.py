"""Manifests, indexes and configurations: strict, frozen, and limited, because a stranger wrote them.

Both families of media types, those of OCI and of Docker's second schema, are read alike.
"""

from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel, to_pascal

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import counted
from snapshot.oci.digest import check_digest

__all__ = [
    "ACCEPTED",
    "INDEX_TYPE",
    "MANIFEST_TYPE",
    "MAX_LAYERS",
    "MAX_MANIFEST_BYTES",
    "Descriptor",
    "ImageConfig",
    "Index",
    "Manifest",
    "OciModel",
    "Platform",
    "Process",
    "RootFilesystem",
    "compression_of",
    "encode",
    "parse_config",
    "parse_manifest",
]

_SHOWN = 150
# Limit of a manifest, an index or a configuration; registries, too, refuse larger ones.
MAX_MANIFEST_BYTES = 4 << 20
MAX_LAYERS = 512
MAX_BLOB_BYTES = 1 << 40
_MAX_MANIFESTS = 4096

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_DOCKER = "application/vnd.docker.distribution.manifest"
_MANIFEST_TYPES = {MANIFEST_TYPE, f"{_DOCKER}.v2+json"}
_INDEX_TYPES = {INDEX_TYPE, f"{_DOCKER}.list.v2+json"}
ACCEPTED = (*sorted(_MANIFEST_TYPES), *sorted(_INDEX_TYPES))
"""Media types of manifests and indexes that are read."""

_LAYER_PREFIXES = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
)
_COMPRESSIONS: dict[str, Literal["tar", "gzip", "zstd"]] = {
    "": "tar",
    ".gzip": "gzip",
    "+gzip": "gzip",
    ".zstd": "zstd",
    "+zstd": "zstd",
}


class OciModel(BaseModel):
    """Base of a registry's documents: frozen, camel case, open to keys of later versions."""

    # Unknown keys are ignored, as the specification demands; known keys must be valid.
    model_config = ConfigDict(
        extra="ignore", frozen=True, alias_generator=to_camel, populate_by_name=True
    )


class Platform(OciModel):
    """The platform that an image runs on."""

    architecture: str = Field(max_length=64)
    os: str = Field(max_length=64)
    variant: str | None = Field(default=None, max_length=64)

    def accepts(self, offered: "Platform") -> bool:
        """Return whether an image for ``offered`` runs here; a missing variant means any."""
        same = (self.os, self.architecture) == (offered.os, offered.architecture)
        return same and (self.variant is None or self.variant == offered.variant)


class Descriptor(OciModel):
    """A blob or manifest by its digest and size."""

    media_type: str = Field(min_length=1, max_length=255)
    digest: Annotated[str, AfterValidator(check_digest)]
    size: int = Field(ge=0, le=MAX_BLOB_BYTES)
    """Size in bytes."""
    annotations: dict[str, str] = Field(default_factory=dict)
    platform: Platform | None = None
    artifact_type: str | None = Field(default=None, max_length=255)


class Manifest(OciModel):
    """An image of one platform, or an artifact: a configuration and layers, lowest first."""

    schema_version: Literal[2]
    media_type: str | None = None
    config: Descriptor
    layers: tuple[Descriptor, ...] = Field(max_length=MAX_LAYERS)
    annotations: dict[str, str] = Field(default_factory=dict)


class Index(OciModel):
    """Manifests under one name, usually one for each platform."""

    schema_version: Literal[2]
    media_type: str | None = None
    manifests: tuple[Descriptor, ...] = Field(max_length=_MAX_MANIFESTS)

    def manifest_for(self, platform: Platform) -> Descriptor:
        """Return the first manifest that runs on ``platform``.

        Raises:
            ConfigError: None runs there.
        """
        for found in self.manifests:
            if found.platform is not None and platform.accepts(found.platform):
                return found
        offered = sorted(
            f"{found.platform.os}/{found.platform.architecture}"
            for found in self.manifests
            if found.platform is not None
        )
        raise ConfigError(
            f"the image is not made for {platform.os}/{platform.architecture}, only for "
            f"{offered}; name another platform or another image"
        )


class RootFilesystem(OciModel):
    """Digests of the layers' uncompressed bytes, lowest first."""

    type: Literal["layers"] = "layers"
    diff_ids: tuple[Annotated[str, AfterValidator(check_digest)], ...] = Field(
        alias="diff_ids", max_length=MAX_LAYERS
    )


class Process(OciModel):
    """The process that a container of the image starts; its keys are in Pascal case, unlike all others."""

    model_config = ConfigDict(alias_generator=to_pascal)

    # Any of these may be null, because Docker writes unset values so.
    env: tuple[str, ...] | None = None
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    working_dir: str | None = None
    user: str | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """Command of a container of the image, unless another is given."""
        return (*(self.entrypoint or ()), *(self.cmd or ()))


class ImageConfig(OciModel):
    """The configuration of an image."""

    architecture: str = ""
    os: str = ""
    config: Process | None = None
    rootfs: RootFilesystem

    @property
    def command(self) -> tuple[str, ...]:
        """Command of the process."""
        return (self.config or Process()).command


def compression_of(layer: Descriptor) -> Literal["tar", "gzip", "zstd"]:
    """Return the compression of a layer.

    Raises:
        ConfigError: It is no layer of a container image.
    """
    for prefix in _LAYER_PREFIXES:
        suffix = layer.media_type.removeprefix(prefix)
        if suffix != layer.media_type and suffix in _COMPRESSIONS:
            return _COMPRESSIONS[suffix]
    raise ConfigError(
        f"layer {layer.digest} has media type {layer.media_type!r}, which is no layer of a "
        "container image; an artifact cannot be mounted"
    )


def parse_manifest(data: bytes, media_type: str, *, name: str) -> Manifest | Index:
    """Read a manifest or an index.

    ``media_type`` is the type that the store reports, empty if it reports none.

    Raises:
        IntegrityError: It breaks the format, or could be read as either of the two.
        ConfigError: It is of another kind, such as Docker's first schema.
    """
    value = _object(data, name)
    # Prefer the document's type, because a mirror or a proxy may call everything plain JSON.
    kind = str(value.get("mediaType") or media_type or "").partition(";")[0].strip()
    if not kind:
        kind = INDEX_TYPE if "manifests" in value else MANIFEST_TYPE
    if kind not in ACCEPTED:
        raise ConfigError(
            f"{name}: media type {kind[:150]!r} is not read, only {', '.join(ACCEPTED)}; "
            "push the image again with a tool of today"
        )
    # A document that is both could be read as one image here and another there (CVE-2021-41190).
    if "manifests" in value and ("layers" in value or "config" in value):
        raise IntegrityError(f"{name}: is both a manifest and an index; do not trust its source")
    try:
        return (Index if kind in _INDEX_TYPES else Manifest).model_validate(value)
    except ValidationError as error:
        raise IntegrityError(f"{name}: breaks the format of {kind}: {_fault_of(error)}") from error


def parse_config(data: bytes, *, name: str) -> ImageConfig:
    """Read the configuration of an image.

    Raises:
        IntegrityError: It breaks the format.
    """
    try:
        return ImageConfig.model_validate(_object(data, name))
    except ValidationError as error:
        raise IntegrityError(
            f"{name}: breaks the format of a configuration: {_fault_of(error)}"
        ) from error


def encode(value: OciModel) -> bytes:
    """Return the JSON of a manifest, index or descriptor."""
    return orjson.dumps(value.model_dump(by_alias=True, exclude_none=True, exclude_defaults=False))


def _fault_of(error: ValidationError) -> str:
    """Return the first fault, and the number of other faults."""
    # Show only the first, because a document may have a fault in each of 100,000 lines.
    first, *others = error.errors(include_url=False, include_input=False)
    more = f", and {counted(len(others), 'more fault')}" if others else ""
    return f"{'.'.join(map(str, first['loc']))[:_SHOWN]}: {first['msg'][:_SHOWN]}{more}"


def _object(data: bytes, name: str) -> dict[str, Any]:
    if len(data) > MAX_MANIFEST_BYTES:
        raise IntegrityError(
            f"{name}: {len(data)} bytes, more than the {MAX_MANIFEST_BYTES} a manifest may have"
        )
    try:
        # orjson accepts neither NaN nor Infinity, nor nesting that could crash the interpreter.
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise IntegrityError(f"{name}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{name}: is a JSON {type(value).__name__}, not an object")
    return value
