"""A mount by fusermount3: what it hands over, and what it does not."""

import subprocess

import pytest

from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.device import binding
from omniload.base.errors import StateError


def test_a_fusermount_that_hands_nothing_over_is_not_waited_for(monkeypatch, tmp_path):
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(binding.shutil, "which", lambda _: "/bin/fusermount3")
    monkeypatch.setattr(binding.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(binding.os, "geteuid", lambda: 1000)

    with pytest.raises(StateError, match="handed over no descriptor"):
        binding.attach(str(tmp_path), BridgeOptions(), "omnifs")
