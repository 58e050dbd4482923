"""A mount by fusermount3: what it hands over, and what it does not."""

import fcntl
import os
import resource
import socket
import subprocess

import pytest

from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.device import binding
from fusefs.bridge.device.wire import IN_HEADER, OUT_HEADER, Opcode
from omniload.base.errors import StateError


def test_a_fusermount_that_hands_nothing_over_is_not_waited_for(monkeypatch, tmp_path):
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(binding.shutil, "which", lambda _: "/bin/fusermount3")
    monkeypatch.setattr(binding.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(binding.os, "geteuid", lambda: 1000)

    with pytest.raises(StateError, match="handed over no descriptor"):
        binding.attach(str(tmp_path), BridgeOptions(), "omnifs")


@pytest.fixture
def many_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"a process may have {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_with_a_thousand_open_files_mounts_as_any_other(many_descriptors):
    kernel, low = socket.socketpair()
    device = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1500)
    body = (7).to_bytes(4, "little") + (38).to_bytes(4, "little") + bytes(56)
    size = IN_HEADER.size + len(body)
    with kernel, low:
        kernel.sendall(IN_HEADER.pack(size, Opcode.INIT, 1, 0, 0, 0, 0, 0, 0) + body)

        binding._agreed(device, BridgeOptions(), copies=False)

        os.close(device)
        assert OUT_HEADER.unpack_from(kernel.recv(4096))[1:] == (0, 1)


def test_a_kernel_that_asks_nothing_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(binding, "_BEGINS_WITHIN_S", 0.0)
    kernel, device = socket.socketpair()
    with kernel, device, pytest.raises(StateError, match="has asked nothing of a new mount"):
        binding._agreed(device.fileno(), BridgeOptions(), copies=False)
