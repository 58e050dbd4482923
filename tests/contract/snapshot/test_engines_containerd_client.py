"""What is asked of containerd to have it know an image: in which order, under a lease, what is left when it fails."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from omniload.base.errors import ConfigError, StateError, UnavailableError
from snapshot.engines.containerd.chain import chain_ids, layer_wanted
from snapshot.engines.containerd.client import Containerd, config_labels, manifest_labels
from snapshot.engines.containerd.wire import METHODS, message
from tests.support.snapshot.snapshotter_builders import REFERENCE, a_kept_image

KEPT = a_kept_image(2)
IMAGE = KEPT.image()
CHAIN = chain_ids(IMAGE.config.rootfs.diff_ids)


class PlayedContainerd:
    """Contents, images, leases and snapshots in memory, held to containerd's rules by their names alone."""

    def __init__(self, socket):
        self.contents, self.images, self.leases, self.calls = {}, {}, set(), []
        self.eager = set()
        self.refusing = {}
        self.lock = threading.Lock()
        self.server = grpc.server(ThreadPoolExecutor(4))
        for (owner, name), asked in METHODS.items():
            answer = getattr(self, f"{owner}_{name}".lower(), None)
            if answer is not None:
                self.server.add_generic_rpc_handlers([self.handler(owner, asked, answer)])
        self.server.add_insecure_port(f"unix:{socket}")
        self.server.start()

    def handler(self, owner, asked, answer):
        def unary(request, context):
            metadata = dict(context.invocation_metadata())
            with self.lock:
                lease = metadata.get("containerd-lease", "")
                self.calls.append((owner, asked.name, metadata["containerd-namespace"], lease))
                if lease:
                    assert lease in self.leases, "a lease that is used is held"
                if asked.name in self.refusing:
                    context.abort(*self.refusing[asked.name])
                return answer(request, context) or message(asked.answer)

        def both(requests, context):
            for request in requests:
                yield unary(request, context)

        read = asked.reader(asked.request)
        if asked.shape == "both":
            made = grpc.stream_stream_rpc_method_handler(both, read, asked.encode)
        else:
            made = grpc.unary_unary_rpc_method_handler(unary, read, asked.encode)
        service = asked.path.split("/")[1]
        return grpc.method_handlers_generic_handler(service, {asked.name: made})

    def leases_create(self, request, context):
        self.leases.add(request.id)
        assert "containerd.io/gc.expire" in request.labels
        lease = message("containerd.services.leases.v1.Lease", id=request.id)
        return message("containerd.services.leases.v1.CreateResponse", lease=lease)

    def leases_delete(self, request, context):
        self.leases.remove(request.id)

    def content_write(self, request, context):
        if request.expected in self.contents:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "content is here")
        assert request.total == len(request.data)
        self.contents[request.expected] = [request.data, dict(request.labels)]

    def content_update(self, request, context):
        for path in request.update_mask.paths:
            name = path.removeprefix("labels.")
            self.contents[request.info.digest][1][name] = request.info.labels[name]

    def snapshots_prepare(self, request, context):
        wanted = layer_wanted(request.labels)
        assert request.parent == ({CHAIN[1]: CHAIN[0]}.get(wanted.target, ""))
        assert (wanted.reference, wanted.manifest) == (REFERENCE, KEPT.digest)
        if request.snapshotter != "omniload":
            context.abort(grpc.StatusCode.NOT_FOUND, "snapshotter not loaded")
        if wanted.layer not in self.eager:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "read lazily")
        self.prepared = request.key

    def snapshots_remove(self, request, context):
        assert request.key == self.prepared
        self.prepared = None

    def images_create(self, request, context):
        if request.image.name in self.images:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "image is here")
        self.images[request.image.name] = request.image.target

    def images_update(self, request, context):
        assert list(request.update_mask.paths) == ["target"]
        self.images[request.image.name] = request.image.target


@pytest.fixture
def played(tmp_path):
    found = PlayedContainerd(tmp_path / "c.sock")
    yield found
    found.server.stop(grace=None).wait()
    assert found.leases == set(), "no lease outlives what it was for"


@pytest.fixture
def containerd(tmp_path, played):
    found = Containerd(tmp_path / "c.sock", "k8s.io")
    yield found
    found.close()


def names(played):
    return [(owner, name) for owner, name, _, _ in played.calls]


def test_documents_then_layers_then_the_name_and_all_under_one_lease(containerd, played):
    assert containerd.register(KEPT, "my/image:v", "omniload") == 2

    assert names(played) == [
        ("leases", "Create"),
        ("content", "Write"),
        ("content", "Write"),
        ("snapshots", "Prepare"),
        ("snapshots", "Prepare"),
        ("images", "Create"),
        ("leases", "Delete"),
    ]
    assert {namespace for _, _, namespace, _ in played.calls} == {"k8s.io"}
    assert len({lease for _, _, _, lease in played.calls[1:-1]}) == 1
    assert all(lease for _, _, _, lease in played.calls[1:-1])


def test_the_documents_come_as_they_are_with_what_the_collector_must_know(containerd, played):
    containerd.register(KEPT, "my/image:v", "omniload")

    config = IMAGE.manifest.config.digest
    assert played.contents == {
        config: [KEPT.config, config_labels(IMAGE, "omniload")],
        KEPT.digest: [KEPT.manifest, manifest_labels(IMAGE)],
    }
    target = played.images["my/image:v"]
    assert (target.digest, target.size, target.media_type) == (
        KEPT.digest,
        len(KEPT.manifest),
        KEPT.media_type,
    )


def test_an_image_that_is_known_already_gets_this_snapshotter_and_this_meaning(containerd, played):
    config = IMAGE.manifest.config.digest
    other = {"containerd.io/gc.ref.snapshot.overlayfs": CHAIN[-1]}
    played.contents[config] = [KEPT.config, dict(other)]
    played.images["my/image:v"] = message("containerd.types.Descriptor", digest="sha256:old")

    for _ in range(2):
        containerd.register(KEPT, "my/image:v", "omniload")

    assert played.contents[config][1] == {**other, **config_labels(IMAGE, "omniload")}
    assert played.images["my/image:v"].digest == KEPT.digest


def test_a_layer_that_is_not_lazy_leaves_no_place_behind_and_no_name(containerd, played):
    played.eager = {IMAGE.layers[1].digest}

    with pytest.raises(ConfigError, match="omniload image convert"):
        containerd.register(KEPT, "my/image:v", "omniload")

    assert played.prepared is None
    assert played.images == {}


@pytest.mark.parametrize(
    ("name", "code", "error", "message_part"),
    [
        ("Prepare", grpc.StatusCode.UNAVAILABLE, UnavailableError, "does containerd run"),
        ("Prepare", grpc.StatusCode.INVALID_ARGUMENT, ConfigError, "containerd's configuration"),
        ("Write", grpc.StatusCode.FAILED_PRECONDITION, StateError, "FAILED_PRECONDITION"),
        ("Write", grpc.StatusCode.INTERNAL, StateError, "INTERNAL"),
    ],
)
def test_a_refusal_is_told_and_the_lease_is_given_back(
    containerd, played, name, code, error, message_part
):
    played.refusing[name] = (code, "because")

    with pytest.raises(error, match=message_part) as raised:
        containerd.register(KEPT, "my/image:v", "omniload")

    assert "because" in str(raised.value)
    assert played.images == {}
    assert names(played)[-1] == ("leases", "Delete")


def test_another_snapshotter_is_none_of_ours(containerd, played):
    with pytest.raises(ConfigError, match="snapshotter not loaded"):
        containerd.register(KEPT, "my/image:v", "other")


def test_nobody_on_the_socket_is_an_outage(tmp_path):
    containerd = Containerd(tmp_path / "none.sock")

    with pytest.raises(UnavailableError, match="does containerd run, and answer on"):
        containerd.register(KEPT, "my/image:v", "omniload")

    containerd.close()
