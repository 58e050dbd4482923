"""Uses of layers are counted, and survive the process that counts them."""

import json

import pytest

from snapshot.engines.podman.uses import LayerUses
from snapshot.oci.reference import Reference

ONE, OTHER = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
IMAGE = "sha256:" + "ef" * 32
NAME = Reference.parse("r.example/a:v")


@pytest.fixture
def uses(tmp_path):
    return LayerUses(tmp_path, "/mnt")


def test_uses_add_up_and_the_last_release_forgets_the_layer(uses, tmp_path):
    assert [uses.add(NAME, ONE, IMAGE), uses.add(NAME, ONE, IMAGE)] == [1, 2]
    assert uses.image_of(NAME, ONE) == IMAGE
    assert uses.has(NAME)

    assert [uses.release(NAME, ONE), uses.release(NAME, ONE)] == [1, 0]
    assert uses.image_of(NAME, ONE) is None
    assert not uses.has(NAME)
    assert list(tmp_path.rglob("*.json")) == []


def test_a_release_of_what_is_not_used_is_none(uses):
    assert uses.release(NAME, ONE) == 0
    assert uses.image_of(NAME, ONE) is None


def test_a_process_that_is_started_anew_knows_them(uses, tmp_path):
    uses.add(NAME, ONE, IMAGE)

    assert LayerUses(tmp_path, "/mnt").image_of(NAME, ONE) == IMAGE
    assert LayerUses(tmp_path, "/mnt").add(NAME, ONE, IMAGE) == 2


def test_layers_references_and_mount_points_are_counted_apart(uses, tmp_path):
    uses.add(NAME, ONE, IMAGE)

    assert uses.image_of(NAME, OTHER) is None
    assert uses.image_of(Reference.parse("r.example/a:w"), ONE) is None
    assert LayerUses(tmp_path, "/other").image_of(NAME, ONE) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '"text"',
        '{"omniload_layer_use": 2}',
        json.dumps({"omniload_layer_use": 1, "layer": OTHER, "image": IMAGE, "uses": 1}),
        json.dumps({"omniload_layer_use": 1, "layer": ONE, "image": "../../x", "uses": 1}),
        json.dumps({"omniload_layer_use": 1, "layer": ONE, "image": IMAGE, "uses": "many"}),
        json.dumps({"omniload_layer_use": 1, "layer": ONE, "image": IMAGE, "uses": float("inf")}),
    ],
)
def test_a_count_that_is_broken_is_begun_anew(uses, tmp_path, text, caplog):
    uses.add(NAME, ONE, IMAGE)
    (path,) = tmp_path.rglob("*.json")
    path.write_text(text)

    assert uses.image_of(NAME, ONE) is None
    assert uses.add(NAME, ONE, IMAGE) == 1
    assert "begun anew" in caplog.text


def test_a_folder_that_cannot_be_written_loses_only_the_count(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    uses = LayerUses(tmp_path / "file", "/mnt")

    assert uses.add(NAME, ONE, IMAGE) == 1
    assert uses.release(NAME, ONE) == 0
    assert "is not kept" in caplog.text


def test_what_is_no_digest_names_no_file(uses):
    with pytest.raises(ValueError, match="digest"):
        uses.add(NAME, "../../etc/passwd", IMAGE)
    with pytest.raises(ValueError, match="digest"):
        uses.add(NAME, ONE, "../../etc/passwd")
