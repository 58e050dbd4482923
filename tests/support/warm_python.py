"""Warm Python: processes are forked from one that has loaded the modules of ranks, commands, or workers of Ray.

Imports take a rank two to four seconds of processor time, and a command or the daemon of a mount half a second to one
and a half. Tests start hundreds of each, and most tests prove nothing about imports. The following processes are
started for real. Ranks: in every page that is run, in one job that is launched, and in ``test_stopped_hosts.py``. The
process from which Ray forks its workers: wherever a process that was started for real opens the plane, and where
tests look at the titles of workers, for which a fork has no room. Daemons: in ``test_secrets.py``,
``test_system.py``, under every supervisor and by every command that mounts. Commands: in ``test_docs_walks.py`` (the
page of starts), ``test_distribution.py`` and ``test_launch.py`` (the job that comes back). ``tests/frameworks`` fork
from themselves.

    with WarmPython(folder, RANKS) as python:
        subprocess.Popen([python.path, "rank.py", "1"])
        subprocess.run([python.path, "-m", "torch.distributed.run", "rank.py"], env=os.environ | python.for_launchers)

The started process is a small one (``_CLIENT``) that stands for the script's process. It has the script's output,
forwards signals, ends when the script ends and with the same code, and ends the script if it is killed itself. The
script has its open files, its parent and its namespaces.

    WarmPopen([sys.executable, "-m", "omniload", "mix", "check"], python_of=lambda words: python)

A program that the test process itself starts needs no stand-in: it is forked as a child of that process
(``_forked_beside``), with its identifier, signals and end, its files, folder, variables and limits. It is started for
real if it would inherit anything else than the warm process did: see ``_inherited``.
"""

import atexit
import ctypes
import fcntl
import gc
import inspect
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from omniload.actors.ray.hosts import worker
from omniload.actors.reaper_process import MARKS

__all__ = [
    "COMMANDS",
    "OMNILOAD",
    "RANKS",
    "WORKERS",
    "WarmPopen",
    "WarmPython",
    "is_command",
    "is_for_workers",
    "is_process",
    "is_script",
    "read_early",
]

WORKERS = worker.BEFORE_RAY
RANKS = (
    *("torch", "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    # Torch loads this when the first tensor is spread over ranks, which takes a second in each of them.
    *("torch._dynamo", "omniload.front.opening", "trainer_integration.run.external_rank"),
    # Ray is not among them, because it takes settings from variables when it is loaded.
    *("omniload.actors.local.plane", "trainer_integration.run.trainer"),
    *("omniload.base.cli", "trainer_integration.cli", "trainer_integration.commands.run"),
    # Ray's imports of other packages take half as long as those of a rank.
    *WORKERS,
)
_DAEMONS = (
    *("fusefs.mounts.daemon", "fusefs.mounts.supervisor"),
    *("snapshot.image.mount.daemon", "snapshot.engines.podman.mount"),
)
COMMANDS = (
    *_DAEMONS,
    "fusefs.bridge.libfuse.loop",  # imported by a daemon when it mounts
    *("fusefs.cli", "omniload.cli", "snapshot.commands.env", "snapshot.commands.image"),
    *("omniload.commands.mix_tables", "omniload.commands.opening", "rich.table"),
    # These are loaded late, by a single verb or when it opens a source, and take half of the time of a command on a
    # small mix.
    *("omniload.actors.local.plane", "omniload.commands.check", "omniload.commands.plan"),
    *("omniload.commands.preview", "omniload.commands.stats", "rich._emoji_codes"),
    *("omniload.source.formats.jsonl", "omniload.source.formats.parquet", "pyarrow.compute"),
)
_KEEPS_REPORT = ["-m", "trainer_integration.report.report"]
_PROCESSES = {Path(__file__).parent / room / "processes" for room in ("plane", "trainer")}
OMNILOAD = Path(sys.executable).with_name("omniload")
_AS_TEXT = "from omniload.base.cli import main; main()"
# Variables that an interpreter, or a library, reads when it starts.
_READ_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OMP_", "GRPC_", "ARROW_", "MIMALLOC_")
# These are read later nevertheless: by launchers, by our own code, by Arrow when it first connects to HDFS, and by
# `breakpoint`, for which Ray sets it in each process that connects.
_READ_LATE = {"PYTHON_EXEC", "PYTHONPATH", "ARROW_LIBHDFS_DIR", "PYTHONBREAKPOINT"}
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_SYS_CLONE3 = 435
_PR_SET_NAME, _PR_SET_MM, _PR_GET_TID_ADDRESS = 15, 35, 40
_PR_SET_MM_MAP = 14
_OF_STATUS = ("Umask", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed:")
# Every Python ignores these from its start, whatever its parent does; Java in the parent has handlers of them.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
# If a test has started Java, Java raises the limit of open files and blocks a signal.
_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
_OF_CHILDREN = ".children"
_SIZE_BYTES = 8
_MOST_FILES = 64
_KEPT: list[object] = []
_NONE = ctypes.c_ulong(0)
_ROOT = str(Path(__file__).parents[2])
_STARTED_S = 300
# A fork has only the thread that forks.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
held = [int(name) for name in os.listdir("/proc/self/fd")]
held = [number for number in held if number != server.fileno() and os.path.exists(f"/proc/self/fd/{{number}}")]
asked = json.dumps([[*{before!r}, *sys.argv[1:]], os.getcwd(), dict(os.environ), os.getppid(), held]).encode()
socket.send_fds(server, [len(asked).to_bytes({size}, "big")], held)
server.sendall(asked)
words = server.makefile()
pid = int(words.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(words.readline() or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class WarmPython:
    """The process that others are forked from; use it in a ``with``."""

    def __init__(
        self, folder: Path, modules: Sequence[str] = RANKS, workers: "WarmPython | None" = None
    ) -> None:
        """Start it with ``modules`` loaded, and its sockets in an empty folder with a short path.

        Args:
            folder: The folder of the sockets.
            modules: The modules to load.
            workers: The process from which workers of Ray are forked, if a forked process opens a plane.
        """
        self.path = str(folder / "python")
        """Program to start instead of ``sys.executable``."""
        self.for_launchers = {"PYTHON_EXEC": self.path}
        """Variables by which torchrun, and our launcher, start ranks with it."""
        self.folder = folder
        """Folder that must be first in ``PATH`` if a shell is to start ``omniload`` warm."""
        self._address = str(folder / "socket")
        self._owner = os.getpid()
        self._inherited = _inherited()
        self._early = read_early(os.environ)
        self._folders = [_ROOT, *_folders(os.environ)]
        for name, before in {"python": (), "omniload": (str(OMNILOAD),)}.items():
            text = _CLIENT.format(
                python=sys.executable, address=self._address, size=_SIZE_BYTES, before=before
            )
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        path = os.pathsep.join(self._folders)
        # Without marks, because a process started while a plane starts would otherwise end with the plane.
        unmarked = {name: value for name, value in os.environ.items() if name != MARKS}
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address, workers.path if workers else "", *modules],
            env=unmarked | _ONE_THREAD | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        ready, _, _ = select.select([self._process.stdout], [], [], _STARTED_S)
        assert ready, f"no warm Python within {_STARTED_S} s"
        assert self._process.stdout.readline() == b"ready\n"

    @property
    def pid(self) -> int:
        """The process that others are forked from."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The end of this input ends the process, except if a fork of ours still has the pipe and lives on.
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait(_STARTED_S)
        self._process.stdout.close()

    def child(self, given: Mapping[str, Any]) -> int | None:
        """Start a command as a child of this process; return its number, or ``None`` if it must be started for real.

        Args:
            given: Arguments of ``Popen``'s call of its ``_execute_child``, by name.
        """
        variables = os.environ if given["env"] is None else given["env"]
        as_ours = (
            os.getpid() == self._owner
            and given["close_fds"]
            and all(given[name] is None for name in ("preexec_fn", "gid", "gids", "uid"))
            and given["umask"] < 0
            and read_early(variables) == self._early
            # A module of another folder might otherwise be replaced by a loaded one.
            and {*_folders(variables)} <= {*self._folders}
            and _inherited() == self._inherited
        )
        if not as_ours:
            return None
        streams = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
        files = {number: number if had < 0 else had for number, had in streams.items()}
        files |= {number: number for number in given["pass_fds"]}
        asked = {
            "command": [os.fsdecode(word) for word in given["args"]],
            "folder": os.path.abspath(os.fsdecode(given["cwd"] or ".")),  # noqa: PTH100 -- of any type
            "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in variables.items()},
            "numbers": list(files),
            "limits": [(kind, resource.getrlimit(kind)) for kind in _LIMITS],
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "session": given["start_new_session"],
            "group": given["process_group"],
        }
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(self._address + _OF_CHILDREN)
            text = json.dumps(asked).encode()
            size = len(text).to_bytes(_SIZE_BYTES, "big")
            socket.send_fds(server, [size], list(files.values()))
            server.sendall(text)
            with server.makefile() as words:
                pid = int(words.readline())
                assert words.readline() == "begun\n", f"{asked['command']} did not begin"
        return pid


class WarmPopen(subprocess.Popen):
    """``Popen`` whose process is forked from a warm one if possible."""

    def __init__(
        self, *given: Any, python_of: Callable[[object], WarmPython | None], **named: Any
    ) -> None:
        """Start it as ``Popen`` does, from the Python that ``python_of`` returns for its words."""
        self._python_of = python_of
        super().__init__(*given, **named)

    def _execute_child(self, *given: Any, **named: Any) -> None:
        start = super()._execute_child
        by_name = inspect.signature(start).bind(*given, **named).arguments
        python = self._python_of(by_name["args"])
        pid = None if python is None else python.child(by_name)
        self.is_forked = pid is not None
        if pid is None:
            start(*given, **named)
            return
        self.pid = pid
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(by_name[end] for end in ends))


def _popen_with(python_of_workers: str, python: str) -> type[subprocess.Popen[Any]]:
    """Return ``Popen`` of a forked program.

    The process from which its workers of Ray are forked, and the process that keeps its report, are forks too.
    """

    class PopenOfFork(subprocess.Popen[Any]):
        def __init__(self, args: Any, *given: Any, **named: Any) -> None:
            if is_for_workers(args):
                args = [python_of_workers, *args[1:]]
            elif isinstance(args, list) and args[1:3] == _KEEPS_REPORT:
                args = [python, *args[1:]]
            super().__init__(args, *given, **named)

    return PopenOfFork


def read_early(variables: Mapping[Any, Any]) -> dict[str, str]:
    """Return the variables that a running process would no longer read.

    A program whose values differ from those of the warm Python is started for real.
    """
    named = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
    early = {name for name in named if name.startswith(_READ_EARLY)}
    return {name: named[name] for name in early - _READ_LATE}


def is_command(words: object) -> bool:
    """Return whether these are the words of our command, or of the daemon of a mount."""
    if not isinstance(words, list | tuple) or not words:
        return False
    program, *rest = (os.fsdecode(word) if not isinstance(word, str) else word for word in words)
    if program != sys.executable:
        return program == str(OMNILOAD)
    match rest:
        case ["-m", module, *_]:
            return module in {"omniload", *_DAEMONS}
        case ["-c", text, *_]:
            return text == _AS_TEXT
    return False


def is_for_workers(words: object) -> bool:
    """Return whether these are the words of the process from which workers of our own Ray are forked."""
    return isinstance(words, list) and words[1:3] == [worker.__file__, worker.AHEAD]


def is_process(words: object) -> bool:
    """Return whether these are the words of a program among the shared test code: a rank, a driver, a node."""
    if not isinstance(words, list) or len(words) < 2 or words[0] != sys.executable:
        return False
    return Path(words[1]).parent in _PROCESSES


def is_script(words: object) -> bool:
    """Return whether these are the words of a script text that Python runs."""
    return isinstance(words, list) and words[:2] == [sys.executable, "-c"]


def _folders(variables: Mapping[Any, Any]) -> list[str]:
    """Return the folders of ``PYTHONPATH``, each once, as an interpreter does."""
    text = variables.get("PYTHONPATH", "")
    # ``abspath`` instead of ``resolve``, because a link must be kept.
    folders = [os.path.abspath(folder) for folder in text.split(os.pathsep)]  # noqa: PTH100
    return list(dict.fromkeys(folders)) if text else []


def _inherited() -> tuple[object, ...]:
    """Return the attributes that a process inherits from its parent, apart from those that are handed over."""
    status = Path("/proc/thread-self/status").read_text(encoding="utf-8").splitlines()
    (ignored,) = (int(line.split()[1], 16) for line in status if line.startswith("SigIgn"))
    places = Path("/proc/thread-self/ns")
    return (
        [line for line in status if line.startswith(_OF_STATUS)],
        ignored & ~sum(1 << number - 1 for number in _IGNORED_BY_PYTHON),
        Path("/proc/self/oom_score_adj").read_bytes(),
        Path("/proc/self/root").readlink(),
        {place.name: str(place.readlink()) for place in places.iterdir()},
        (os.getsid(0), os.getpgid(0), os.getpriority(os.PRIO_PROCESS, 0)),
    )


def serve(address: str) -> tuple[list[str], bool]:
    """Fork a process for each request; end in this one with stdin.

    Returns:
        In a forked process: its command line, and whether it is a child of the asking process.
    """
    with _listening(address) as stand_ins, _listening(address + _OF_CHILDREN) as children:
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread is in no fork"
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes in between are not waited for
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            asking, _, _ = select.select([stand_ins, children, sys.stdin], [], [])
            if sys.stdin in asking:
                sys.exit()
            connection, _ = asking[0].accept()
            beside = asking[0] is children
            if not (_forked_beside() if beside else os.fork()):
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, held, _, _ = socket.recv_fds(connection, _SIZE_BYTES, _MOST_FILES)
    with connection.makefile("rb") as words:
        asked = json.loads(words.read(int.from_bytes(size, "big")))
    be = _as_child if beside else _as_script
    return be(asked, held, connection), beside


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    return listener


def _as_child(asked: dict[str, Any], held: list[int], connection: socket.socket) -> list[str]:
    """Act as the child of the asking process, as ``Popen`` starts it."""
    connection.sendall(b"%d\n" % os.getpid())
    if asked["session"]:
        os.setsid()
    if asked["group"] >= 0:
        os.setpgid(0, asked["group"])
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
    for kind, limits in asked["limits"]:
        resource.setrlimit(kind, tuple(limits))
    connection = socket.socket(fileno=_moved(connection.detach(), asked["numbers"]))
    _take(held, asked["numbers"])
    os.chdir(asked["folder"])
    ours = len(_folders(os.environ))
    _have_variables(asked["environment"])
    sys.path[1 : 1 + ours] = _folders(os.environ)
    _be_named(asked["command"], asked["environment"])
    connection.sendall(b"begun\n")
    connection.close()
    return asked["command"][asked["command"][0] == sys.executable :]


def _as_script(asked: list[Any], held: list[int], connection: socket.socket) -> list[str]:
    """Run as the script of a stand-in; a process between the two reports its end to the stand-in."""
    command, folder, environment, parent, numbers = asked
    if pid := os.fork():
        for descriptor in (0, 1, 2, *held):
            os.close(descriptor)
        os._exit(_watch(pid, connection))
    _enter_namespaces_of(connection)
    connection.close()
    _take(held, numbers)
    own, os.getppid = os.getppid, lambda: parent
    # Its children have their own parents.
    os.register_at_fork(after_in_child=lambda: setattr(os, "getppid", own))
    os.chdir(folder)
    _have_variables(environment)
    named = [sys.executable, *command]
    if is_for_workers(named) or command[:2] == _KEEPS_REPORT:
        # Code that ends a plane recognises the plane's processes by a mark among their variables.
        _be_named(named, environment)
    return command


def _have_variables(variables: Mapping[str, str]) -> None:
    """Set these variables, and clear everything that was computed from the old ones."""
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # a large module has already looked for it


def _take(held: list[int], numbers: list[int]) -> None:
    """Put each file under its number."""
    # Move all files out of the way first, because the number for one file may now belong to another.
    aside = [_moved(descriptor, numbers) for descriptor in held]
    for number, descriptor in zip(numbers, aside, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _moved(descriptor: int, numbers: list[int]) -> int:
    """Move a file to a number above these."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers, default=0) + 1)
    os.close(descriptor)
    return moved


def _forked_beside() -> int:
    """Fork as ``os.fork`` does, but as a child of this process's parent, which waits for it and gets its signals."""
    # The place where the C library has the number of its thread: the kernel writes the child's number there, as for
    # its own fork.
    its_number = ctypes.c_ulong()
    if _LIBC.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(its_number), _NONE, _NONE, _NONE):
        raise OSError(ctypes.get_errno(), "prctl")
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    arguments = (ctypes.c_uint64 * 8)(flags, 0, its_number.value)
    api = ctypes.pythonapi  # keeps the interpreter lock
    size = ctypes.sizeof(arguments)
    api.PyOS_BeforeFork()
    pid = api.syscall(_SYS_CLONE3, ctypes.byref(arguments), size)
    if not pid:
        api.PyOS_AfterFork_Child()
        return 0
    api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("the kernel forks nothing beside this process: it has no clone3, or no room")
    return pid


def _be_named(command: list[str], variables: Mapping[str, str]) -> None:
    """Show the command line and variables where ``ps`` reads them; if a kernel refuses, the old ones stay."""
    line, block = _kept(command), _kept([f"{name}={value}" for name, value in variables.items()])
    # Fields from the third on, as in proc_pid_stat(5); all others stay unchanged.
    text = Path("/proc/self/stat").read_text(encoding="utf-8")
    _, *fields = (int(field) if field.isdigit() else 0 for field in text.rpartition(")")[2].split())
    code, stack, data, heap = fields[22:24], fields[24], fields[41:43], fields[43]
    no_file = 0xFFFFFFFF << 32
    settings = (*code, *data, heap, _end_of_heap(), stack, *line, *block, 0, no_file)
    size = ctypes.c_ulong(8 * len(settings))
    _LIBC.prctl(
        *(_PR_SET_MM, _PR_SET_MM_MAP),
        *(ctypes.byref((ctypes.c_uint64 * len(settings))(*settings)), size, _NONE),
    )
    name = os.fsencode(Path(command[0]).name)[:15]
    _LIBC.prctl(_PR_SET_NAME, ctypes.c_char_p(name), _NONE, _NONE, _NONE)


def _kept(words: list[str]) -> tuple[int, int]:
    """Put words into memory that stays; return where they begin and end."""
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    _KEPT.append(ctypes.create_string_buffer(text, len(text)))
    return ctypes.addressof(_KEPT[-1]), ctypes.addressof(_KEPT[-1]) + len(text)


def _end_of_heap() -> int:
    _LIBC.sbrk.restype = ctypes.c_ulong
    return int(_LIBC.sbrk(_NONE))


def _enter_namespaces_of(connection: socket.socket) -> None:
    """Enter the host of the asking process: its network, its name, and its mounts."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    places = {
        kind: f"/proc/{int.from_bytes(credentials[:4], sys.byteorder)}/ns/{kind}"
        for kind in ("net", "uts", "mnt")
    }
    others = [
        at
        for kind, at in places.items()
        if Path(at).readlink() != Path(f"/proc/self/ns/{kind}").readlink()
    ]
    for descriptor in [os.open(place, os.O_RDONLY) for place in others]:
        if _LIBC.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def _watch(pid: int, connection: socket.socket) -> int:
    """Report to the asking process how the process ends; end the process if the asking process ends first."""
    connection.sendall(b"%d\n" % pid)
    ended = os.pidfd_open(pid)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    return 0


def become(command: list[str]) -> None:
    """Run a Python command line in this process."""
    # ``multiprocessing`` passes on that this process writes no compiled files.
    while command[0] in {"-u", "-B"}:
        if command[0] == "-u":
            sys.stdout.reconfigure(write_through=True)
        del command[0]
    del sys.path[0]
    if command[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = command[1:]
        if not hasattr(sys.modules.get(command[1]), "__path__"):
            sys.modules.pop(command[1], None)  # it is run anew and must not be imported already
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *command[2:]]
        exec(command[1], {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def end(code: int) -> None:
    """End as Python does, but without clearing modules, which would take as long as the rest of a command."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.pythonapi.exit(code & 0xFF)  # libraries have their own exit handlers


if __name__ == "__main__":
    gc.disable()
    address, python_of_workers, *modules = sys.argv[1:]
    for module in modules:
        import_module(module)
    gc.freeze()
    gc.enable()
    command, is_child = serve(address)
    if python_of_workers:
        subprocess.Popen = _popen_with(python_of_workers, str(Path(address).with_name("python")))
    try:
        become(command)
    except SystemExit as ended:
        if not is_child or not isinstance(ended.code, int | None):
            raise
        end(ended.code or 0)
    if is_child:
        end(0)
