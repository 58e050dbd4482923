"""Time of a container until ``import torch`` is done: with the whole image, or with the bytes that it touches.

    python -m benchmarks.startup.images --folder DIR [--rounds 3] [--mbit 200] [--delay-ms 5]

A registry (Debian's ``docker-registry``) on loopback lies behind a relay that limits the total rate of all
connections and delays each direction. The image is the running Python and its torch, built in DIR the first time.
Contenders alternate in rounds, each with empty caches; the registry is equally warm for all. Needs root, skopeo and
umoci.

- *full*: ``skopeo copy`` and ``umoci unpack`` of the gzip image, then the command in it.
- *lazy*: ``omniload image run`` of the same image as zstd:chunked, nothing known of it.
- *hot*: the same with the trace of an earlier start on another node.

Then blocks that starts touch are read one by one, with pauses up to 0.1 s, to measure a reader's wait for its block.
"""

import argparse
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Table, print_table, write_report
from benchmarks.startup.place import MAIN, Relay, build_images, environment, running_registry
from snapshot.image.block.fetcher import FetchSettings
from snapshot.image.block.loader import BlockLoader, RegistryTier
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_image
from snapshot.image.trace.trace import decode_trace, hot_blocks
from snapshot.image.tree.merge import merge
from snapshot.oci.image import open_store, resolve

COMMAND = ("python", "-c", "import torch; print('ready', flush=True)")
VARIABLES = {"PYTHONPATH": "/opt/site", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(slots=True)
class Samples:
    """Figures of one contender, a value for each round."""

    ready_s: list[float] = field(default_factory=list)
    """Time until the command reports that it is ready."""
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of all its processes, to their end."""
    wire_bytes: list[int] = field(default_factory=list)
    """Bytes that the registry sent until then."""
    moved_bytes: list[int] = field(default_factory=list)
    """Size of blocks, uncompressed, until then."""
    touched_bytes: list[int] = field(default_factory=list)
    """Bytes that the kernel requested, by the trace of the start."""

    def median(self, name: str) -> float:
        """Return the median of one of the lists."""
        return statistics.median(getattr(self, name) or [0])


class Bench:
    """The image behind its link, and a folder for the files of the contenders."""

    def __init__(self, relay: Relay, port: int, folder: Path) -> None:
        self.relay, self.folder = relay, folder
        self.plain, self.lazy = (f"127.0.0.1:{port}/a/{form}:v" for form in ("plain", "lazy"))
        self.samples = {name: Samples() for name in ("full", "lazy", "hot")}
        self.trace = folder / "trace"
        # As in an installed package: no start compiles our own modules.
        self.variables = {**environment(), "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
        self.variables.pop("PYTHONDONTWRITEBYTECODE", None)

    def ours(self, *words: object) -> list[str]:
        """Return the command line of one of our commands."""
        return [sys.executable, "-c", MAIN, "image", *map(str, words)]

    def record(self) -> None:
        """Record a first start, on a node of its own."""
        words = self.ours("record", self.lazy, "-o", self.trace, "--option", self._cache("first"))
        words = [*words, "--", *COMMAND]
        subprocess.run(words, env=self.variables, check=True, capture_output=True)
        shutil.rmtree(self.folder / "first")

    def round(self, name: str) -> None:
        """Let one contender start once, from nothing."""
        place = self.folder / "node"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        words = self._full(place) if name == "full" else self._run(name)
        before, begin, sent = _cpu(), time.perf_counter(), self.relay.bytes_back
        process = subprocess.Popen(words, stdout=subprocess.PIPE, env=self.variables, text=True)
        assert process.stdout is not None
        said = process.stdout.readline()
        samples = self.samples[name]
        samples.ready_s.append(time.perf_counter() - begin)
        samples.wire_bytes.append(self.relay.bytes_back - sent)
        blocks = (place / "blocks").glob("??/*")
        samples.moved_bytes.append(sum(path.stat().st_size for path in blocks))
        process.stdout.close()
        if process.wait() or said != "ready\n":
            raise RuntimeError(f"{name} ended with {process.returncode} and said {said!r}")
        samples.cpu_s.append(_cpu() - before)
        if name != "full":
            (kept,) = (place / "traces").rglob("*.trace")
            trace = decode_trace(kept.read_bytes(), name=str(kept))
            samples.touched_bytes.append(sum(touch.size_bytes for touch in trace.touches))

    def _cache(self, name: str) -> str:
        return f"cache={self.folder / name}"

    def _run(self, name: str) -> list[str]:
        traced = ("--trace", self.trace) if name != "lazy" else ()
        return self.ours("run", self.lazy, *traced, "--option", self._cache("node"), "--", *COMMAND)

    def _full(self, place: Path) -> list[str]:
        steps = """
            skopeo copy -q --src-tls-verify=false "docker://$1" "oci:$2/layout:v" >&2
            umoci unpack --image "$2/layout:v" "$2/bundle" >&2
            root=$2/bundle/rootfs
            mkdir -p "$root/proc" "$root/dev"
            shift 2
            exec unshare --mount --propagation=private -- sh -ec '
                mount -t proc proc "$0/proc"
                mount --rbind /dev "$0/dev"
                exec chroot "$0" "$@"' "$root" /usr/bin/env -i "$@"
        """
        given = [f"{key}={value}" for key, value in VARIABLES.items()]
        return ["sh", "-ec", steps, "sh", self.plain, str(place), *given, *COMMAND]


class Misses:
    """Blocks read one by one through the link."""

    def __init__(self, bench: Bench) -> None:
        self.store, name = open_store(bench.lazy)
        image = resolve(self.store, name)
        self.indexes = index_image(self.store, image, IndexCache(bench.folder / "indexes"))
        tree = merge([index.entries for index in self.indexes])
        trace = decode_trace(bench.trace.read_bytes(), name="trace")
        self.refs = hot_blocks(trace, tree, self.indexes)
        self.by_digest = {index.blob_digest: index for index in self.indexes}

    def latencies(self, num: int, seed: int) -> list[float]:
        """Return the waits of readers for ``num`` blocks, in seconds; the same blocks for the same seed."""
        draw = random.Random(seed)
        settings = FetchSettings(tiers=("registry",))
        loader = BlockLoader({"registry": RegistryTier(self.store)}, None, settings)
        found = []
        try:
            for ref in draw.sample(self.refs, num):
                time.sleep(draw.uniform(0.0, 0.1))
                index = self.by_digest[ref.blob]
                waits, begin = loader.waits, time.perf_counter()
                loader.block(index, ref.number)
                if loader.waits > waits:  # otherwise the block was there, and there was no miss
                    found.append(time.perf_counter() - begin)
        finally:
            loader.close()
        return found


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _tables(bench: Bench, waited_s: list[float]) -> list[Table]:
    full = bench.samples["full"]
    rows = [
        (
            name,
            f"{found.median('ready_s'):.2f}",
            f"{min(found.ready_s):.2f}",
            f"{found.median('cpu_s'):.2f}",
            f"{found.median('wire_bytes') / 1e6:.1f}",
            f"{found.median('moved_bytes') / 1e6:.1f}",
            f"{found.median('touched_bytes') / 1e6:.1f}",
            f"{found.median('ready_s') / full.median('ready_s'):.2f}",
        )
        for name, found in bench.samples.items()
    ]
    columns = ("contender", "median s", "best s", "processor s", "MB on the link")
    columns += ("MB of blocks", "MB touched", "of full")
    quantiles = (f"{1e3 * _quantile(waited_s, share):.1f}" for share in (0.5, 0.9, 0.99))
    lazy, hot = bench.samples["lazy"], bench.samples["hot"]
    paired = [h / f for h, f in zip(hot.ready_s, full.ready_s, strict=True)]
    pairs = [h / z for h, z in zip(hot.ready_s, lazy.ready_s, strict=True)]
    moved = hot.median("moved_bytes") / hot.median("touched_bytes")
    goals = [
        ("hot, of full pull and unpack (median of rounds)", statistics.median(paired), 0.25),
        ("hot, of lazy (median of rounds)", statistics.median(pairs), 0.6),
        ("blocks moved before ready, of bytes touched", moved, 1.3),
    ]
    return [
        Table(columns=columns, rows=tuple(rows), caption="Until `import torch` is done:"),
        Table(
            columns=("demand misses", "median ms", "p90 ms", "p99 ms"),
            rows=((len(waited_s), *quantiles),),
            caption="What a reader waits for a block:",
        ),
        Table(
            columns=("what", "figure", "wanted, at most"),
            rows=tuple((what, f"{value:.2f}", goal) for what, value, goal in goals),
        ),
    ]


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder that keeps image and registry"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--misses", type=int, default=200, help="blocks to read for each round")
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--reading", default="", help="last paragraph of the report")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    waited_s: list[float] = []
    with running_registry(asked.folder) as port, tempfile.TemporaryDirectory() as scratch:
        build_images(asked.folder, f"127.0.0.1:{port}", environment())
        relay = Relay(port, asked.mbit * 1e6 / 8, asked.delay_ms / 1e3)
        with relay.running() as slow:
            bench = Bench(relay, slow, Path(scratch))
            bench.record()
            misses = Misses(bench)
            for number in range(asked.rounds):
                for name in bench.samples:
                    bench.round(name)
                    print(name, f"{bench.samples[name].ready_s[-1]:.2f} s", file=sys.stderr)
                waited_s += misses.latencies(asked.misses, number)
            misses.store.close()
    tables = _tables(bench, waited_s)
    for table in tables:
        print_table(table)
    line = f"python -m benchmarks.startup.images --folder DIR --rounds {asked.rounds} --misses {asked.misses}"
    line += f" --mbit {asked.mbit:g} --delay-ms {asked.delay_ms:g}"
    title = "Starts of an image: pulled whole, read lazily, hot blocks first"
    write_report(__file__, "startup", title, line, tables, asked.reading)


if __name__ == "__main__":
    main()
