"""The mount compared with the usual mounts: rclone and s3fs, on the same S3 server and the same HDFS.

python -m benchmarks.fusefs.peers --help
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import click

from benchmarks.fusefs.contenders import (
    CACHE,
    KEYS,
    NATIVE,
    OURS,
    PLAIN,
    TASKS,
    Contender,
    mounted,
    ours,
    program,
    rclones,
    s3_server,
)
from benchmarks.report import Table, print_table, write_report
from fusefs.stores.url import open_store
from tests.support.hdfs.cluster import hdfs_cluster

__all__ = ["main", "scattered", "table_of"]

MiB = 1 << 20
Cost = tuple[float, float]
"""Seconds, and processor seconds of the mount."""
_READERS, _BLOCK = 4, 4 * MiB

READER = """
import os, sys, time
path, block, offsets = sys.argv[1], int(sys.argv[2]), [int(a) for a in sys.argv[3:]]
buffer = bytearray(block)
print("ready", flush=True); sys.stdin.readline()
file = os.open(path, os.O_RDONLY)
for offset in offsets:
    wanted = min(block, os.fstat(file).st_size - offset)
    got = os.preadv(file, [memoryview(buffer)[:wanted]], offset)
    assert got == wanted, (offset, got, wanted)
"""


def drop_caches() -> None:
    """Empty the kernel's page cache, if that is allowed."""
    os.sync()
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")


def scattered(size_bytes: int, readers: int, seed: int) -> list[list[int]]:
    """Deal the blocks of a file to readers in a random order, each block once.

    Returns:
        Offsets for each reader; the counts differ by at most one.
    """
    offsets = list(range(0, size_bytes, _BLOCK))
    random.Random(seed).shuffle(offsets)
    return [offsets[number::readers] for number in range(readers)]


def read_s(path: Path, block: int, offsets: Sequence[Sequence[int]]) -> float:
    """Read with one process for each list of offsets; return seconds from the first open to the last byte."""
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, path, str(block), *map(str, part)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for part in offsets
    ]
    for reader in readers:
        assert reader.stdout is not None
        reader.stdout.readline()
    begin = time.perf_counter()
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write(b"go\n")
        reader.stdin.flush()
    for reader in readers:
        reader.wait()
    took = time.perf_counter() - begin
    if any(reader.returncode for reader in readers):
        raise RuntimeError(f"{path} could not be read")
    return took


def write_s(path: Path, data: bytes) -> float:
    """Write front to back by 1 MiB; return seconds until close has reported that the store has it."""
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), MiB):
            file.write(memoryview(data)[at : at + MiB])
    return time.perf_counter() - begin


def cpu_s(process: int) -> float:
    """Return the processor seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def costs_of(contender: Contender, task: str, root: Path, data: bytes, seed: int) -> Cost:
    """Do a task once on a fresh mount; return seconds and the mount's processor seconds."""
    drop_caches()
    shutil.rmtree(root.parent / CACHE, ignore_errors=True)
    with mounted(contender, root) as process:
        before = cpu_s(process)
        took = seconds_of(contender, task, root, data, seed)
        return took, cpu_s(process) - before


def seconds_of(contender: Contender, task: str, root: Path, data: bytes, seed: int) -> float:
    """Do a task on a mount."""
    path = root / contender.file
    if task == TASKS[0]:
        return read_s(path, MiB, [range(0, len(data), MiB)])
    if task == TASKS[1]:
        return read_s(path, _BLOCK, scattered(len(data), _READERS, seed))
    made = root / f"written-{seed}"
    took = write_s(made, data)
    if made.stat().st_size != len(data):
        raise RuntimeError(f"{contender.name} wrote {made.stat().st_size} of {len(data)} bytes")
    made.unlink()
    return took


Costs = dict[tuple[str, str], list[Cost | None]]
"""Costs by contender and task, one for each round; None if it failed."""


def rounds_of(contenders: Sequence[Contender], root: Path, data: bytes, rounds: int) -> Costs:
    """Run every contender once in each round, so that a busy moment affects all of them."""
    found: Costs = {}
    for seed in range(rounds):
        for task in TASKS:
            # The order rotates, because the store's own caches warm up within a round.
            order = [*contenders[seed % len(contenders) :], *contenders[: seed % len(contenders)]]
            for contender in order:
                if task in contender.tasks:
                    cost: Cost | None = None
                    try:
                        cost = costs_of(contender, task, root, data, seed)
                        click.echo(f"round {seed}: {contender.name}, {task}: {cost}", err=True)
                    except OSError as error:
                        # rclone's close fails if a data node is slow to report its block.
                        click.echo(f"round {seed}: {contender.name}, {task}: {error}", err=True)
                    found.setdefault((contender.name, task), []).append(cost)
    return found


def table_of(
    store: str, costs: Mapping[tuple[str, str], Sequence[Cost | None]], size: int
) -> Table:
    """Return rates by contender, the ratio of ours, and the mount's processor seconds.

    All figures are medians of the rounds that did not fail; the number of failures stands next to them.
    """
    done = {key: [cost for cost in found if cost is not None] for key, found in costs.items()}
    rows = []
    for name in dict.fromkeys(name for name, _ in costs):
        cells = [name]
        for task in TASKS:
            if (name, task) not in costs:
                cells.append("")
                continue
            num_failed = len(costs[name, task]) - len(done[name, task])
            failed = f"{num_failed} of {len(costs[name, task])} failed" if num_failed else ""
            if not done[name, task]:
                cells.append(failed)
                continue
            took, used = (median(part) for part in zip(*done[name, task], strict=True))
            ratio = took / median(seconds for seconds, _ in done[OURS, task])
            times = "" if name == OURS else f" ({ratio:.2f}x)"
            rate = f"{size / took / 1e6:.0f}{times}, {used:.2f} s"
            cells.append(f"{rate}; {failed}" if failed else rate)
        rows.append(tuple(cells))
    columns = (f"{store}: MB/s (fusefs is so many times as fast), processor seconds", *TASKS)
    return Table(columns=columns, rows=tuple(rows))


def on_s3(base: Path, s3rver: str, data: bytes, rounds: int) -> Costs:
    """Compare on S3."""
    log = base / "log"
    with s3_server(base, s3rver) as port:
        endpoint = f"http://127.0.0.1:{port}"
        store = f"s3://bench?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        os.environ.update(KEYS)
        keys = base / "keys"
        keys.write_text(f"{KEYS['AWS_ACCESS_KEY_ID']}:{KEYS['AWS_SECRET_ACCESS_KEY']}")
        keys.chmod(0o600)
        remote = (
            f":s3,provider=Other,env_auth=true,endpoint='{endpoint}',force_path_style=true:bench"
        )
        s3fs = [
            "s3fs", "bench", "@", "-f", "-o", f"url={endpoint}", "-o", "use_path_request_style",
            "-o", f"passwd_file={keys}", "-o", "parallel_count=8", "-o", "multipart_size=16",
        ]  # fmt: skip
        contenders = [
            Contender(OURS, ours(store, log), "striped"),
            Contender(PLAIN, ours(store, log), "plain", TASKS[:2]),
            *rclones(remote, base, log),
            Contender("s3fs", program(*s3fs, log=log), "plain"),
        ]
        return compared(contenders, base, data, rounds)


def on_hdfs(base: Path, data: bytes, rounds: int, client: str | None) -> Costs:
    """Compare on HDFS; our Java client is that of the cluster unless a folder of jars is given."""
    log = base / "log"
    # The store is in memory, as the S3 server is: with the caches dropped, the disk would be measured instead.
    with hdfs_cluster(3, replication=1, above=base) as cluster:
        os.environ.update(cluster.client_environment())
        if client is not None:
            os.environ["CLASSPATH"] = ":".join(
                map(str, sorted(Path(client).resolve().glob("*.jar")))
            )
        open_store(cluster.url).make_directory("bench")
        store = f"{cluster.url}/bench"
        remote = f":hdfs,namenode='127.0.0.1:{cluster.port}',username=root:/bench"
        contenders = [
            Contender(OURS, ours(store, log), "striped"),
            Contender(PLAIN, ours(store, log), "plain", TASKS[:2]),
            Contender(NATIVE, ours(store.replace("hdfs", "hdfs+native", 1), log), "striped"),
            *rclones(remote, base, log),
        ]
        return compared(contenders, base, data, rounds)


def compared(contenders: list[Contender], base: Path, data: bytes, rounds: int) -> Costs:
    """Write the files, ours striped and a plain one by rclone, and run the rounds."""
    root = base / "mnt"
    root.mkdir(exist_ok=True)
    for name, file in ((OURS, "striped"), ("rclone", "plain")):
        writer = next(contender for contender in contenders if contender.name == name)
        for left in reversed(range(5)):
            try:
                with mounted(writer, root):
                    write_s(root / file, data)
            except OSError:
                if not left:
                    raise
            else:
                break
    return rounds_of(contenders, root, data, rounds)


READING = """\
Each figure is the median of {rounds} rounds of {size} MiB; every read is the first on a fresh mount, after the
kernel's caches were dropped. In a round each contender runs once, in an order that shifts by one, so a busy moment
affects all. All are mounted with their defaults, with two exceptions: s3fs has 8 parallel requests, and the second
rclone has its cache in full mode (in memory) and 64 MiB of read-ahead. The close of that rclone returns before the
upload, so it is left out of the writes. A write ends when close has returned. Servers, mounts and readers share the
cores named above, so these are ratios of work done per core, not of a network."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size-mib", default=256, show_default=True, help="Size of the file.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--s3rver", help="Path of s3rver (npm install s3rver); without it S3 is left out.")
@click.option("--hdfs/--no-hdfs", default=True, show_default=True)
@click.option(
    "--hadoop-client",
    help="Folder with the jars of Hadoop's client for our mounts; by default those of the cluster, 2.7.",
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(
    size_mib: int,
    rounds: int,
    s3rver: str | None,
    hdfs: bool,
    hadoop_client: str | None,
    report: bool,
) -> None:
    """Compare mounts: sequential and scattered reads, and writes.

    \b
    Example:
      python -m benchmarks.fusefs.peers --s3rver node_modules/.bin/s3rver --rounds 1 --no-report
    """  # noqa: D301 -- click's own marker
    data = os.urandom(size_mib * MiB)
    stores: dict[str, Callable[[Path], Costs]] = {}
    if s3rver is not None:
        stores["S3"] = lambda base: on_s3(base, s3rver, data, rounds)
    if hdfs:
        stores["HDFS"] = lambda base: on_hdfs(base, data, rounds, hadoop_client)
    tables = []
    for name, measured in stores.items():
        base = Path(tempfile.mkdtemp(prefix="fusefs-peers-", dir="/dev/shm"))
        try:
            found = measured(base)
        except BaseException:
            with suppress(OSError):
                click.echo((base / "log").read_text(errors="replace")[-4000:], err=True)
            raise
        finally:
            shutil.rmtree(base, ignore_errors=True)
        tables.append(table_of(name, found, len(data)))
        print_table(tables[-1])
    if report:
        path = write_report(
            __file__,
            "fusefs_peers",
            "fusefs and its peers on the same stores",
            f"python -m benchmarks.fusefs.peers --size-mib {size_mib} --rounds {rounds}"
            + (" --s3rver node_modules/.bin/s3rver" if s3rver else "")
            + (" --hadoop-client jars" if hadoop_client else ""),
            tables,
            READING.format(rounds=rounds, size=size_mib).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
