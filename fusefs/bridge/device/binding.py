"""The binding over /dev/fuse as a whole: mount (by mount(2) for root, else fusermount3), agree, serve, unmount."""

# ruff: noqa: S603 -- fusermount3, no shell
import array
import errno
import os
import select
import shutil
import socket
import stat as stat_bits
import struct
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.api.protocol import FileSystem
from fusefs.bridge.api.waiting import run_blocking
from fusefs.bridge.device.loop import REQUEST_BYTES, Loop
from fusefs.bridge.device.passthrough import Passthrough
from fusefs.bridge.device.requests import Requests
from fusefs.bridge.device.wire import (
    IN_HEADER,
    MAJOR,
    OLDEST_MINOR,
    OUT_HEADER,
    Init,
    Opcode,
    init_reply,
)
from fusefs.bridge.process.handover import take
from fusefs.bridge.process.serving import HandOver, ServedMount, ended_by_signals, mounted_as
from fusefs.bridge.process.tuning import tune_kernel
from omniload.base.errors import ConfigError, StateError
from omniload.base.linux import calls
from omniload.base.log import get_logger

__all__ = ["MAX_PAGES", "Agreement", "agreement", "attach", "attach_as_root", "detach", "serve"]

MAX_PAGES = 256
"""Pages of the largest request: 1 MiB, the kernel's own limit unless its sysctl is raised."""
# Without READDIRPLUS_AUTO: with libfuse every listing brings attributes, and a mount may pass from it to this
# binding. Without WRITEBACK_CACHE: the kernel would own sizes and times, which another mount may change
# (docs/design/fusefs/0011).
_WANTED = (
    Init.ASYNC_READ
    | Init.ATOMIC_O_TRUNC
    | Init.BIG_WRITES
    | Init.AUTO_INVAL_DATA
    | Init.DO_READDIRPLUS
    | Init.ASYNC_DIO
    | Init.PARALLEL_DIROPS
    | Init.MAX_PAGES
    | Init.HANDLE_KILLPRIV_V2
    | Init.INIT_EXT
    | Init.DIRECT_IO_ALLOW_MMAP
    | Init.PASSTHROUGH
)
_LOG = get_logger(__name__)
_BEGINS_WITHIN_S = 30.0
"""Seconds for the kernel's first request, which it sends while it mounts."""


def attach(target: str, options: BridgeOptions, name: str) -> int:
    """Mount and return the descriptor of /dev/fuse, which does not block.

    Args:
        target: Real path of the mount point.
        options: The kernel's side.
        name: Name of the mount in ``mount`` and ``df``.

    Raises:
        ConfigError: fusermount3 is not installed, and this process is not root.
        StateError: The kernel or fusermount3 refuses.
    """
    device = attach_as_root(target, options, name) if os.geteuid() == 0 else None
    if device is None:
        device = _attach_as_user(target, options, name)
    # A request that poll announced may be gone at the read, because its caller was interrupted.
    os.set_blocking(device, False)
    return device


def detach(target: str) -> None:
    """Unmount from the mount point; open files stay as long as the daemon answers."""
    if os.geteuid() == 0:
        with suppress(OSError):
            calls.umount(target, lazily=True)
            return
    if (tool := shutil.which("fusermount3")) is not None:
        subprocess.run([tool, "-u", "-q", "-z", target], check=False, capture_output=True)


def _words(options: BridgeOptions) -> list[str]:
    return ["default_permissions", *(["allow_other"] if options.allow_other else [])]


def attach_as_root(target: str, options: BridgeOptions, name: str) -> int | None:
    """Mount by mount(2); return None where the system refuses and fusermount3 may be asked.

    Raises:
        StateError: There is no device, or there is no fusermount3 to ask.
    """
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StateError(
            f"{target!r} cannot be mounted: {error}; load the fuse module, "
            "or give the container the device"
        ) from error
    rootmode = stat_bits.S_IFMT(os.stat(target).st_mode)  # noqa: PTH116 -- before it is ours
    given = [f"fd={device}", f"rootmode={rootmode:o}", f"user_id={os.getuid()}"]
    given += [f"group_id={os.getgid()}", *_words(options)]
    flags = 0 if options.trusted else calls.MS_NOSUID | calls.MS_NODEV
    flags |= calls.MS_RDONLY if options.read_only else 0
    try:
        calls.mount(name, target, f"fuse.{name}", flags, ",".join(given))
    except OSError as error:
        os.close(device)
        if shutil.which("fusermount3") is None:
            raise StateError(f"{target!r} cannot be mounted: {error.strerror}") from error
        _LOG.debug("mount(2) of %s: %s; asking fusermount3", target, error.strerror)
        return None
    return device


def _attach_as_user(target: str, options: BridgeOptions, name: str) -> int:
    tool = shutil.which("fusermount3")
    if tool is None:
        raise ConfigError(f"{target!r} needs fusermount3 to be mounted by a user; install fuse3")
    given = [f"fsname={name}", f"subtype={name}", *_words(options)]
    given += ["ro"] if options.read_only else []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [tool, "-o", ",".join(given), "--", target],
            # fusermount3 sends the descriptor to this socket: it may not keep the device, and we may not open it.
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",  # the text names the mount point
            check=False,
        )
        if done.returncode:
            raise StateError(f"{target!r} cannot be mounted: {done.stderr.strip()}")
        theirs.close()  # otherwise a fusermount3 that sent nothing would be waited for without end
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise StateError(f"{target!r}: fusermount3 handed over no descriptor; is it version 3?")
    return array.array("i", descriptors)[0]


class Agreement(NamedTuple):
    """The protocol features that the kernel and this process agreed on for one connection."""

    reply: bytes
    """Body of the answer to INIT."""
    flags: Init


def agreement(body: memoryview, *, max_background: int, pass_through: bool) -> Agreement:
    """Answer ``fuse_init_in``: accept every wanted feature that the kernel offers.

    Args:
        body: The request.
        max_background: Requests the kernel may keep in flight.
        pass_through: Whether local copies may be handed to the kernel, which only root can. The kernel counts such a
            mount as a level of stacked file systems, of which it allows two.

    Raises:
        StateError: The kernel's protocol is too old.
    """
    major, minor, max_readahead, offered = struct.unpack_from("<4I", body)
    if (major, minor) < (MAJOR, OLDEST_MINOR):
        raise StateError(
            f"the kernel speaks FUSE {major}.{minor}, this bridge {MAJOR}.{OLDEST_MINOR} and later; "
            "mount with bridge=pyfuse3"
        )
    if offered & Init.INIT_EXT:
        (more,) = struct.unpack_from("<I", body, 16)
        offered |= more << 32
    flags = Init(_WANTED & offered)
    if not pass_through:
        flags &= ~Init.PASSTHROUGH
    reply = init_reply(
        minor=minor,
        max_readahead=max_readahead,
        agreed=flags,
        max_background=max_background,
        max_pages=MAX_PAGES,
    )
    return Agreement(reply, flags)


def serve(
    filesystem: FileSystem,
    mountpoint: str,
    options: BridgeOptions,
    *,
    name: str,
    ready: Callable[[], None],
    let_go: Callable[[], None],
) -> None:
    """Mount, answer until unmounted or asked to end, unmount; see ``fusefs.bridge.server.serve``.

    With ``take_over``, continue the mount of another process instead of mounting.
    """
    target = os.path.realpath(mountpoint)
    connection = (
        _taken_over(target, filesystem)
        if options.take_over
        else _mounted(target, filesystem, options, name)
    )
    handed = False
    try:
        handed = _served(connection, target, options, ready, let_go)
    finally:
        if connection.loop.connected and not handed:
            detach(target)
        connection.loop.close()
        os.close(connection.device)


@dataclass(frozen=True, slots=True)
class _Connection:
    """The mount of this process."""

    device: int
    filesystem: FileSystem
    passthrough: Passthrough
    loop: Loop


def _connected(
    device: int,
    filesystem: FileSystem,
    *,
    can_pass_through: bool,
    request_bytes: int = REQUEST_BYTES,
) -> _Connection:
    passthrough = Passthrough(device, agreed=can_pass_through)
    filesystem.connected(passthrough)
    loop = Loop(device, filesystem, Requests(filesystem, passthrough), request_bytes)
    return _Connection(device, filesystem, passthrough, loop)


def _mounted(target: str, filesystem: FileSystem, options: BridgeOptions, name: str) -> _Connection:
    device = attach(target, options, name)
    try:
        flags = _agreed(device, options, copies=filesystem.hands_over_copies)
        return _connected(device, filesystem, can_pass_through=Init.PASSTHROUGH in flags)
    except BaseException:
        detach(target)
        os.close(device)
        raise


def _taken_over(target: str, filesystem: FileSystem) -> _Connection:
    taken = take(target)
    try:
        _check_same_mount(taken.state["mount"], target)
        handed_state = taken.state["passthrough"]
        connection = _connected(
            taken.device,
            filesystem,
            can_pass_through=handed_state["agreed"],
            # The process that began the connection may have agreed to larger requests; older releases did not send
            # their size.
            request_bytes=max(REQUEST_BYTES, taken.state.get("request_bytes", 0)),
        )
        connection.passthrough.resume(handed_state)
        run_blocking(filesystem.taken_over(taken.state["filesystem"]))
    except BaseException:
        taken.decline()
        raise
    # Confirm last, after everything that can fail: from the confirmation on, no other process serves the mount.
    taken.confirm()
    return connection


def _check_same_mount(device: str, target: str) -> None:
    """Check that both processes mean the same mount: containers may share names of sockets, but not mounts.

    Raises:
        StateError: The other process has another mount.
    """
    if device != (found := mounted_as(target)):
        raise StateError(
            f"the process that answers for {target!r} serves device {device}, here it is {found}; "
            "take it over where it is mounted"
        )


def _served(
    connection: _Connection,
    target: str,
    options: BridgeOptions,
    ready: Callable[[], None],
    let_go: Callable[[], None],
) -> bool:
    """Serve until the end; return whether the mount continues in another process."""
    loop = connection.loop

    def state() -> dict[str, Any]:
        return {
            "passthrough": connection.passthrough.state(),
            "request_bytes": loop.request_bytes,
        }

    mount = ServedMount(target, connection.device, connection.filesystem, loop)
    with (
        ended_by_signals(loop.end, target),
        closing(HandOver(mount, state, loop.end, let_go)) as hand_over,
    ):
        # Tune after the answer to INIT, which would reset read-ahead to 128 KiB.
        tune_kernel(options, target)
        ready()
        loop.run()
    return hand_over.handed


def _agreed(device: int, options: BridgeOptions, *, copies: bool) -> Init:
    """Answer INIT, the first request of a connection."""
    # Use poll, because select takes no descriptor above 1,023.
    begins = select.poll()
    begins.register(device, select.POLLIN)
    if not begins.poll(_BEGINS_WITHIN_S * 1000):
        raise StateError(
            f"the kernel has asked nothing of a new mount within {_BEGINS_WITHIN_S:g} s; mount it anew"
        )
    request = memoryview(os.read(device, 1 << 16 | 1 << 20))
    wanted = options.read_only if options.passthrough is None else options.passthrough
    _, opcode, unique, *_ = IN_HEADER.unpack_from(request)
    if opcode != Opcode.INIT:
        raise StateError(f"the kernel began with request {opcode} instead of INIT")
    try:
        agreed = agreement(
            request[IN_HEADER.size :],
            max_background=options.max_background,
            pass_through=copies and wanted and os.geteuid() == 0,
        )
    except StateError:
        # Answer even now, because every access to the mount point waits for INIT.
        os.write(device, OUT_HEADER.pack(OUT_HEADER.size, -errno.EPROTO, unique))
        raise
    head = OUT_HEADER.pack(OUT_HEADER.size + len(agreed.reply), 0, unique)
    os.writev(device, (head, agreed.reply))
    return agreed.flags
