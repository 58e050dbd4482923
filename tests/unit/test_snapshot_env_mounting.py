"""Options of an overlay, and the kernel's list of mounts."""

import pytest

from snapshot.env.mounting import Mount, overlay_options, parse_mounts

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
