"""One process for each mount: ready when ``start_daemon`` returns, and its death is noticed.

``start_daemon`` in the parent and ``run_daemon`` in the process are the two ends of one pipe:
the daemon writes ``ready``, or its error, to the descriptor that it is given.
"""

# ruff: noqa: S603 -- our own interpreter and fusermount3, no shell
import errno
import gc
import os
import shutil
import signal
import stat as stat_bits
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fusefs.bridge.api.options import BridgeOptions
from omniload.base.concurrency.time_limit import call_within
from omniload.base.errors import (
    ConfigError,
    DefectError,
    OmniloadError,
    StateError,
    UnavailableError,
    project_error,
)
from omniload.base.linux.mount_table import fuse_mount_at, mount_point
from omniload.base.log import get_logger, set_up_logging
from omniload.base.writing import open_log

__all__ = [
    "clear_dead_mount",
    "failure_of",
    "followed",
    "run_daemon",
    "serve_reporting",
    "start_daemon",
    "umount",
    "unmount_command",
    "why_not",
]

_CODES = {1: DefectError, 2: ConfigError, 3: UnavailableError, 4: StateError}
_READY = b"ready"
_MOST_DEAD = 8
"""Most dead mounts at one mount point, stacked on each other."""
_GIVEN_UP_WITHIN_S = 10.0
"""Seconds in which a daemon must end during its start."""
_UNMOUNTED_WITHIN_S = 60.0
"""Most seconds of an unmount: the kernel first sends dirty pages to the daemon."""
_ANSWERS_WITHIN_S = 30.0
"""Most seconds in which an existing mount must answer."""
_LOG = get_logger(__name__)


def start_daemon(
    module: str,
    settings: bytes,
    mountpoint: str,
    *,
    log_path: str | None = None,
    words: Sequence[str] = (),
) -> "subprocess.Popen[bytes]":
    """Start ``python -m MODULE READY_FD WORDS...`` and return when its mount is usable.

    A dead mount at the mount point is removed first.

    Args:
        module: Module whose ``main`` calls ``run_daemon``.
        settings: Settings that the daemon reads from standard input.
        mountpoint: Directory to mount on.
        log_path: Log file of the daemon; standard error if not given.
        words: Further arguments.

    Raises:
        ConfigError: The mount point is no directory, or the daemon reports this error.
        UnavailableError: The daemon reports this error.
        StateError: The daemon reports this error, or ended without a report; or the mount point cannot be used.
    """
    clear_dead_mount(mountpoint)
    ready, report_fd = os.pipe()
    with os.fdopen(ready, "rb") as pipe:
        process = _begun(module, report_fd, words, log_path)
        try:
            _give(process, settings)
            answer = pipe.read()
        except BaseException:  # above all Ctrl-C: nobody would know of the remaining mount
            _take_back(process, mountpoint)
            raise
    if answer != _READY:
        code = process.wait()  # the code gives the class of the error
        raise failure_of(answer, code, log_path)
    return process


def _begun(
    module: str, report_fd: int, words: Sequence[str], log_path: str | None
) -> "subprocess.Popen[bytes]":
    log = None
    try:
        log = open_log(log_path) if log_path else None
        return subprocess.Popen(
            [sys.executable, "-m", module, str(report_fd), *words],
            stdin=subprocess.PIPE,
            # Not a pipe of the caller, which would not end while the daemon holds it.
            stdout=log,
            stderr=log,
            pass_fds=[report_fd],
            start_new_session=True,  # Ctrl-C ends the command, but not its mount
        )
    finally:
        # Close it here, too: the pipe ends, and with it the wait for the daemon, only when no process has it open.
        os.close(report_fd)
        if log is not None:
            os.close(log)


def _give(process: "subprocess.Popen[bytes]", settings: bytes) -> None:
    assert process.stdin is not None
    # If the process has already ended, the other pipe or its exit code says why.
    with suppress(BrokenPipeError):
        process.stdin.write(settings)
    with suppress(BrokenPipeError):
        process.stdin.close()


def followed(process: "subprocess.Popen[bytes]") -> int:
    """Pass signals that end this process on to a daemon, wait until it ends, and return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: process.send_signal(received))
    return process.wait()


def failure_of(answer: bytes, code: int, log_path: str | None) -> OmniloadError:
    """Return the reason why a daemon did not become ready.

    Args:
        answer: Its report instead of ``ready``; empty if it could not report.
        code: Its exit code; if negative, the signal that ended it.
        log_path: Its log file, which the message names only if there is one.
    """
    if answer:
        return _CODES.get(code, StateError)(answer.decode(errors="replace"))
    how = f"ended with {code}"
    if code < 0:
        with suppress(ValueError):  # some numbers have no name
            how = f"was ended by {signal.Signals(-code).name}"
    kept = log_path not in {None, os.devnull}
    where = f"; its log is {log_path}" if kept else "; start it with --log FILE to see more"
    return StateError(f"the daemon {how} before its mount was usable{where}")


def _report_failure(error: Exception, role: str, report_fd: int | None) -> int:
    """Log why a daemon ends and report it to its parent, in one line; return its exit code.

    Args:
        error: Error that ended it.
        role: Name of the daemon.
        report_fd: Descriptor that the parent reads; ``None`` if the parent no longer waits.
    """
    fault = project_error(error, f"the {role} daemon")
    _LOG.error("%s", fault, exc_info=error if isinstance(fault, DefectError) else None)
    if report_fd is not None:
        # The parent shows the report as its own error, which is one line.
        line = " ".join(str(fault).split())
        try:
            os.write(report_fd, line.encode(errors="backslashreplace"))
        except OSError:
            _LOG.debug("the parent has gone")
    return fault.exit_code


def _take_back(process: "subprocess.Popen[bytes]", mountpoint: str) -> None:
    """End a daemon whose start is given up; at a signal, it unmounts by itself."""
    process.terminate()
    try:
        process.wait(_GIVEN_UP_WITHIN_S)
    except subprocess.TimeoutExpired:  # it is in a call of the store's client that no signal ends
        process.kill()
        process.wait()
        with suppress(OmniloadError):
            clear_dead_mount(mountpoint)


def run_daemon(serve: Callable[[bytes, Callable[[], None]], None], *, role: str) -> None:
    """Run as the process that ``start_daemon`` starts: the body of its module's ``main``.

    Args:
        serve: Called with the settings, and with a function to call once the mount is usable.
        role: Name of the process in its log.
    """
    report_fd = int(sys.argv[1])
    # A child process of the daemon would keep the pipe open, and the parent waiting.
    os.set_inheritable(report_fd, False)
    set_up_logging("INFO", role=role)
    if code := serve_reporting(
        lambda ready: serve(sys.stdin.buffer.read(), ready), report_fd, role=role
    ):
        sys.exit(code)


def serve_reporting(
    serve: Callable[[Callable[[], None]], None], report_fd: int, *, role: str
) -> int:
    """Serve a mount until it ends; report to the parent that it is usable, or the error; return the exit code.

    Args:
        serve: Called with a function to call once the mount is usable.
        report_fd: Descriptor that the parent reads; closed after the report that the mount is usable.
        role: Name of the process in its log.
    """
    is_ready = False

    def ready() -> None:
        nonlocal is_ready
        gc.freeze()  # objects that exist at this point stay, so the collector need not scan them again
        is_ready = True
        try:
            os.write(report_fd, _READY)
        except BrokenPipeError:
            _LOG.error(
                "the process that started this mount has gone before it was ready; unmounting"
            )
            # Both bindings, and a watch, end by this signal as usual. Otherwise the mount would stay forever, because
            # nobody knows of it.
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.close(report_fd)

    try:
        serve(ready)
    except Exception as error:  # noqa: BLE001 -- reported to the parent, whatever it is
        # After the report, the number may belong to another file.
        return _report_failure(error, role, None if is_ready else report_fd)
    return 0


def umount(mountpoint: str) -> None:
    """Unmount; the daemon ends by itself.

    Raises:
        StateError: It is not a mount, or it is in use.
        UnavailableError: The kernel waits for the daemon.
    """
    try:
        done = subprocess.run(
            [*unmount_command(lazily=False), mountpoint],
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",  # the text names the mount point
            check=False,
            timeout=_UNMOUNTED_WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"{mountpoint!r} is not unmounted after {_UNMOUNTED_WITHIN_S:g} s, as the process behind it does not "
            f"answer; let that go on or kill it, or: {' '.join(unmount_command(lazily=True))} {mountpoint}"
        ) from None
    if done.returncode:
        if fuse_mount_at(mount_point(mountpoint)) is None:
            raise StateError(f"{mountpoint!r} is not mounted through FUSE; give a mount point")
        busy = "; close what is open there: fuser -vm names the processes"
        remedy = busy if "busy" in done.stderr else ""
        raise StateError(f"{mountpoint!r} stays mounted: {done.stderr.strip()}{remedy}")


def unmount_command(*, lazily: bool) -> list[str]:
    """Return the command that unmounts; root does not need that of FUSE.

    Raises:
        ConfigError: There is none.
    """
    if (tool := shutil.which("fusermount3")) is not None:
        return [tool, "-uz" if lazily else "-u"]
    if os.geteuid() == 0 and (tool := shutil.which("umount")) is not None:
        return [tool, *(["-l"] if lazily else [])]
    raise ConfigError("fusermount3 is not installed; install fuse3")


def why_not(target: str, options: BridgeOptions, fuse_conf: str = "/etc/fuse.conf") -> str | None:
    """Return why a user may not mount, as far as this is known in advance, because libfuse does not say."""
    if os.geteuid() == 0:
        return None
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed; install fuse3"
    if not os.access(target, os.W_OK):
        return "the directory is not yours to write; mount on one that is"
    if options.allow_other:
        try:
            lines = Path(fuse_conf).read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        if "user_allow_other" not in [line.strip() for line in lines]:
            return f"allow_other needs the line user_allow_other in {fuse_conf}"
    return None


def _asked(mountpoint: str, within_s: float) -> os.stat_result:
    """Return the status of a mount point; if something is mounted there, its daemon is asked."""

    def answer() -> os.stat_result:
        # the kernel may answer stat from its cache without asking a dead daemon
        os.statvfs(mountpoint)
        return os.stat(mountpoint)  # noqa: PTH116 -- the errno is what is asked for

    if fuse_mount_at(mount_point(mountpoint)) is None:
        return answer()
    try:
        return call_within(within_s, answer, what=f"the mount at {mountpoint!r}")
    except UnavailableError:
        raise UnavailableError(
            f"{mountpoint!r} is a mount already, and the process behind it does not answer within "
            f"{within_s:g} s; let that go on or end it, then: omniload fs umount {mountpoint}"
        ) from None


def clear_dead_mount(mountpoint: str, within_s: float = _ANSWERS_WITHIN_S) -> None:
    """Remove a mount whose daemon is dead ("Transport endpoint is not connected").

    Args:
        mountpoint: Mount point, which may have no mount.
        within_s: Most seconds in which a live mount must answer.

    Raises:
        ConfigError: The mount point does not exist, or is no directory.
        UnavailableError: There is a mount whose daemon does not answer.
    """
    for _ in range(_MOST_DEAD):
        try:
            found = _asked(mountpoint, within_s)
        except FileNotFoundError:
            raise ConfigError(f"mount point {mountpoint!r} is not there; make it first") from None
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise StateError(f"mount point {mountpoint!r} cannot be used: {error}") from error
            subprocess.run(
                [*unmount_command(lazily=True), mountpoint], check=False, capture_output=True
            )
        else:
            if not stat_bits.S_ISDIR(found.st_mode):
                raise ConfigError(f"mount point {mountpoint!r} is a file; give an empty directory")
            return
    raise StateError(f"a dead mount at {mountpoint!r} cannot be taken away; unmount it as its user")
