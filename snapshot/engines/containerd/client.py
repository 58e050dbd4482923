"""What we ask of containerd: know an image by its name and two small documents, and have its layers made ready.

The image's layers are not downloaded. For each one the snapshotter of that name is asked to
prepare it with the labels of a lazy layer, as a client of Kubernetes does, and answers that
nothing is left to unpack.
"""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import grpc

from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.log import get_logger
from snapshot.engines.containerd.chain import LayerWanted, chain_ids, labels_for
from snapshot.engines.containerd.store import KeptImage
from snapshot.engines.containerd.wire import Method, WireMessage, message, method
from snapshot.oci.image import Image
from snapshot.oci.manifest import Descriptor

__all__ = ["Containerd", "config_labels", "manifest_labels"]

_log = get_logger(__name__)
_COMMIT = 2
_GC = "containerd.io/gc"
_TIMEOUT_S = 30.0
_INDEXING_TIMEOUT_S = 3600.0
"""Of one layer: a gzip layer is read whole once."""
_LEASE_S = 24 * 3600


def manifest_labels(image: Image) -> dict[str, str]:
    """Return the labels by which containerd's collector keeps the contents that an image's manifest needs."""
    labels = {f"{_GC}.ref.content.config": image.manifest.config.digest}
    return labels | {
        f"{_GC}.ref.content.l.{place}": layer.digest for place, layer in enumerate(image.layers)
    }


def config_labels(image: Image, snapshotter: str) -> dict[str, str]:
    """Return the label by which containerd's collector keeps the snapshot of an image's configuration."""
    names = chain_ids(image.config.rootfs.diff_ids)
    return {f"{_GC}.ref.snapshot.{snapshotter}": names[-1]} if names else {}


class Containerd:
    """A connection to containerd, in one of its namespaces; ``k8s.io`` is that of Kubernetes."""

    def __init__(self, path: Path, namespace: str = "default") -> None:
        self._path, self._namespace = path, namespace
        self._channel = grpc.insecure_channel(f"unix:{path}")

    def register(self, kept: KeptImage, name: str, snapshotter: str) -> int:
        """Make an image known, over what had its name; return how many of its layers are lazy, which is all of them.

        Raises:
            ConfigError: A layer cannot be read lazily, or there is no such snapshotter.
            UnavailableError: containerd does not answer.
            StateError: It refuses.
        """
        image = kept.image()
        with self._leased() as lease:
            config = image.manifest.config
            self._write(config.digest, kept.config, config_labels(image, snapshotter), lease)
            self._write(kept.digest, kept.manifest, manifest_labels(image), lease)
            for place in range(len(image.layers)):
                self._prepare(kept.reference, image, place, snapshotter, lease)
            target = Descriptor(
                media_type=kept.media_type, digest=kept.digest, size=len(kept.manifest)
            )
            self._name(name, target, lease)
        return len(image.layers)

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()

    @contextmanager
    def _leased(self) -> Iterator[str]:
        """Hold what is written until it has a name, or containerd's collector may take it."""
        asked = method("leases", "Create")
        labels = {f"{_GC}.expire": _time_after(_LEASE_S)}
        made = self._call(
            asked, message(asked.request, id=f"omniload-{uuid.uuid4()}", labels=labels)
        )
        try:
            yield made.lease.id
        finally:
            ended = method("leases", "Delete")
            self._call(ended, message(ended.request, id=made.lease.id))

    def _write(self, digest: str, data: bytes, labels: Mapping[str, str], lease: str) -> None:
        asked = method("content", "Write")
        request = message(
            asked.request,
            action=_COMMIT,
            ref=f"omniload-{digest}",
            total=len(data),
            expected=digest,
            data=data,
            labels=dict(labels),
        )
        try:
            self._call(asked, request, lease)
        except _AlreadyThereError:
            # From an earlier pull, which may have meant another snapshotter.
            changed = method("content", "Update")
            info = message(f"{_package(changed)}.Info", digest=digest, labels=dict(labels))
            paths = [f"labels.{label}" for label in labels]
            mask = message("google.protobuf.FieldMask", paths=paths)
            self._call(changed, message(changed.request, info=info, update_mask=mask), lease)

    def _prepare(
        self, reference: str, image: Image, place: int, snapshotter: str, lease: str
    ) -> None:
        names = chain_ids(image.config.rootfs.diff_ids)
        wanted = LayerWanted(
            target=names[place],
            reference=reference,
            layer=image.layers[place].digest,
            manifest=image.digest,
        )
        key = f"omniload-{uuid.uuid4()} {names[place]}"
        asked = method("snapshots", "Prepare")
        request = message(
            asked.request,
            snapshotter=snapshotter,
            key=key,
            parent=names[place - 1] if place else "",
            labels=labels_for(wanted),
        )
        try:
            self._call(asked, request, lease, _INDEXING_TIMEOUT_S)
        except _AlreadyThereError:
            return
        taken = method("snapshots", "Remove")
        self._call(taken, message(taken.request, snapshotter=snapshotter, key=key), lease)
        raise ConfigError(
            f"layer {wanted.layer} of {reference} is not read lazily by {snapshotter!r}; its log says "
            "why. Convert the image with 'omniload image convert', or pull it with 'ctr image pull'"
        )

    def _name(self, name: str, target: Descriptor, lease: str) -> None:
        made = method("images", "Create")
        wire = message(
            f"{_package(made)}.Image",
            name=name,
            target=message(
                "containerd.types.Descriptor",
                media_type=target.media_type,
                digest=target.digest,
                size=target.size,
            ),
        )
        try:
            self._call(made, message(made.request, image=wire), lease)
        except _AlreadyThereError:
            changed = method("images", "Update")
            mask = message("google.protobuf.FieldMask", paths=["target"])
            self._call(changed, message(changed.request, image=wire, update_mask=mask), lease)

    def _call(
        self, asked: Method, request: WireMessage, lease: str = "", timeout_s: float = _TIMEOUT_S
    ) -> WireMessage:
        metadata: tuple[tuple[str, str | bytes], ...]
        metadata = (("containerd-namespace", self._namespace),)
        if lease:
            metadata += (("containerd-lease", lease),)
        reads = asked.reader(asked.answer)
        try:
            if asked.shape == "both":
                stream = self._channel.stream_stream(asked.path, asked.encode, reads)
                answers = stream(iter([request]), timeout=timeout_s, metadata=metadata)
                return list(answers)[-1]  # the one to the commit
            unary = self._channel.unary_unary(asked.path, asked.encode, reads)
            return unary(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise self._translated(asked, cast("grpc.Call", error)) from error

    def _translated(self, asked: Method, error: grpc.Call) -> Exception:
        code, text = error.code(), f"containerd: {asked.name}: {error.details()}"
        if code is grpc.StatusCode.ALREADY_EXISTS:
            return _AlreadyThereError(text)
        if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
            return UnavailableError(f"{text}; does containerd run, and answer on {self._path}?")
        if code in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}:
            return ConfigError(f"{text}; is the snapshotter in containerd's configuration?")
        return StateError(f"{text} ({code.name})")


class _AlreadyThereError(StateError):
    """containerd has it."""


def _package(found: Method) -> str:
    return found.request.rpartition(".")[0]


def _time_after(duration_s: float) -> str:
    """Return a moment as containerd writes times: a lease of a client that died ends by itself."""
    moment = datetime.now(UTC) + timedelta(seconds=duration_s)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
