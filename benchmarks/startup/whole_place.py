"""Place in which ``benchmarks.startup.whole`` starts its job: an image, wheels, stores, and the links to them."""

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import quote

from packaging.requirements import Requirement
from pyarrow import fs

from benchmarks.startup.place import MAIN, TOOLS, called, copy_libraries, copy_tree, environment
from omniload.base.extras import DISTRIBUTION
from tests.support.hdfs.cluster import CACHE, JAVA_HOME, ROOT, hdfs_cluster

__all__ = [
    "IMAGE_PACKAGES",
    "IMAGE_VARIABLES",
    "KEYS",
    "PYTHON",
    "CheckpointStore",
    "build_images",
    "checkpoint_store",
    "closure_of",
    "free_port",
    "held_to",
    "object_store",
    "push_image",
    "s3_url",
    "serving",
    "wheels",
]

PYTHON = "/opt/venv/bin/python"
"""Interpreter of the job's environment inside the image."""
IMAGE_PACKAGES: Mapping[str, Sequence[str]] = {DISTRIBUTION: ("torch", "env"), "pip": ()}
"""Distributions in the image, with their extras; the image also has their requirements."""
OURS = ("omniload", "fusefs", "snapshot", "trainer_integration")
KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
IMAGE_VARIABLES = (
    "PATH=/opt/venv/bin:/usr/bin:/bin",
    "VIRTUAL_ENV=/opt/venv",
    "HOME=/root",
    "PYTHONDONTWRITEBYTECODE=1",
)
"""Variables in the image's configuration."""


def closure_of(extras_of: Mapping[str, Sequence[str]]) -> dict[str, Distribution]:
    """Return the installed distributions that the given ones need with their extras, including them, by name."""
    found: dict[str, Distribution] = {}
    waiting = [(name, tuple(extras)) for name, extras in extras_of.items()]
    while waiting:
        name, wanted = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        try:
            found[key] = found.get(key) or distribution(name)
        except PackageNotFoundError:
            continue  # it belongs to an extra that is not installed
        for text in found[key].requires or ():
            needed = Requirement(text)
            if not _wanted(needed, wanted):
                continue
            other = re.sub(r"[-_.]+", "-", needed.name).lower()
            if other not in found or (needed.extras and other == key):
                waiting.append((needed.name, tuple(needed.extras)))
    return found


def _wanted(needed: Requirement, extras: Sequence[str]) -> bool:
    return needed.marker is None or any(
        needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)
    )


def build_images(folder: Path, address: str, packages: Mapping[str, Sequence[str]]) -> None:
    """Push the image of the job as gzip and converted, unless the registry in ``folder`` holds them.

    Args:
        folder: Keeps the built images; an interrupted build, or one of another tree, is made again.
        address: Address of the registry.
        packages: Distributions in the image, with their extras; the image also has their requirements.
    """
    done, tree = folder / "pushed.done", _digest_of_tree()
    if done.exists() and done.read_text() == tree:
        return
    push_image(folder, address, _trees(folder, packages))
    done.write_text(tree)


def _digest_of_tree() -> str:
    """Return a digest of all files of this tree that the image contains."""
    found = hashlib.sha256()
    for path in sorted(path for name in OURS for path in (ROOT / name).rglob("*.py")):
        found.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def push_image(folder: Path, address: str, layers: Sequence[Path]) -> None:
    """Make an image of trees, which are removed, and push it as ``job/plain:v`` and ``job/lazy:v``."""
    layout = folder / "layout"
    shutil.rmtree(layout, ignore_errors=True)
    called("umoci", "init", "--layout", layout)
    called("umoci", "new", "--image", f"{layout}:v")
    for layer in layers:
        called("umoci", "insert", "--image", f"{layout}:v", layer, "/")
        shutil.rmtree(layer)
    words = [word for variable in IMAGE_VARIABLES for word in ("--config.env", variable)]
    called("umoci", "config", "--image", f"{layout}:v", *words, "--config.cmd", "/bin/sh")
    plain, lazy = (f"{address}/job/{form}:v" for form in ("plain", "lazy"))
    called(
        *("skopeo", "copy", "-q", "--dest-tls-verify=false"), f"oci:{layout}:v", f"docker://{plain}"
    )
    called(sys.executable, "-c", MAIN, "image", "convert", plain, lazy, variables=environment())
    shutil.rmtree(layout)


def _trees(folder: Path, packages: Mapping[str, Sequence[str]]) -> tuple[Path, Path]:
    """Make the layers: this Python, and an environment with the packages and this tree."""
    python, site = folder / "python", folder / "packages"
    for left in (python, site):
        shutil.rmtree(left, ignore_errors=True)
    prefix, base = Path(sys.base_prefix), Path(sys.executable).resolve()
    copy_tree(prefix, python / prefix.relative_to("/"), "site-packages", "test", "*.a")
    for tool in (*TOOLS, "/bin/date"):
        copy_tree(Path(tool).resolve(), python / tool[1:])
    (python / "etc").mkdir(exist_ok=True)
    (python / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for name in ("proc", "sys", "dev", "root", "tmp", "run"):
        (python / name).mkdir(exist_ok=True)
    venv = site / PYTHON[1:].removesuffix("/bin/python")
    (venv / "bin").mkdir(parents=True)
    version = ".".join(map(str, sys.version_info[:3]))
    (venv / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {version}\n"
    )
    for name in ("python", "python3"):
        (venv / "bin" / name).symlink_to(base)
    start = f"#!{PYTHON}\nimport sys\nfrom omniload.base.cli import main\nsys.exit(main())\n"
    (venv / "bin" / "omniload").write_text(start)
    (venv / "bin" / "omniload").chmod(0o755)
    _install(packages, venv / "lib" / f"python3.{sys.version_info[1]}" / "site-packages")
    copy_libraries([python, site], python)
    # Byte code holds the second of its source's time, and umoci rounds half seconds up.
    for file in (f for layer in (python, site) for f in layer.rglob("*.py")):
        second = int(file.stat().st_mtime)
        os.utime(file, (second, second))
    # As pip leaves an image. A few files are for other versions of Python and do not compile.
    words = ["-m", "compileall", "-q", "-j", "2", "-s", str(site), "-p", "/", str(venv)]
    subprocess.run([sys.executable, *words], check=False, capture_output=True)
    return python, site


def _install(packages: Mapping[str, Sequence[str]], site: Path) -> None:
    here = Path(sysconfig.get_paths()["purelib"])
    tops = set()
    for each in closure_of(packages).values():
        for file in each.files or ():
            if ".." not in file.parts and "__editable__" not in file.parts[0]:
                tops.add(file.parts[0])
    for top in sorted(tops):
        if (here / top).exists() and top != "__pycache__":
            copy_tree(here / top, site / top, "*.a")
    for name in OURS:
        copy_tree(ROOT / name, site / name, "__pycache__")


def wheels(folder: Path, requirements: Sequence[str]) -> Path:
    """Return an index of wheels in a folder, ``simple/NAME/*.whl``, downloaded the first time."""
    index, done = folder / "index", folder / "wheels.done"
    if not done.exists():
        shutil.rmtree(index, ignore_errors=True)
        shutil.rmtree(folder / "wheels", ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check")
        called(*pip, "--only-binary", ":all:", "-d", folder / "wheels", *requirements)
        for wheel in sorted((folder / "wheels").glob("*.whl")):
            name = re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
            (index / "simple" / name).mkdir(parents=True, exist_ok=True)
            (index / "simple" / name / wheel.name).hardlink_to(wheel)
        done.touch()
    return index


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(*words: str, port: int) -> Iterator[int]:
    """Run a server of this interpreter until the end of the ``with``; yield its port once it answers."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment(), "PYTHONWARNINGS": "ignore"},
    )
    end, pause = time.monotonic() + 60, threading.Event()
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no server at port {port}: {words[:3]}")
            pause.wait(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def object_store() -> Iterator[int]:
    """Run an S3 server in memory; yield its port."""
    port = free_port()
    with serving("-c", f"from moto.server import main; main(['-p', '{port}'])", port=port):
        os.environ.update(KEYS)
        yield port


def s3_url(port: int, bucket: str) -> str:
    """Return the URL of a bucket at a port of this machine; keys come from the environment."""
    endpoint = quote(f"http://127.0.0.1:{port}", safe="")
    return f"s3://{bucket}?endpoint_override={endpoint}&scheme=http&region=us-east-1"


@contextmanager
def held_to(port: int, bytes_per_s: float) -> Iterator[int]:
    """Hold each connection to a port to a rate, in each direction; yield the port to connect to."""
    mine = free_port()
    here = ("127.0.0.1", str(mine), "127.0.0.1", str(port), str(bytes_per_s))
    with serving("-m", "tests.support.hdfs.throttle", *here, port=mine):
        yield mine


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStore:
    """A store whose every stream has a rate."""

    kind: str
    url: str
    """URL of its root; add a folder with ``at``."""
    variables: Mapping[str, str]
    """Variables that a client needs."""
    binds: tuple[str, ...] = ()
    """Files of the machine that a client needs inside an image."""
    hurried: str = field(default="")
    """URL of the same store without the limit, to fill it; empty if it has no such URL."""

    def at(self, folder: str) -> str:
        """Return the URL of a folder of it."""
        return _at(self.url, folder)

    def filled_at(self, folder: str) -> str:
        """Return the URL of a folder for filling it."""
        return _at(self.hurried or self.url, folder)


def _at(url: str, folder: str) -> str:
    root, mark, query = url.partition("?")
    return f"{root}/{folder}{mark}{query}"


@contextmanager
def checkpoint_store(kind: str, stream_rate: float, s3_port: int) -> Iterator[CheckpointStore]:
    """Run HDFS, or limit the rate of connections to the S3 server."""
    with ExitStack() as stack:
        if kind == "hdfs":
            cluster = stack.enter_context(hdfs_cluster(4, replication=1, stream_rate=stream_rate))
            java = tuple(
                f"{path}:{path}:ro"
                for path in (JAVA_HOME, "/etc/java-17-openjdk", CACHE, cluster.folder)
                if Path(path).exists()
            )
            # Without -Xrs, the Java machine of this process would handle its Ctrl-C.
            os.environ.update(cluster.client_environment())
            os.environ["LIBHDFS_OPTS"] += " -Xrs"
            yield CheckpointStore(
                kind=kind,
                url=cluster.url,
                hurried=f"{cluster.url}?dfs.client.use.datanode.hostname=false",
                variables=cluster.client_environment(),
                binds=java,
            )
            return
        port = stack.enter_context(held_to(s3_port, stream_rate))
        fs.FileSystem.from_uri(s3_url(s3_port, "checkpoints") + "&allow_bucket_creation=true")[
            0
        ].create_dir("checkpoints")
        yield CheckpointStore(
            kind=kind,
            url=s3_url(port, "checkpoints"),
            variables=KEYS,
            hurried=s3_url(s3_port, "checkpoints"),
        )
