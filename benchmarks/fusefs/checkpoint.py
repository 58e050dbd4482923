"""A sharded checkpoint over HDFS with limited rates of all streams: striped against one file per rank.

    python -m benchmarks.fusefs.checkpoint --help

Real ranks (gloo) save and load the same tensors with torch's distributed checkpoint:

- *plain*: DCP's fsspec writer and reader on ``hdfs://``, one HDFS file per rank;
- *mount*: DCP's file writer and reader on a mount of the same HDFS, each file striped;
- *striped*: ``StripedWriter`` and ``StripedReader``, without a mount.

A relay limits each connection to a data node to ``--stream-mb`` MB/s in each direction, low enough that two cores are
not the limit. Loads start cold: a mount is fresh and a reader has no cache. Blocks lie in the data nodes' page cache,
which the limit makes irrelevant. The loaded values are compared with the saved ones.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import fsspec
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.report import Table, print_table, write_report
from fusefs.config import FilesConfig
from fusefs.mounts.lifecycle import mount
from fusefs.stores.retry import RetryingStore
from fusefs.stores.url import open_store
from fusefs.tree.namespace import StripedFiles
from tests.support.hdfs.cluster import Cluster, hdfs_cluster
from trainer_integration.checkpoint.striped.place import open_striped
from trainer_integration.checkpoint.striped.writer import load_striped, save_striped

__all__ = ["main"]

MiB = 1 << 20
NEEDED_RATIO = 1.6
NEEDED_MMAP = 1.3
NEEDED_SHARE = 0.9
_SHARD = "shard-00001-of-{:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The sizes and limits of a measurement."""

    size_mib: int
    ranks: int
    tensors: int
    stripes: int
    stream_mb: float
    datanodes: int

    @property
    def elements(self) -> int:
        """Elements of four bytes of a rank's part of a tensor."""
        return self.size_mib * MiB // (4 * self.ranks * self.tensors)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole checkpoint."""
        return 4 * self.elements * self.ranks * self.tensors

    @property
    def files(self) -> dict[str, Any]:
        """Settings of a striped namespace."""
        return {"striping": {"unit": MiB, "count": self.stripes}}


def _tensors(work: Work) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (work.ranks,))
    parts = {f"layer.{i}": torch.empty(work.elements // 1024, 1024) for i in range(work.tensors)}
    return {n: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for n, t in parts.items()}


def _fill(tensors: Mapping[str, DTensor], rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for tensor in tensors.values():
        tensor.to_local().view(torch.int32).random_(generator=generator)


def _sums(tensors: Mapping[str, DTensor]) -> list[int]:
    return [int(t.to_local().view(torch.int32).sum(dtype=torch.int64)) for t in tensors.values()]


def _save(kind: str, place: str, work: Work, tensors: Mapping[str, DTensor]) -> None:
    if kind == "striped":
        files, folder = open_striped(place, work.files)
        save_striped(tensors, files, folder, dist.group.WORLD)
    elif kind == "mount":
        save(dict(tensors), storage_writer=FileSystemWriter(place))
    else:
        # Without a descriptor, a sync is one of the whole machine, and HDFS does not benefit from that.
        save(dict(tensors), storage_writer=FsspecWriter(place, sync_files=False))


def _load(kind: str, place: str, work: Work, tensors: Mapping[str, DTensor]) -> None:
    if kind == "striped":
        files, folder = open_striped(place, work.files)
        load_striped(tensors, files, folder, dist.group.WORLD)
    elif kind == "mount":
        load(dict(tensors), storage_reader=FileSystemReader(place))
    else:
        load(dict(tensors), storage_reader=FsspecReader(place))


def _warm(_kind: str, place: str, _work: Work, _tensors: Mapping[str, DTensor]) -> None:
    """Start the client of HDFS, which takes seconds the first time."""
    open_store(place).stat("")


CALLS = {"save": _save, "load": _load, "warm": _warm}


def _rank(work: Work, rank: int, rendezvous: str, orders: Connection) -> None:
    """Carry out orders of saving and loading; answer each with its seconds."""
    torch.set_num_threads(1)
    # The client that the store below uses too, whichever other client is installed and claims the scheme.
    client = "fsspec.implementations.arrow.HadoopFileSystem"
    fsspec.register_implementation("hdfs", client, clobber=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=work.ranks
    )
    tensors = _tensors(work)
    _fill(tensors, rank)
    wanted = _sums(tensors)
    while (order := orders.recv()) is not None:
        what, kind, place = order
        if what == "load":
            for tensor in tensors.values():
                tensor.to_local().zero_()
        cpu = time.process_time()
        dist.barrier()
        began_s = time.perf_counter()
        CALLS[what](kind, place, work, tensors)
        dist.barrier()
        took_s = time.perf_counter() - began_s
        if _sums(tensors) != wanted:
            raise RuntimeError(f"rank {rank} loaded other bytes from {place} than were saved")
        orders.send((took_s, time.process_time() - cpu))
    dist.destroy_process_group()


@contextmanager
def _ranks(work: Work) -> Iterator[Callable[[str, str, str], float]]:
    """Start the ranks; yield a function that makes them all save or load and returns the seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__spec__.name if __spec__ is not None else __name__])
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(work.ranks):
            mine, theirs = context.Pipe()
            arguments = (work, rank, f"{folder}/rendezvous", theirs)
            processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(mine)

        def order(what: str, kind: str, place: str) -> float:
            for pipe in pipes:
                pipe.send((what, kind, place))
            answers = [pipe.recv() for pipe in pipes]
            took_s = max(seconds for seconds, _ in answers)
            cpu_s = sum(seconds for _, seconds in answers)
            click.echo(f"{what} {kind}: {took_s:.1f} s, CPU of the ranks {cpu_s:.1f} s")
            return took_s

        try:
            yield order
            for pipe in pipes:
                pipe.send(None)
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                process.kill()


def checkpoints(work: Work, cluster: Cluster) -> dict[str, float]:
    """Save and load in each way; return seconds."""
    store, found = f"{cluster.url}/striped", {}
    settings = {"files": work.files}
    open_store(cluster.url).make_directory("striped")
    with _ranks(work) as order, tempfile.TemporaryDirectory() as root:
        order("warm", "plain", cluster.url)
        found["save plain"] = order("save", "plain", f"{cluster.url}/plain/c")
        found["load plain"] = order("load", "plain", f"{cluster.url}/plain/c")
        with mount(store, root, settings):
            found["save mount"] = order("save", "mount", f"{root}/c")
        with mount(store, root, settings):
            found["load mount"] = order("load", "mount", f"{root}/c")
        place = f"omnifs://direct::{store}"
        found["save striped"] = order("save", "striped", place)
        found["load striped"] = order("load", "striped", place)
    return found


def _whole(path: Path) -> int:
    buffer, total = bytearray(8 * MiB), 0
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            total += size
    return total


def _mapped(path: Path) -> int:
    """Map a safetensors file and touch every page, as copying a tensor to a device would."""
    total = 0
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 -- safe_open is no mapping
            tensor = file.get_tensor(name)
            total += tensor.clone().nbytes
    return total


def mapped_loads(work: Work, cluster: Cluster, times: int) -> dict[str, list[float]]:
    """Load one shard cold through a fresh mount, alternately whole and mapped; return seconds."""
    found: dict[str, list[float]] = {"whole": [], "mapped": []}
    with tempfile.TemporaryDirectory() as root:
        for _ in range(times):
            for name, read in (("whole", _whole), ("mapped", _mapped)):
                with mount(f"{cluster.url}/striped", root, {"files": work.files}):
                    path = Path(root) / "direct" / _SHARD.format(work.ranks)
                    began_s = time.perf_counter()
                    read(path)
                    found[name].append(time.perf_counter() - began_s)
                click.echo(f"safetensors {name}: {found[name][-1]:.2f} s")
    return found


def single_file(work: Work, cluster: Cluster, size_mib: int) -> dict[str, float]:
    """Write and read one striped file, with as many streams as stripes; return MB/s."""
    config = FilesConfig.model_validate({**work.files, "read_streams": work.stripes})
    url, data = f"{cluster.url}/single", os.urandom(8 * MiB)
    files = StripedFiles(RetryingStore(open_store(url)), config)
    writer = files.writers.file("f")
    writer.write(data)  # the client of HDFS starts up on its first call
    began_s = time.perf_counter()
    for _ in range(size_mib // 8 - 1):
        writer.write(data)
    files.publish("f", writer.finish())
    wrote = size_mib * MiB / (time.perf_counter() - began_s) / 1e6
    files.close()
    files = StripedFiles(RetryingStore(open_store(url)), config)
    with files.open("f") as file:
        began_s = time.perf_counter()
        for at in range(0, size_mib * MiB, MiB):
            file.reader.read(at, MiB)
        read = size_mib * MiB / (time.perf_counter() - began_s) / 1e6
    files.close()
    click.echo(f"one striped file: write {wrote:.0f}, read {read:.0f} MB/s")
    return {"write": wrote, "read": read}


def tables(
    work: Work, seconds: dict[str, float], loads: dict[str, list[float]], single: dict[str, float]
) -> list[Table]:
    """Return the tables of the findings."""
    rows = []
    for kind in ("plain", "mount", "striped"):
        for what in ("save", "load"):
            took = seconds[f"{what} {kind}"]
            gain = seconds[f"{what} plain"] / took
            wanted = f"{NEEDED_RATIO}" if kind != "plain" else ""
            rate = work.size_bytes / took / 1e6
            rows.append((kind, what, f"{took:.1f}", f"{rate:.0f}", f"{gain:.2f}", wanted))
    columns = ("way", "what", "seconds", "MB/s", "times plain", "wanted, at least")
    ratio = min(loads["mapped"]) / min(loads["whole"])
    cap = work.stripes * work.stream_mb
    shown = [" / ".join(f"{s:.2f}" for s in loads[name]) for name in ("whole", "mapped")]
    others = (
        ("safetensors, whole file, s", shown[0], ""),
        ("safetensors, safe_open, s", shown[1], ""),
        ("safe_open over whole file, best of each", f"{ratio:.2f}", f"<= {NEEDED_MMAP}"),
        *(
            (f"cold striped {n} over stripes x stream rate", f"{r / cap:.2f}", f">= {NEEDED_SHARE}")
            for n, r in single.items()
        ),
    )
    caption = (
        f"{work.size_bytes / (1 << 30):.1f} GiB, {work.ranks} ranks, {work.tensors} tensors, "
        f"{work.stripes} stripes, {work.stream_mb:g} MB/s a stream, {work.datanodes} data nodes"
    )
    return [
        Table(columns=columns, rows=tuple(rows), caption=caption),
        Table(columns=("what", "figure", "wanted"), rows=others),
    ]


@click.command()
@click.option("--size-mib", default=4096, show_default=True, help="Size of the whole checkpoint.")
@click.option("--ranks", default=4, show_default=True)
@click.option("--tensors", default=32, show_default=True)
@click.option("--stripes", default=4, show_default=True)
@click.option("--stream-mb", default=8.0, show_default=True, help="MB/s of one stream.")
@click.option("--datanodes", default=4, show_default=True)
@click.option(
    "--single-mib", default=512, show_default=True, help="Size of the single striped file."
)
@click.option("--times", default=2, show_default=True, help="Cold loads of the safetensors file.")
@click.option(
    "--write-report", "reading", default="", help="Write a dated report with this reading."
)
def main(reading: str, single_mib: int, times: int, **sizes: Any) -> None:  # noqa: ANN401 -- click's
    """Measure, print, and write a report if asked.

    \b
    Example:
      python -m benchmarks.fusefs.checkpoint --size-mib 4096 --stream-mb 8
    """  # noqa: D301 -- click's own marker
    work = Work(**sizes)
    with hdfs_cluster(work.datanodes, replication=1, stream_rate=work.stream_mb * 1e6) as cluster:
        os.environ.update(cluster.client_environment())
        seconds = checkpoints(work, cluster)
        loads = mapped_loads(work, cluster, times)
        single = single_file(work, cluster, single_mib)
    found = tables(work, seconds, loads, single)
    for table in found:
        print_table(table)
    if reading:
        command = (
            f"python -m benchmarks.fusefs.checkpoint --size-mib {work.size_mib} "
            f"--stream-mb {work.stream_mb:g} --single-mib {single_mib} --times {times}"
        )
        title = "A sharded checkpoint over HDFS, striped and not, under a cap per stream"
        write_report(__file__, "fusefs_checkpoint", title, command, found, reading)


if __name__ == "__main__":
    main()
