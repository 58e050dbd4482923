"""A mount by libfuse that comes to nothing leaves nothing."""

import pytest

from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.api.protocol import FileSystem

binding = pytest.importorskip("fusefs.bridge.libfuse.binding")


class Refusing(FileSystem):
    """Ends as a signal would that comes between the mount and its first request."""

    def connected(self, kernel):
        raise SystemExit(143)


def test_whatever_ends_a_mount_before_its_first_request_takes_it_away(monkeypatch, tmp_path):
    closed = []
    monkeypatch.setattr(binding.pyfuse3, "init", lambda *_: None)
    monkeypatch.setattr(binding.pyfuse3, "close", lambda *, unmount: closed.append(unmount))

    with pytest.raises(SystemExit):
        binding.serve(
            Refusing(),
            str(tmp_path),
            BridgeOptions(),
            name="omnifs",
            ready=lambda: None,
            let_go=lambda: None,
        )

    assert closed == [True]
