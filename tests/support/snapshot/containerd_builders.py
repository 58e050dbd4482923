"""An image with Python and numpy made from this machine's files, and a separate containerd to start it in."""

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc

from tests.support.every_process import every_process
from tests.support.snapshot.registries.registry import needs

__all__ = [
    "Containerd",
    "Link",
    "a_python_image",
    "daemons_of",
    "run",
    "served_snapshotter",
    "views_of",
]

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{folder}/c.sock"
[plugins."io.containerd.grpc.v1.cri"]
  disable_tcp_service = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "omniload"
    disable_snapshot_annotations = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{folder}/cni"
[proxy_plugins.omniload]
  type = "snapshot"
  address = "{folder}/s.sock"
"""
UNUSED = ("test", "idlelib", "tkinter", "lib2to3", "ensurepip", "dist-packages", "site-packages")


def run(*words, **changes):
    done = subprocess.run(
        [str(w) for w in words], check=False, capture_output=True, text=True, **changes
    )
    assert done.returncode == 0, f"{words}: {done.stderr[-2000:]}"
    return done


def libraries_of(*programs):
    """Return the shared libraries of programs, under the names that the dynamic loader uses."""
    said = run("ldd", *programs).stdout
    return {path for path in re.findall(r"(/\S+) \(0x", said) if not path.startswith(str(ROOT))}


def copy_libraries(paths, tree):
    for path in paths:
        target = tree / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path(path).resolve(), target)


def a_python_image(folder, layout):
    """Write an image of two gzip layers, Python and numpy, as ``layout:v``; return its command."""
    needs("umoci", "ldd")
    python = Path(sys.executable).resolve()
    library = Path(sysconfig.get_paths()["stdlib"]).resolve()
    base, top = folder / "base", folder / "top"
    copy_libraries([str(python)], base)
    ignored = shutil.ignore_patterns(*UNUSED, "*.a", "config-*", "*.opt-?.pyc")
    shutil.copytree(library, base / str(library)[1:], ignore=ignored, symlinks=False)
    dynamic = [str(path) for path in (library / "lib-dynload").glob("*.so")]
    copy_libraries(libraries_of(python, *dynamic), base)
    for name in ("tmp", "proc", "sys", "dev", "etc"):
        (base / name).mkdir()
    (base / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
    numpy = Path(__import__("numpy").__file__).parent
    for found in (numpy, numpy.with_name("numpy.libs")):
        ignored = shutil.ignore_patterns("tests", "*.pyi", "*.a", "*.h")
        shutil.copytree(found, top / "opt" / found.name, ignore=ignored)
    extensions = [str(path) for path in numpy.rglob("*.so")]
    wanted = {path for path in libraries_of(*extensions) if "/numpy" not in path}
    copy_libraries((path for path in wanted if not (base / path[1:]).exists()), top)
    run("umoci", "init", "--layout", layout)
    run("umoci", "new", "--image", f"{layout}:v")
    for tree in (base, top):
        run("umoci", "insert", "--image", f"{layout}:v", tree, "/")
    words = (str(python), "-c", "import numpy; print(numpy.arange(5).sum(), numpy.__version__)")
    changes = [f"--config.cmd={word}" for word in words]
    run("umoci", "config", "--image", f"{layout}:v", "--config.env=PYTHONPATH=/opt", *changes)
    return words


@contextmanager
def served_snapshotter(folder, *options):
    """Run ``omniload image serve`` as users do; yield its process once it answers."""
    main = "from omniload.base.cli import main; main()"
    line = ["image", "serve", "--root", folder / "sn", "--socket", folder / "s.sock"]
    line += ["-o", f"cache={folder / 'cache'}", *options]
    with (folder / "sn.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", main, *map(str, line)],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
    try:
        said = process.stdout.readline()
        assert "snapshotter on" in said, (folder / "sn.log").read_text()
        yield process
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def views_of(folder):
    """Return the mounts of lazy layers under a folder."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(f"{folder}/sn/views/")]


def daemons_of(folder):
    """Return the processes that show lazy layers under a folder, including those that end after their unmount."""
    log, found = folder.resolve() / "sn/views.log", []
    for process in every_process():
        with suppress(OSError):  # it has ended meanwhile
            if Path(f"/proc/{process.pid}/fd/2").readlink() == log:
                found.append(process.pid)
    return found


class Link:
    """Passes connections on to a registry, and counts the bytes that come back."""

    def __init__(self, address):
        host, port = address.split(":")
        self._goal = (host, int(port))
        self.bytes_back = 0
        self.is_cut = False
        """Whether connections are refused."""

    @contextmanager
    def running(self):
        """Yield the address to use instead of the registry's."""
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            thread = threading.Thread(target=self._accept, args=(listener,))
            thread.start()
            try:
                yield f"127.0.0.1:{listener.getsockname()[1]}"
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()

    def _accept(self, listener):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self.is_cut:
                client.close()
                continue
            registry = socket.create_connection(self._goal)
            for source, goal, counts in ((client, registry, False), (registry, client, True)):
                line = (source, goal, counts)
                threading.Thread(target=self._pass, args=line, daemon=True).start()

    def _pass(self, source, goal, counts):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counts:
                    self.bytes_back += len(data)
                goal.sendall(data)
        for end in (source, goal):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


class Containerd:
    """A containerd with its own folders, which knows our snapshotter by the name ``omniload``."""

    def __init__(self, folder):
        self.folder, self.socket = folder, folder / "c.sock"
        # For every containerd of the machine, runc keeps its records of containers in one folder.
        self._own = secrets.token_hex(4)
        config = folder / "containerd.toml"
        text = CONFIG.format(folder=folder)
        config.write_text(text)
        self._log = (folder / "containerd.log").open("ab")
        self.process = subprocess.Popen(
            ["containerd", "-c", str(config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for line in self.process.stdout:
            self._log.write(line)
            if b"containerd successfully booted" in line:
                break
        else:
            raise AssertionError((folder / "containerd.log").read_text()[-3000:])
        # If nothing reads the pipe, the program stops when the pipe is full.
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def pull(self, image):
        """Request an image from the plugin for Kubernetes, with hand-written messages of one string each."""

        def field(data):
            assert len(data) < 128
            return b"\x0a" + bytes([len(data)]) + data

        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            call = channel.unary_unary(
                "/runtime.v1.ImageService/PullImage", lambda data: data, lambda data: data
            )
            return call(field(field(image.encode())), timeout=120)

    def ctr(self, *words, check=True, namespace="k8s.io"):
        line = ["ctr", "-a", str(self.socket), "-n", namespace, *map(str, words)]
        done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=120)
        if check:
            assert done.returncode == 0, f"{line}: {done.stderr[-2000:]}"
        return done

    def start(self, image, name, *words, snapshotter="omniload", **changes):
        """Run a container in the foreground and remove it; return its result."""
        line = ("run", "--rm", "--snapshotter", snapshotter, image, f"{name}-{self._own}", *words)
        return self.ctr(*line, **changes)

    def _drain(self):
        for line in self.process.stdout:
            self._log.write(line)

    def close(self):
        self.process.terminate()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self._log.close()
