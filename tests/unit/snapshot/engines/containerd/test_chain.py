"""Names of chains, the labels of a lazy layer, and what is mounted for whom."""

import hashlib

import pytest

from snapshot.engines.containerd.chain import (
    IMAGE,
    LAYER,
    MANIFEST,
    TARGET,
    LayerWanted,
    MountEntry,
    chain_ids,
    layer_wanted,
    mounts_of,
    split_chain,
)
from snapshot.engines.containerd.images import place_of
from snapshot.engines.containerd.records import Snapshot
from snapshot.engines.containerd.views import ChainMount, lowest_layers
from snapshot.image.mount.daemon import ImageMount
from snapshot.oci.reference import address_of
from tests.support.snapshot.snapshotter_builders import a_digest, a_kept_image, labels_of


def a_snapshot(number, kind="committed", layers=0):
    return Snapshot(
        key=f"k{number}",
        number=number,
        parent="",
        kind=kind,
        labels={},
        created_ns=0,
        updated_ns=0,
        layers=layers,
    )


def mounts(snapshot, *chain):
    return mounts_of(snapshot, chain, lambda n: f"/s/{n}", lambda n: f"/v/{n}")


def test_a_chain_id_names_a_layer_and_all_below_it():
    a, b, c = (a_digest(name) for name in "abc")

    ids = chain_ids([a, b, c])

    joined = hashlib.sha256(f"{a} {b}".encode()).hexdigest()
    assert ids[:2] == (a, f"sha256:{joined}")
    assert ids[2] == "sha256:" + hashlib.sha256(f"{ids[1]} {c}".encode()).hexdigest()
    assert chain_ids([]) == ()


def test_a_chain_id_is_what_another_tool_computes():
    """By ``printf 'sha256:%s sha256:%s' $(a) $(b) | sha256sum``, with the digests of 'a' and 'b'."""
    assert chain_ids([a_digest("a"), a_digest("b")])[1] == (
        "sha256:51c0c8ace48498d6f5fee6b0592cc06f2da0f3cbe09c5a34a97dce85c3889676"
    )


@pytest.mark.parametrize("manifest", [True, False])
def test_labels_say_which_layer_is_wanted(manifest):
    labels = labels_of(a_kept_image(), 1, manifest=manifest)

    wanted = layer_wanted({**labels, "other": "x"})

    assert wanted == LayerWanted(
        target=labels[TARGET],
        reference=labels[IMAGE],
        layer=labels[LAYER],
        manifest=labels[MANIFEST] if manifest else None,
    )


@pytest.mark.parametrize("missing", [TARGET, IMAGE, LAYER])
def test_without_one_of_the_labels_no_lazy_layer_is_asked_for(missing):
    labels = labels_of(a_kept_image(), 0)

    assert layer_wanted({key: v for key, v in labels.items() if key != missing}) is None
    assert layer_wanted({**labels, missing: ""}) is None


@pytest.mark.parametrize("key", [TARGET, LAYER, MANIFEST])
@pytest.mark.parametrize("value", ["latest", "sha256:short", "../../etc"])
def test_labels_that_hold_no_digest_ask_for_nothing(key, value):
    assert layer_wanted({**labels_of(a_kept_image(), 0), key: value}) is None


def test_a_chain_is_parted_into_folders_and_the_uppermost_lazy_layer():
    chain = (a_snapshot(5), a_snapshot(4), a_snapshot(3, layers=2), a_snapshot(2, layers=1))

    folders, lazy = split_chain(chain)

    assert [found.number for found in folders] == [5, 4]
    assert lazy is not None
    assert lazy.number == 3
    assert split_chain(()) == ((), None)


def test_a_container_on_lazy_layers_has_one_lower_folder_however_many_there_are():
    chain = [a_snapshot(n, layers=n) for n in (3, 2, 1)]

    (entry,) = mounts(a_snapshot(9, "active"), *chain)

    assert entry == MountEntry(
        "overlay",
        "overlay",
        ("index=off", "workdir=/s/9/work", "upperdir=/s/9/fs", "lowerdir=/v/3"),
    )


def test_folders_lie_on_the_lazy_layers_uppermost_first():
    chain = (a_snapshot(5), a_snapshot(4), a_snapshot(3, layers=1))

    (active,) = mounts(a_snapshot(9, "active"), *chain)
    (view,) = mounts(a_snapshot(9, "view"), *chain)

    assert active.options[-1] == "lowerdir=/s/5/fs:/s/4/fs:/v/3"
    assert view == MountEntry("overlay", "overlay", ("index=off", active.options[-1]))


@pytest.mark.parametrize(
    ("kind", "chain", "source", "access"),
    [
        ("active", (), "/s/9/fs", "rw"),
        ("view", (), "/s/9/fs", "ro"),
        ("view", (a_snapshot(4),), "/s/4/fs", "ro"),
        ("view", (a_snapshot(3, layers=2), a_snapshot(2, layers=1)), "/v/3", "ro"),
    ],
)
def test_what_is_one_folder_is_bound_not_overlaid(kind, chain, source, access):
    assert mounts(a_snapshot(9, kind), *chain) == (MountEntry("bind", source, (access, "rbind")),)


def test_a_layer_is_found_by_its_chain_so_a_moved_tag_cannot_lie():
    kept, other = a_kept_image(3), a_kept_image(3, name="other")
    wanted = layer_wanted(labels_of(kept, 2))

    assert place_of(kept.image(), wanted) == 2
    assert place_of(other.image(), wanted) is None
    foreign = LayerWanted(
        target=wanted.target, reference=wanted.reference, layer=a_digest("x"), manifest=None
    )
    assert place_of(kept.image(), foreign) is None


def test_equal_layers_at_two_places_are_told_apart_by_their_chains():
    kept = a_kept_image(1)
    image = kept.image()
    twice = lowest_layers(image, 1)
    rootfs = image.config.rootfs.model_copy(update={"diff_ids": image.config.rootfs.diff_ids * 2})
    twice = type(image)(
        digest=image.digest,
        manifest=image.manifest.model_copy(update={"layers": image.layers * 2}),
        config=image.config.model_copy(update={"rootfs": rootfs}),
    )
    names = chain_ids(rootfs.diff_ids)

    places = [
        place_of(
            twice,
            LayerWanted(target=name, reference="r", layer=image.layers[0].digest, manifest=None),
        )
        for name in names
    ]

    assert places == [0, 1]


def test_the_name_of_the_hub_is_not_its_address():
    assert address_of("docker.io/library/x:1") == "registry-1.docker.io/library/x:1"
    assert address_of("docker.io.example/x:1") == "docker.io.example/x:1"


def test_the_lowest_layers_keep_the_digest_that_traces_are_found_by():
    image = a_kept_image(3).image()

    part = lowest_layers(image, 2)

    assert part.digest == image.digest
    assert part.layers == image.layers[:2]
    assert part.config.rootfs.diff_ids == image.config.rootfs.diff_ids[:2]
    assert part.config.command == ("python",)


def test_the_settings_of_a_daemon_hold_the_image_itself():
    kept = a_kept_image(3)
    mount = ImageMount(image=kept.reference, mountpoint="/m", cache="/c")
    chain = ChainMount(mount=mount, kept=kept, layers=2)

    assert ChainMount.model_validate_json(chain.model_dump_json(by_alias=True)) == chain
