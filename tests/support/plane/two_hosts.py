"""Two hosts on one machine: network namespaces with an address each, and a wire between them."""

import secrets
import subprocess
from contextlib import contextmanager
from pathlib import Path

from tests.support.namespaces import inside

__all__ = ["ADDRESSES", "NO_TOKEN", "on", "two_hosts"]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
"""For ``ray start``, which asks for the token of a user whose home has one, as any ``ray.init()`` leaves it there."""
_ETC = Path("/etc/netns")


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts():
    """Make them, and give their names; names of hosts are looked up in files alone, as no server answers there."""
    mark = secrets.token_hex(3)
    names = [f"omni{mark}{end}" for end in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
            etc = _ETC / name
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("127.0.0.1 localhost\n")
            (etc / "nsswitch.conf").write_text("hosts: files\n")
        wire = f"w{mark}"
        _ip("link", "add", wire, "netns", names[0], "type", "veth", "peer", wire, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", wire)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", wire, "up")
            # As every host has one: Ray finds its own address by the way that leads out.
            _ip("-n", name, "route", "add", "default", "dev", wire)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            for file in (_ETC / name).glob("*"):
                file.unlink()
            if (_ETC / name).exists():
                (_ETC / name).rmdir()


def on(host, *words, **options):
    """Start a command on a host."""
    return subprocess.Popen([*inside(host), *map(str, words)], text=True, **options)
