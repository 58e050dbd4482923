"""Choosing a binding, and one backing file per inode."""

import os

import pytest

from fusefs.bridge import server
from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.device import passthrough as passing
from fusefs.bridge.device.passthrough import Passthrough
from fusefs.bridge.device.wire import outdated_notice


@pytest.mark.parametrize(
    ("asked", "user", "installed", "chosen"),
    [
        ("auto", 0, True, "device"),
        ("auto", 1000, True, "pyfuse3"),
        ("auto", 1000, False, "device"),
        ("pyfuse3", 0, True, "pyfuse3"),
        ("device", 1000, True, "device"),
    ],
)
def test_the_binding_is_the_one_asked_for_or_the_one_that_fits(
    monkeypatch, asked, user, installed, chosen
):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda _: installed or None)

    assert server.chosen(BridgeOptions(bridge=asked)) == chosen


class Device:
    """Registers backing files as the kernel does, or refuses."""

    def __init__(self, *, refuses=False):
        self.refuses = refuses
        self.given_up = []
        self._next = 0

    def ioctl(self, _device, request, argument, _mutate):
        if self.refuses:
            raise PermissionError(1, "not root")
        if request == passing._BACKING_CLOSE:
            self.given_up.append(int.from_bytes(argument, "little"))
            return 0
        self._next += 1
        return self._next


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(passing.fcntl, "ioctl", made.ioctl)
    return made


def a_copy():
    return os.open(os.devnull, os.O_RDONLY)


def test_all_opens_of_an_inode_share_one_backing_file_given_up_with_the_last(device):
    backings = Passthrough(0, agreed=True)

    assert backings.opened(5, 1, a_copy()) == 1
    assert backings.opened(5, 2, None) == 1
    assert backings.opened(6, 3, a_copy()) == 2
    backings.closed(1)
    assert backings.passes_through(5)
    backings.closed(2)

    assert not backings.passes_through(5)
    assert device.given_up == [1]
    assert backings.passes_through(6)


def test_an_inode_that_is_open_the_usual_way_stays_so_until_all_are_closed(device):
    backings = Passthrough(0, agreed=True)

    assert backings.opened(5, 1, None) is None
    assert backings.opened(5, 2, a_copy()) is None
    backings.closed(1)
    backings.closed(2)

    assert backings.opened(5, 3, a_copy()) == 1


def test_a_kernel_that_refuses_is_asked_once_and_the_file_is_read_here(device):
    device.refuses = True
    backings = Passthrough(0, agreed=True)

    assert backings.opened(5, 1, a_copy()) is None
    assert not backings.can_pass_through
    backings.closed(1)
    backings.closed(99)  # of a directory, or from before


def test_the_descriptor_of_a_copy_is_closed_whatever_becomes_of_it(device):
    backings = Passthrough(0, agreed=False)
    copy = a_copy()

    backings.opened(5, 1, copy)

    with pytest.raises(OSError, match="Bad file"):
        os.fstat(copy)


def test_backing_files_belong_to_the_connection_and_go_along_to_the_next_process(device):
    before = Passthrough(0, agreed=True)
    before.opened(5, 1, a_copy())
    before.opened(5, 2, None)
    before.opened(7, 3, None)

    after = Passthrough(0, agreed=True)
    after.resume(before.state())

    assert after.passes_through(5)
    after.closed(1)
    after.closed(2)
    assert device.given_up == [1]
    assert after.opened(7, 4, a_copy()) is None


def test_a_kernel_that_has_forgotten_an_inode_may_be_told_of_it(tmp_path):
    with (tmp_path / "device").open("wb") as device:
        Passthrough(device.fileno(), agreed=False).outdated(7)
    assert (tmp_path / "device").read_bytes() == outdated_notice(7)
    with open(os.devnull, "rb") as refuses:  # noqa: PTH123 -- a device
        Passthrough(refuses.fileno(), agreed=False).outdated(7)
