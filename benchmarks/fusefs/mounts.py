"""Costs of the mount and gains of striping. All figures come from one run, as ratios.

    python -m benchmarks.fusefs.mounts [--hdfs] [--size-mib 512]

- *cached*: reads of a file in memory through the mount, against the same reads of tmpfs and
  against a pyfuse3 mount that sends each request to a thread (*hop*): 1 MiB and 4 KiB with
  O_DIRECT, so that the kernel's page cache answers nothing, and 1 MiB of a file that was
  read before and is opened again. Over both bindings, and with a local copy that the
  kernel reads by itself.
- *capped*: a store with a limited rate of every stream, striped over 1 and 4 objects.
- *overhead*: cold reads of striped files against the same objects read through the
  store's client by as many threads.
- *streamed*: memory of a mount through which a large file was read once.
- *metadata*: stats with every attribute cache cold, and a listing of 10,000.
"""

# ruff: noqa: PTH116, PTH208 -- the calls of the operating system are what is timed
import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from typing_extensions import override

from fusefs.config import FilesConfig, Striping
from fusefs.mounts.lifecycle import MountConfig, mount, start, umount
from fusefs.stores.local.store import LocalStore
from fusefs.stores.protocol import ObjectWriter, Store
from fusefs.stores.url import open_store
from fusefs.tree.namespace import StripedFiles
from tests.support.hdfs.cluster import hdfs_cluster

MiB = 1 << 20

HOP_MOUNT = """
import os, sys, errno, stat, trio, pyfuse3
data = open(sys.argv[2], 'rb').read()
class Hop(pyfuse3.Operations):
    async def getattr(self, inode, ctx=None):
        e = pyfuse3.EntryAttributes(); e.st_ino = inode; e.attr_timeout = e.entry_timeout = 60
        e.st_mode = stat.S_IFDIR | 0o755 if inode == 1 else stat.S_IFREG | 0o644
        e.st_size = 0 if inode == 1 else len(data); return e
    async def lookup(self, parent, name, ctx=None):
        if name != b'f': raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(2)
    async def open(self, inode, flags, ctx): return pyfuse3.FileInfo(fh=2)
    async def read(self, fh, off, size):
        return await trio.to_thread.run_sync(lambda: data[off:off + size])
pyfuse3.init(Hop(), sys.argv[1], set(pyfuse3.default_options)); print('up', flush=True)
trio.run(pyfuse3.main); pyfuse3.close()
"""


def direct_read_s(path: Path, size: int) -> float:
    """Read a file front to back by 1 MiB with O_DIRECT into one buffer; return seconds."""
    buffer = mmap.mmap(-1, MiB)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        begin = time.perf_counter()
        for offset in range(0, size, MiB):
            if os.preadv(file, [buffer], offset) != MiB:
                raise RuntimeError(f"short read at {offset}")
        return time.perf_counter() - begin
    finally:
        os.close(file)


class CappedStore(LocalStore):
    """A local store with a limited rate of every stream, as a data node has."""

    rate = 100e6

    def _pause(self, size: int, begin: float) -> None:
        left = size / self.rate - (time.perf_counter() - begin)
        if left > 0:
            time.sleep(left)

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        begin = time.perf_counter()
        data = super().read(path, offset, size_bytes)
        self._pause(size_bytes, begin)
        return data

    @override
    def read_large(self, path: str, offset: int, size_bytes: int) -> memoryview:
        begin = time.perf_counter()
        data = super().read_large(path, offset, size_bytes)
        self._pause(size_bytes, begin)
        return data

    @override
    def create(self, path: str) -> ObjectWriter:
        return CappedWriter(super().create(path), self._pause)


class CappedWriter(ObjectWriter):
    """A stream with the rate of its store."""

    def __init__(self, writer: ObjectWriter, pause: Callable[[int, float], None]) -> None:
        self._writer, self._pause = writer, pause

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        begin = time.perf_counter()
        self._writer.write(data)
        self._pause(len(data), begin)

    @override
    def close(self) -> None:
        self._writer.close()

    @override
    def abort(self) -> None:
        self._writer.abort()


def capped(base: Path, size: int) -> dict[str, float]:
    data, found = os.urandom(size), dict[str, float]()
    for count in (1, 4):
        folder = Path(tempfile.mkdtemp(dir=base))
        config = FilesConfig(striping=Striping(unit=MiB, count=count), read_ahead=64 * MiB)
        files = StripedFiles(CappedStore(folder), config)
        begin = time.perf_counter()
        files.write_file("f", data)
        wrote = size / (time.perf_counter() - begin)
        with files.open("f") as file:
            begin = time.perf_counter()
            for at in range(0, size, MiB):
                file.reader.read(at, MiB)
            read = size / (time.perf_counter() - begin)
        files.close()
        shutil.rmtree(folder)
        for name, rate in (("write", wrote), ("read", read)):
            found[f"capped {name}, {count} stripes, of the stream rates"] = rate / (count * 100e6)
    return found


@contextmanager
def hop_mount(base: Path) -> Iterator[Path]:
    root = base / "hop"
    root.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOP_MOUNT, root, base / "plain"], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    try:
        yield root
    finally:
        subprocess.run(["fusermount3", "-u", root], check=True)
        process.wait()


def small_reads_s(path: Path, count: int = 3000) -> float:
    """Read 4 KiB at a time with O_DIRECT; return seconds."""
    buffer = mmap.mmap(-1, 4096)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        begin = time.perf_counter()
        for number in range(count):
            os.preadv(file, [buffer], number * 4096)
        return time.perf_counter() - begin
    finally:
        os.close(file)


def side_by_side_s(path: Path, size: int, readers: int = 4) -> float:
    """Read a file with several readers at the same time, each the whole file; return seconds."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(lambda _: direct_read_s(path, size), range(readers)))
    return time.perf_counter() - begin


def reopened_read_s(path: Path) -> float:
    """Open a file that was read before and read it by 1 MiB as most programs do; return seconds."""
    buffer = bytearray(MiB)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begin


def cached(base: Path, size: int) -> dict[str, float]:
    """All mounts run at the same time and are timed alternately: ratios of the same second."""
    store = base / "store"
    store.mkdir()
    (base / "plain").write_bytes(os.urandom(size))
    files = {"cache": size + 64 * MiB}
    copies = {"directory": str(base / "copies"), "capacity": 2 * size}
    settings = {
        "pyfuse3": {"bridge": "pyfuse3", "files": files},
        "device": {"bridge": "device", "files": files},
        "passthrough": {
            "bridge": "device",
            "passthrough": True,
            "files": {**files, "disk_cache": copies},
        },
    }
    with ExitStack() as mounts:
        paths = {"tmpfs": base / "plain", "hop": mounts.enter_context(hop_mount(base)) / "f"}
        for name, chosen in settings.items():
            (base / name).mkdir()
            paths[name] = mounts.enter_context(mount(str(store), base / name, chosen)) / "f"
        shutil.copyfile(base / "plain", paths["device"])
        for _ in range(3):  # into memory, onto the disk, and compared with its checksums
            for path in paths.values():
                reopened_read_s(path)
            time.sleep(2)
        for path in paths.values():  # the content of the page cache has left memory
            direct_read_s(path, size)
        measures = {
            "O_DIRECT 1 MiB": lambda path: direct_read_s(path, size),
            "4 readers, O_DIRECT 1 MiB": lambda path: side_by_side_s(path, size),
            "reopened, 1 MiB": reopened_read_s,
            "O_DIRECT 4 KiB": small_reads_s,
        }
        found: dict[str, float] = {}
        for what, measure in measures.items():
            turns = [{name: measure(path) for name, path in paths.items()} for _ in range(7)]
            for name in settings:
                for other in ("tmpfs", "hop"):
                    ratios = [turn[other] / turn[name] for turn in turns]
                    found[f"{what}: {name}, times {other}"] = statistics.median(ratios)
    shutil.rmtree(store)
    return found


def writers(base: Path) -> dict[str, float]:
    """Peak memory of a mount while 64 files are written at the same time, against its stated limit."""
    store, root = base / "many", base / "many-mnt"
    store.mkdir()
    root.mkdir()
    cache, window, unit = 32 * MiB, 32 * MiB, MiB
    files = {"cache": cache, "write_window": window}
    config = MountConfig(store=str(store), mountpoint=str(root), files=FilesConfig(**files))
    process = start(config)

    before, block = memory_of(process.pid, "VmHWM"), os.urandom(MiB)
    opened = [(root / f"f{i}").open("wb", buffering=0) for i in range(64)]
    for _ in range(12):
        for file in opened:
            file.write(block)
    for file in opened:
        file.close()
    used = memory_of(process.pid, "VmHWM") - before
    umount(str(root))
    process.wait()
    shutil.rmtree(store)
    # A writer holds one unit that is not full and one that waits, up to plain_limit.
    cap = cache + window + 64 * (unit + unit)
    return {"64 writers: peak MiB": used / MiB, "64 writers: of the cap": used / cap}


def memory_of(process: int, what: str) -> int:
    """Return the memory of a process as the kernel counts it: ``VmRSS`` now, ``VmHWM`` at most so far."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) << 10


def streamed(base: Path, size: int) -> dict[str, float]:
    """Memory of a mount after one read from front to back, minus its memory at the start."""
    store, root = base / "streamed", base / "streamed-mnt"
    store.mkdir()
    root.mkdir()
    config = MountConfig(store=str(store), mountpoint=str(root))
    block = os.urandom(MiB)
    with mount(config.store, root), (root / "f").open("wb", buffering=0) as file:
        for _ in range(0, size, MiB):
            file.write(block)
    process = start(config)
    before = memory_of(process.pid, "VmRSS")
    reopened_read_s(root / "f")
    kept, peak = (memory_of(process.pid, what) - before for what in ("VmRSS", "VmHWM"))
    umount(str(root))
    process.wait()
    shutil.rmtree(store)
    return {"streamed: MiB resident after": kept / MiB, "streamed: MiB at most": peak / MiB}


def metadata(base: Path) -> dict[str, float]:
    store, found = base / "meta", dict[str, float]()
    store.mkdir()
    for i in range(10_000):
        (store / f"f{i:05d}").touch()
    for bridge in ("pyfuse3", "device"):
        root = base / f"meta-{bridge}"
        root.mkdir()
        with mount(str(store), root, {"bridge": bridge}):
            begin = time.perf_counter()
            names = os.listdir(root)
            found[f"{bridge}: listing 10,000 entries s"] = time.perf_counter() - begin
            time.sleep(1.2)  # after the kernel's time attributes have expired
            begin = time.perf_counter()
            for name in names[:3000]:
                os.stat(root / name)
            found[f"{bridge}: stats/s from the store"] = 3000 / (time.perf_counter() - begin)
    shutil.rmtree(store)
    return found


def overhead(url: str, size: int) -> dict[str, float]:
    """Compare cold striped reads with reads of the same objects through the store's client, alternately.

    Both keep the bytes that they read, ours in its cache, as code that loads a file does. A third of the time goes
    into fresh memory, which a client that discards all bytes allocates only once.
    """
    config = FilesConfig(striping=Striping(unit=MiB, count=4), cache=size + 64 * MiB)
    writing = StripedFiles(open_store(url), config)
    data = os.urandom(size)
    begin = time.perf_counter()
    writing.write_file("bench", data)
    wrote = time.perf_counter() - begin
    segment = writing.manifest("bench").segments[0]
    paths = segment.object_paths()
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(5):
        files = StripedFiles(open_store(url), config)
        with files.open("bench") as file:
            begin = time.perf_counter()
            for at in range(0, size, MiB):
                file.reader.read(at, MiB)
            ours.append(time.perf_counter() - begin)
        files.close()
        store = open_store(url)

        def whole(path: str, store: Store = store) -> list[bytes]:
            total = store.stat(path).size_bytes
            parts = range(0, total, 4 * MiB)
            return [store.read(path, at, min(4 * MiB, total - at)) for at in parts]

        begin = time.perf_counter()
        with ThreadPoolExecutor(16) as pool:
            kept = list(pool.map(whole, paths))
        theirs.append(time.perf_counter() - begin)
        del kept
    writing.names.remove("bench")
    writing.close()
    return {
        "striped write MB/s": size / wrote / 1e6,
        "striped read MB/s": size / min(ours) / 1e6,
        "time of the store's own client": statistics.median(ours) / statistics.median(theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--hdfs", action="store_true")
    parser.add_argument("--only", choices=["cached", "metadata"], help="this part alone")
    arguments = parser.parse_args()
    size = arguments.size_mib * MiB
    base = Path(tempfile.mkdtemp(prefix="fusefs-bench-", dir="/dev/shm"))
    found: dict[str, float] = {}
    try:
        if arguments.only != "metadata":
            found |= cached(base, size)
        if arguments.only != "cached":
            found |= metadata(base)
        if arguments.only is None:
            found |= capped(base, size)
            found |= writers(base)
            found |= streamed(base, 2 * size)
            (base / "cold").mkdir()
            found |= {f"tmpfs: {k}": v for k, v in overhead(str(base / "cold"), size).items()}
        if arguments.hdfs:
            with hdfs_cluster(3) as cluster:
                os.environ.update(cluster.client_environment())
                found |= {f"HDFS: {k}": v for k, v in overhead(cluster.url, size).items()}
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(json.dumps({k: round(v, 3) for k, v in found.items()}, indent=2))


if __name__ == "__main__":
    main()
