"""Parts of a snapshotter without registry and mounts, and a client that calls it as containerd does."""

import hashlib
import shutil

import grpc
import orjson

from omniload.base.errors import ConfigError
from snapshot.engines.containerd.chain import IMAGE, LAYER, MANIFEST, TARGET, chain_ids
from snapshot.engines.containerd.images import place_of
from snapshot.engines.containerd.server import SERVICE, message, reader
from snapshot.oci.digest import digest_of
from snapshot.oci.image import KeptImage
from snapshot.oci.manifest import MANIFEST_TYPE

__all__ = [
    "REFERENCE",
    "Calls",
    "FakeImages",
    "FakeViews",
    "a_digest",
    "a_kept_image",
    "labels_of",
]

REFERENCE = "registry.example:5000/team/image:v"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+zstd"


def a_digest(text):
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def a_kept_image(layers=3, reference=REFERENCE, name="layer"):
    """Return an image of some layers, as its two documents in a registry."""
    diff_ids = [a_digest(f"{name} {n} tar") for n in range(layers)]
    config = orjson.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": ["python"]},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
    )
    blobs = [
        {"mediaType": LAYER_TYPE, "digest": a_digest(f"{name} {n} blob"), "size": 10}
        for n in range(layers)
    ]
    about = {
        "mediaType": "application/vnd.oci.image.config.v1+json",
        "digest": digest_of(config),
        "size": len(config),
    }
    manifest = orjson.dumps(
        {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": about, "layers": blobs}
    )
    return KeptImage(
        digest=digest_of(manifest),
        reference=reference,
        media_type=MANIFEST_TYPE,
        manifest=manifest,
        config=config,
    )


def labels_of(kept, place, *, manifest=True):
    """Return the labels with which a client requests a layer of an image."""
    image = kept.image()
    names = chain_ids(image.config.rootfs.diff_ids)
    labels = {TARGET: names[place], IMAGE: kept.reference, LAYER: image.layers[place].digest}
    return labels | ({MANIFEST: kept.digest} if manifest else {})


class FakeImages:
    """Knows the given images; layers in ``unreadable`` must be unpacked."""

    def __init__(self, *images, unreadable=()):
        self.images, self.unreadable, self.asked = images, set(unreadable), []

    def find(self, wanted, below):
        self.asked.append(wanted.layer)
        for kept in self.images:
            place = place_of(kept.image(), wanted)
            if place == below and wanted.layer not in self.unreadable:
                return kept, place + 1
        raise ConfigError(f"{wanted.layer} is not read in parts")


class FakeViews:
    """Plain folders instead of mounts; remembers the calls."""

    def __init__(self, folder, error=None):
        self.folder, self.error, self.done = folder, error, []
        self.stuck = None
        """Error that is raised when a view should be removed."""

    def path(self, number):
        return str(self.folder / f"view-{number}")

    def show(self, number, image, layers):
        if self.error is not None:
            raise self.error
        self.done.append(("show", number, image.reference, layers))
        (self.folder / f"view-{number}").mkdir(exist_ok=True, mode=0o750)

    def drop(self, number):
        self.done.append(("drop", number))
        if self.stuck is not None:
            raise self.stuck
        shutil.rmtree(self.folder / f"view-{number}", ignore_errors=True)

    def numbers(self):
        return {int(path.name[5:]) for path in self.folder.glob("view-*")}


class Calls:
    """Every call of the service by its name, with the fields of its request; answers are returned unchanged."""

    def __init__(self, socket):
        self._channel = grpc.insecure_channel(f"unix:{socket}")

    def __call__(self, name, /, **fields):
        data = message(f"{name}Request", snapshotter="omniload", **fields).SerializeToString()
        kind = self._channel.unary_stream if name == "List" else self._channel.unary_unary
        call = kind(f"/{SERVICE}/{name}", bytes, reader(f"{name}Response"))
        return list(call(data, timeout=30)) if name == "List" else call(data, timeout=30)

    def refusal(self, name, /, **fields):
        """Return code and text of a call that must be refused."""
        try:
            answer = self(name, **fields)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError(f"{name} was answered: {answer}")

    def close(self):
        self._channel.close()
