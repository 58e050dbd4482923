"""Two hosts on one machine, as far as a job can see: namespaces with a name, an address and a wire each.

Everything is in namespaces of its own, including mounts: nothing on the machine is changed, and nothing stays once
the processes have ended. Root needs nothing else; other users need a kernel that allows user namespaces.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

__all__ = ["ADDRESSES", "NAMES", "WIRE", "HostsError", "TwoHosts"]

NAMES = ("one", "two")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
WIRE = "wire"
"""The interface of both hosts."""
_READY = "ready"
_MADE_WITHIN_S, _ASKED_WITHIN_S, _ENDED_WITHIN_S = 20.0, 40.0, 20.0
_INSTALL = "install it (apt-get install util-linux iproute2 hostname)"
_REMEDY = (
    "two hosts on one machine are namespaces of the network, which root may have, or any user where the kernel allows "
    "user namespaces: run it as root (sudo make demo-hosts); in a container give that CAP_SYS_ADMIN and CAP_NET_ADMIN "
    "(docker run --privileged); on Ubuntu 24.04 allow it with sysctl kernel.apparmor_restrict_unprivileged_userns=0. "
    "make demo needs none of it"
)

# Arguments: the name of a host, its address, and the folder of its few files of /etc, because no name server answers
# there.
_BECOME = """
set -e
mount --make-rprivate /
hostname "$1"
mount --bind "$3/hosts" /etc/hosts
mount --bind "$3/nsswitch.conf" /etc/nsswitch.conf
ip link set lo up
if [ "$1" = two ]; then ip link add wire type veth peer name wire netns "$4"; fi
echo ready
read -r _
ip address add "$2/24" dev wire
ip link set wire up
ip route add default dev wire
echo ready
exec cat > /dev/null
"""


class HostsError(Exception):
    """The hosts cannot be made here; the message has the reason and the remedy."""


class TwoHosts:
    """Both hosts, and the commands on them.

    Args:
        folder: Folder for a few files of the hosts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._holders: list[subprocess.Popen[str]] = []
        self._commands: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(ADDRESSES, NAMES, strict=True))]
        (self._folder / "hosts").write_text("\n".join([*lines, ""]), encoding="ascii")
        (self._folder / "nsswitch.conf").write_text("hosts: files\n", encoding="ascii")
        try:
            for name, address in zip(NAMES, ADDRESSES, strict=True):
                self._holders.append(self._begun(name, address))
            for holder in self._holders:
                _tell(holder)
                _hear(holder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for command in self._commands:
            if command.poll() is None:
                command.send_signal(signal.SIGTERM)
        _wait_for(self._commands, _ASKED_WITHIN_S)
        # Remaining processes end by themselves when Ray's servers notice that the job is gone.
        until_s = time.monotonic() + _ENDED_WITHIN_S
        while self.processes() and time.monotonic() < until_s:
            time.sleep(0.1)
        for pid in self.processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for holder in self._holders:
            _end(holder)

    def start(
        self, host: int, words: Sequence[str | Path], out: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, in this folder; it ends together with this process."""
        inside = ("setpriv", "--pdeathsig", "TERM", "env", "-C", str(Path.cwd()))
        command = subprocess.Popen(
            [*self._into(host), *inside, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=None if out is None else subprocess.STDOUT,
            # An interrupt key is for the process that has started both.
            start_new_session=True,
        )
        self._commands.append(command)
        return command

    def holders(self) -> list[int]:
        """Return a process of each host that lives as long as the host."""
        return [holder.pid for holder in self._holders]

    def processes(self, host: int | None = None) -> list[int]:
        """Return the processes on a host, or on both."""
        held = {each.pid for each in self._holders}
        nets = {
            _net_of(each.pid) for each in (self._holders if host is None else [self._holders[host]])
        }
        pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
        return [pid for pid in pids if pid not in held and _net_of(pid) in nets - {None}]

    def _into(self, host: int) -> list[str]:
        pid = str(self._holders[host].pid)
        whose = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", pid, *whose, "--mount", "--uts", "--net"]

    def _begun(self, name: str, address: str) -> subprocess.Popen[str]:
        spaces = ["unshare", "--mount", "--uts", "--net"]
        if self._holders:  # next to the first namespace, because a wire joins networks of one owner
            whose = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
            first = self._holders[0].pid
            words = ["nsenter", "--target", str(first), *whose, "--mount", *spaces]
        else:
            first = 0
            words = [*spaces, *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
        words += ["sh", "-c", _BECOME, "sh", name, address, str(self._folder.resolve()), str(first)]
        pipe = subprocess.PIPE
        try:
            holder = subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
            )
        except FileNotFoundError as error:
            raise HostsError(f"{error.filename} is not there: {_INSTALL}") from None
        try:
            _hear(holder)
        except BaseException:
            _end(holder)
            raise
        return holder


def _end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    if holder.returncode is None:
        holder.communicate()


def _hear(holder: subprocess.Popen[str]) -> None:
    assert holder.stdout is not None, "a pipe"
    timer = threading.Timer(_MADE_WITHIN_S, holder.kill)
    timer.start()
    try:
        said = holder.stdout.readline().strip()
    finally:
        timer.cancel()
    if said != _READY:
        holder.kill()
        why = " ".join(holder.communicate()[1].split()) or f"no word within {_MADE_WITHIN_S:.0f} s"
        raise HostsError(f"{why}: {_INSTALL if 'not found' in why else _REMEDY}")


def _tell(holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None, "a pipe"
    holder.stdin.write("go on\n")
    holder.stdin.flush()


def _net_of(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:  # it has ended, or belongs to another user
        return None


def _wait_for(commands: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    for command in commands:
        with suppress(subprocess.TimeoutExpired):
            command.wait(max(0.1, until_s - time.monotonic()))
