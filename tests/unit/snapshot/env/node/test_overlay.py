"""Options of an overlay, and the kernel's list of mounts."""

import pytest

from omniload.base.errors import StateError
from snapshot.env.node.overlay import (
    Mount,
    mount_source,
    mounts_at,
    overlay_options,
    parse_mounts,
    umount,
)

LINES = r"""
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
90 24 0:45 / /env/lib ro,nosuid shared:2 master:1 - overlay omniload-env:abc ro,lowerdir=/a:/b
91 24 0:46 / /with\040blank ro - overlay overlay ro,lowerdir=/a
""".strip()


def test_layers_stand_topmost_first_and_are_escaped():
    assert overlay_options(["/a", "/b:c", "/d,e", "/f\\g"]) == ("lowerdir=/a:/b\\:c:/d\\,e:/f\\\\g")


def test_options_that_do_not_fit_a_page_are_refused():
    with pytest.raises(ValueError, match="over 4095"):
        overlay_options(["/" + "x" * 5000])


def test_mounts_are_read_with_and_without_optional_fields():
    assert parse_mounts(LINES) == [
        Mount("/", "ext4", "/dev/vda", "rw,discard"),
        Mount("/env/lib", "overlay", "omniload-env:abc", "ro,lowerdir=/a:/b"),
        Mount("/with blank", "overlay", "overlay", "ro,lowerdir=/a"),
    ]


def test_one_layer_needs_no_separator():
    assert overlay_options(["/only"]) == "lowerdir=/only"


def test_no_mounts_are_no_lines():
    assert parse_mounts("") == []


def test_a_mounted_snapshot_is_known_by_its_key():
    assert mount_source("abc") == "omniload-env:abc"
    assert parse_mounts(LINES)[1].source == mount_source("abc")


def test_where_nothing_is_mounted_nothing_of_ours_is_found(tmp_path):
    assert mounts_at(str(tmp_path)) == []


def test_what_is_not_mounted_cannot_be_unmounted(tmp_path):
    with pytest.raises(StateError, match="cannot be unmounted"):
        umount(str(tmp_path))
