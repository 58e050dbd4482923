"""Set-up of ``benchmarks.startup.images``: a root file system with torch, a registry, a slow link to it."""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "MAIN",
    "Relay",
    "Shape",
    "build_images",
    "build_layout",
    "called",
    "copy_libraries",
    "copy_tree",
    "environment",
    "running_registry",
]

MAIN = "from omniload.base.cli import main; main()"
PACKAGES = ("torch", "torchgen", "functorch", "numpy", "sympy", "mpmath", "networkx", "jinja2")
PACKAGES += ("markupsafe", "fsspec", "filelock", "numpy.libs")
TOOLS = ("/bin/sh", "/bin/ls", "/bin/cat", "/usr/bin/env")
PIECE_BYTES = 64 << 10
_CONFIG = """
version: 0.1
log: {{level: info, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:0"}}
"""


def called(*words: object, variables: dict[str, str] | None = None) -> str:
    """Run a program; return its standard output.

    Raises:
        RuntimeError: It fails.
    """
    line = [str(word) for word in words]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise RuntimeError(f"{line[:6]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def build_layout(folder: Path) -> Path:
    """Make an OCI layout ``folder/layout:v``: this Python in one layer, torch and numpy in another.

    It is built once; an interrupted build starts again.
    """
    layout, done = folder / "layout", folder / "layout.done"
    if done.exists():
        return layout
    for left in (layout, folder / "python", folder / "torch"):
        shutil.rmtree(left, ignore_errors=True)
    prefix = Path(sys.base_prefix)
    python, torch = folder / "python", folder / "torch"
    copy_tree(prefix, python / prefix.relative_to("/"), "site-packages", "test", "*.a")
    for tool in TOOLS:
        copy_tree(Path(tool).resolve(), python / tool[1:])
    (python / "etc").mkdir(exist_ok=True)
    (python / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for name in ("proc", "sys", "dev", "root", "tmp"):
        (python / name).mkdir(exist_ok=True)
    site, here = torch / "opt/site", Path(sysconfig.get_paths()["purelib"])
    for name in (*PACKAGES, "typing_extensions.py"):
        if (here / name).exists():
            copy_tree(here / name, site / name)
    (python / "usr/bin").mkdir(parents=True, exist_ok=True)
    (python / "usr/bin/python").symlink_to(Path(sys.executable).resolve())
    copy_libraries([python, torch], python)
    called("umoci", "init", "--layout", layout)
    called("umoci", "new", "--image", f"{layout}:v")
    for layer in (python, torch):
        called("umoci", "insert", "--image", f"{layout}:v", layer, "/")
        shutil.rmtree(layer)
    variables = ("PYTHONPATH=/opt/site", "PATH=/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1")
    words = [word for variable in variables for word in ("--config.env", variable)]
    called("umoci", "config", "--image", f"{layout}:v", *words, "--config.cmd", "/bin/sh")
    done.touch()
    return layout


def copy_tree(source: Path, target: Path, *without: str) -> None:
    """Copy a file, or a folder without the files that match the patterns."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*without))
    else:
        shutil.copy2(source, target)


def copy_libraries(trees: Sequence[Path], into: Path) -> None:
    """Copy the libraries that the programs and libraries of ``trees`` are linked with, under their own names."""
    files = [p for tree in trees for p in tree.rglob("*") if p.is_file() and not p.is_symlink()]
    elf = [str(p) for p in files if _magic(p) == b"\x7fELF"]
    done = subprocess.run(["ldd", *elf], capture_output=True, text=True, check=False)
    for name in sorted(set(re.findall(r"(?:=> |^\t)(/[^\s]+) \(0x", done.stdout, re.MULTILINE))):
        inside = any(name.startswith(str(tree)) for tree in trees)
        if not inside and not name.startswith(sys.base_prefix) and "site-packages" not in name:
            copy_tree(Path(name).resolve(), into / name[1:])


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


@contextmanager
def running_registry(folder: Path) -> Iterator[int]:
    """Run ``docker-registry`` on ``folder/registry``; yield its port."""
    config = folder / "registry.yml"
    config.write_text(_CONFIG.format(root=folder / "registry"))
    with (folder / "registry.log").open("w+") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(config)], stderr=log, stdout=subprocess.DEVNULL
        )
        try:
            port = None
            while port is None and process.poll() is None:
                found = re.search(r"listening on 127\.0\.0\.1:(\d+)", Path(log.name).read_text())
                port = int(found[1]) if found else None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
            if port is None:
                raise RuntimeError(f"docker-registry ended; see {log.name}")
            yield port
        finally:
            process.kill()
            process.wait()


@dataclass(slots=True)
class Shape:
    """Computes when a piece leaves a link: one rate for all connections, one delay."""

    bytes_per_s: float
    delay_s: float
    free_s: float = 0.0
    """Time at which the link has sent everything that it received so far."""

    def leaves_s(self, size_bytes: int, now_s: float) -> float:
        """Record a piece and return when its last byte leaves the far end."""
        self.free_s = max(self.free_s, now_s) + size_bytes / self.bytes_per_s
        return self.free_s + self.delay_s


@dataclass(slots=True)
class Relay:
    """A link to a port of this machine; each direction has the rate and the delay.

    All connections share the rate. The link runs in its own thread, and bytes that come back from the port are
    counted.
    """

    port: int
    bytes_per_s: float
    delay_s: float
    bytes_back: int = 0
    """Bytes that the registry has sent so far."""
    shapes: tuple[Shape, Shape] | None = None
    """Shapes of both directions; several relays with the same shapes are one link."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _accepting: asyncio.Task[None] | None = None

    @contextmanager
    def running(self) -> Iterator[int]:
        """Relay inside the ``with``; yield the port it listens on."""
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            listener.setblocking(False)
            thread = threading.Thread(
                target=self._loop.run_until_complete, args=[self._go(listener)]
            )
            thread.start()
            try:
                yield listener.getsockname()[1]
            finally:
                self._loop.call_soon_threadsafe(self._end)
                thread.join()
                self._loop.close()

    def _end(self) -> None:
        assert self._accepting is not None
        self._accepting.cancel()

    async def _go(self, listener: socket.socket) -> None:
        there, back = self.shapes or (
            Shape(self.bytes_per_s, self.delay_s),
            Shape(self.bytes_per_s, self.delay_s),
        )
        self._accepting = asyncio.current_task()
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                client, _ = await self._loop.sock_accept(listener)
                task = self._loop.create_task(self._relay(client, there, back))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for task in (left := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _relay(self, client: socket.socket, there: Shape, back: Shape) -> None:
        with client, socket.socket() as server, contextlib.suppress(OSError):
            server.setblocking(False)
            await self._loop.sock_connect(server, ("127.0.0.1", self.port))
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(client, server, there, lambda *_: None))
                both.create_task(self._pass_on(server, client, back, self._count))

    def _count(self, size_bytes: int) -> None:
        self.bytes_back += size_bytes

    async def _pass_on(
        self,
        source: socket.socket,
        target: socket.socket,
        shape: Shape,
        told: Callable[[int], None],
    ) -> None:
        """Pass bytes on; the bytes on their way are limited, so that a sender is slowed to the rate."""
        on_way: deque[tuple[float, bytes]] = deque()
        more, room = asyncio.Event(), asyncio.Semaphore(6)

        async def deliver() -> None:
            while True:
                while not on_way:
                    more.clear()
                    await more.wait()
                due_s, data = on_way.popleft()
                room.release()
                if (wait_s := due_s - self._loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                await self._loop.sock_sendall(target, data)

        task = self._loop.create_task(deliver())
        try:
            data = b"-"
            while data:
                await room.acquire()
                data = await self._loop.sock_recv(source, PIECE_BYTES)
                told(len(data))
                on_way.append((shape.leaves_s(len(data), self._loop.time()), data))
                more.set()
            await task
        except OSError:
            task.cancel()
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def build_images(folder: Path, address: str, variables: dict[str, str]) -> None:
    """Push the image to a registry, as gzip and converted, unless the registry has them."""
    done = folder / "pushed.done"
    if done.exists():
        return
    layout = build_layout(folder)
    called(
        *("skopeo", "copy", "-q", "--dest-tls-verify=false"),
        *(f"oci:{layout}:v", f"docker://{address}/a/plain:v"),
    )
    pair = (f"{address}/a/plain:v", f"{address}/a/lazy:v")
    called(sys.executable, "-c", MAIN, "image", "convert", *pair, variables=variables)
    done.touch()


def environment() -> dict[str, str]:
    """Return the variables with which our own commands find this tree."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
