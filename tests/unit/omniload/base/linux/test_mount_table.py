"""The kernel's list of mounts."""

from omniload.base.linux.mount_table import Mount, mounts_here, parse_mounts

LINES = r"""
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
90 24 0:45 / /env/lib ro,nosuid shared:2 master:1 - overlay omniload-env:abc ro,lowerdir=/a:/b
91 24 0:46 / /with\040blank ro - overlay overlay ro,lowerdir=/a
""".strip()


def test_mounts_are_read_with_and_without_optional_fields():
    assert parse_mounts(LINES) == [
        Mount("/", "ext4", "/dev/vda", "rw,discard"),
        Mount("/env/lib", "overlay", "omniload-env:abc", "ro,lowerdir=/a:/b"),
        Mount("/with blank", "overlay", "overlay", "ro,lowerdir=/a"),
    ]


def test_no_mounts_are_no_lines():
    assert parse_mounts("") == []


def test_the_root_of_this_process_is_mounted():
    assert "/" in {mount.path for mount in mounts_here()}
