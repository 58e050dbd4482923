"""Options of an overlay, and which of the mounts are ours."""

import pytest

from omniload.base.errors import StateError
from snapshot.env.node.overlay import (
    mount_source,
    mounts_at,
    overlay_options,
    umount,
)


def test_layers_stand_topmost_first_and_are_escaped():
    assert overlay_options(["/a", "/b:c", "/d,e", "/f\\g"]) == ("lowerdir=/a:/b\\:c:/d\\,e:/f\\\\g")


def test_options_that_do_not_fit_a_page_are_refused():
    with pytest.raises(ValueError, match="over 4095"):
        overlay_options(["/" + "x" * 5000])


def test_one_layer_needs_no_separator():
    assert overlay_options(["/only"]) == "lowerdir=/only"


def test_a_mounted_snapshot_is_known_by_its_key():
    assert mount_source("abc") == "omniload-env:abc"


def test_where_nothing_is_mounted_nothing_of_ours_is_found(tmp_path):
    assert mounts_at(str(tmp_path)) == []


def test_what_is_not_mounted_cannot_be_unmounted(tmp_path):
    with pytest.raises(StateError, match="cannot be unmounted"):
        umount(str(tmp_path))
