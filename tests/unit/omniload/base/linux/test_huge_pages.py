"""Whether a machine returns free memory is read from the features of its balloon, and from no other device."""

import pytest

from omniload.base.linux.huge_pages import gives_memory_back


@pytest.fixture
def device(tmp_path):
    def made(name, kind, features):
        (tmp_path / name).mkdir()
        (tmp_path / name / "device").write_text(f"{kind}\n")
        (tmp_path / name / "features").write_text(f"{features}\n")
        return tmp_path

    return made


def test_a_balloon_that_reports_free_memory_is_found_among_other_devices(device):
    device("virtio0", "0x0002", "0010001001100100")
    assert gives_memory_back(device("virtio1", "0x0005", "0110010100000000"))


@pytest.mark.parametrize(
    ("kind", "features"),
    [
        ("0x0005", "0110100100000000"),  # a balloon that reports nothing
        ("0x0002", "0110010100000000"),  # a disk with the same bit
        ("0x0005", "0110"),
        ("", ""),
    ],
)
def test_no_other_device_gives_memory_back(device, kind, features):
    assert not gives_memory_back(device("virtio0", kind, features))


def test_a_machine_without_such_devices_gives_none_back(tmp_path):
    assert not gives_memory_back(tmp_path / "none")
