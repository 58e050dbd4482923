"""Two hosts on one machine: network namespaces with an address each, and a wire between them."""

import secrets
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.house.modules import ROOT
from tests.support.every_process import every_process
from tests.support.namespaces import inside

__all__ = [
    "ADDRESSES",
    "NO_TOKEN",
    "begin_bare_node",
    "begin_ray",
    "cut",
    "end_all_on",
    "head_of",
    "mend",
    "on",
    "processes_on",
    "slowed",
    "two_hosts",
    "wait_for_ray",
]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
UP = "up: "
"""The text that a bare node prints before the address of its head."""
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
"""Variables for a Ray without tokens, and for the ranks that join it."""
_OF_RAY = {
    # ``ray start`` asks for the user's token if the home has one, as any ``ray.init()`` leaves it there. Ranks that
    # join ask for it too and get the same variables.
    **NO_TOKEN,
    # No processes in advance of any request, because each one loads Ray.
    "RAY_prestart_worker_first_driver": "0",
    "PYTHONUNBUFFERED": "1",
}
_SMALL = ("--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats")
# The monitors of clouds and logs each take a second of processor time to start.
_BARE = ("--no-monitor", "--include-log-monitor=false")
_ETC = Path("/etc/netns")


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts():
    """Make two hosts and yield their names; host names are looked up only in files, because no name server answers."""
    mark = secrets.token_hex(3)
    names = [f"omni{mark}{end}" for end in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
            etc = _ETC / name
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("127.0.0.1 localhost\n")
            (etc / "nsswitch.conf").write_text("hosts: files\n")
        wire = _wire_of(names[0])
        _ip("link", "add", wire, "netns", names[0], "type", "veth", "peer", wire, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", wire)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", wire, "up")
            # A default route as every host has one: Ray finds its own address by that route.
            _ip("-n", name, "route", "add", "default", "dev", wire)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            for file in (_ETC / name).glob("*"):
                file.unlink()
            if (_ETC / name).exists():
                (_ETC / name).rmdir()


def cut(host):
    """Cut the wire of one host: everything that it sends and receives is lost."""
    _ip("-n", host, "link", "set", _wire_of(host), "down")


def mend(host):
    """Restore the wire."""
    _ip("-n", host, "link", "set", _wire_of(host), "up")
    _ip("-n", host, "route", "add", "default", "dev", _wire_of(host))


@contextmanager
def slowed(hosts, rate):
    """Limit the wire to ``rate`` (``200kbit``) in each direction; yield a function that counts delayed packets.

    A faster sender is slowed down by lost packets, as on a link that other traffic fills.
    """
    limits = ("tbf", "rate", rate, "burst", "4kb", "latency", "200ms")
    ends = {host: ("dev", _wire_of(host)) for host in hosts}

    def held_back():
        told = [_tc(host, "-s", "qdisc", "show", *end) for host, end in ends.items()]
        return sum(int(text.partition("overlimits ")[2].split()[0]) for text in told)

    try:
        for host, end in ends.items():
            _tc(host, "qdisc", "add", *end, "root", *limits)
        yield held_back
    finally:
        for host, end in ends.items():
            command = ["tc", "-n", host, "qdisc", "delete", *end, "root"]
            subprocess.run(command, check=False, capture_output=True)


def _tc(host, *words):
    command = ["tc", "-n", host, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _wire_of(host):
    return f"w{host.removeprefix('omni')[:-1]}"


def on(host, *words, **options):
    """Start a command on a host, or next to the test if ``host`` is empty."""
    return subprocess.Popen(
        [*(inside(host) if host else ()), *map(str, words)], text=True, **options
    )


def processes_on(host):
    """Return the processes of a host."""
    there, found = Path(f"/run/netns/{host}").stat().st_ino, []
    for process in every_process():
        with suppress(OSError):
            if Path(f"/proc/{process.pid}/ns/net").stat().st_ino == there:
                found.append(process)
    return found


def end_all_on(host):
    """End all processes of a host at once: stop them first, so that none can report another's end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes_on(host):
            with suppress(psutil.Error):
                process.send_signal(number)


def begin_ray(host, *place, folder, env):
    """Start a node of a given Ray on a host, as users do; ``wait_for_ray`` waits for it."""
    address = ADDRESSES[host.endswith("b")]
    return on(
        host,
        *(Path(sys.executable).with_name("ray"), "start", "--block", *place, *_SMALL, *_BARE),
        *(f"--node-ip-address={address}", f"--temp-dir={folder}"),
        env=env | _OF_RAY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for_ray(node):
    """Wait until a node reports that it is up; fail with its command if it ends before."""
    while "Ray runtime started" not in (line := node.stdout.readline()):
        assert line, f"{' '.join(node.args)} did not start"


def begin_bare_node(host, *head, folder, env, python=sys.executable):
    """Start a node as ``begin_ray`` does, without services that no data plane uses; ``head_of`` waits for it."""
    folder.mkdir()
    return on(
        host,
        *(python, ROOT / "tests" / "support" / "plane" / "processes" / "ray_node.py"),
        *(ADDRESSES[host.endswith("b")] if host else "127.0.0.1", folder, *head),
        env=_OF_RAY | env | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def head_of(node):
    """Wait until such a node is up; return the address of its head."""
    said = []
    for line in node.stdout:
        if line.startswith(UP):
            return line.removeprefix(UP).strip()
        said.append(line)
    raise AssertionError(f"no node of Ray came up: {''.join(said)}")
