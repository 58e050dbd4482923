"""Memory of several ranks' loaders over one dataset of many small objects: every process counted, shared pages once.

python -m benchmarks.loaders.ranks_memory CONTENDER RANK RANKS SAMPLES: one rank, which waits after it has read its
part.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

from benchmarks.loaders.work import Dicts
from trainer_integration import DataLoader, SharedDataset

__all__ = ["MEMORY_CONTENDERS", "memory_rows", "pss_of_session"]

MEMORY_CONTENDERS = ("torch", "ours", "ours, share=True", "ours, share=True, SharedDataset")
_BATCH = 256
_WORKERS = 2
_LIMIT_S = 900.0


def _loader(contender: str, rank: int, ranks: int, samples: int) -> Iterable[Any]:
    if contender.endswith("SharedDataset"):
        dataset: Any = SharedDataset(partial(Dicts, samples), samples)
    else:
        dataset = Dicts(samples)
    sampler: Any = DistributedSampler(dataset, ranks, rank, shuffle=True)
    keywords: dict[str, Any] = {"num_workers": _WORKERS, "persistent_workers": True}
    if contender == "torch":
        return TorchLoader(dataset, _BATCH, sampler=sampler, **keywords)
    if "share" in contender:
        keywords["share"] = True
    return DataLoader(dataset, _BATCH, sampler=sampler, **keywords)


def pss_of_session(session: int) -> tuple[int, int]:
    """Return the proportional set size in bytes of all processes of a session, and their number."""
    sizes = [size for pid, size in _sizes() if os.getsid(pid) == session]
    return sum(sizes), len(sizes)


def _sizes() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            lines = (folder / "smaps_rollup").read_text(encoding="ascii").splitlines()
            os.getsid(int(folder.name))
        except OSError:
            continue
        yield (
            int(folder.name),
            sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")),
        )


def memory_of(contender: str, ranks: int, samples: int) -> tuple[int, int]:
    """Return PSS and processes of ``ranks`` ranks that have read one epoch and still have their loaders."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(os.getpid()),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    # In a session of its own, which the server keeps, so all processes are found by it.
    script = "import sys; from benchmarks.loaders.ranks_memory import lead; lead(sys.argv[1:])"
    command = [sys.executable, "-W", "ignore", "-c", script, contender, str(ranks), str(samples)]
    with subprocess.Popen(
        command, stdin=-1, stdout=-1, text=True, env=environment, start_new_session=True
    ) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None
        try:
            if (line := leader.stdout.readline()) != "read\n":
                raise RuntimeError(f"the ranks of {contender} ended early: {line!r}")
            return pss_of_session(leader.pid)
        finally:
            leader.stdin.close()
            leader.wait(_LIMIT_S)


def lead(arguments: list[str]) -> None:
    """Start the ranks, report when all have read their epoch, and end them when the input ends. Has no dataset."""
    contender, ranks, samples = arguments
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.loaders.ranks_memory", contender]
    processes = [
        subprocess.Popen([*command, str(rank), ranks, samples], stdin=-1, stdout=-1, text=True)
        for rank in range(int(ranks))
    ]
    read = [process.stdout.readline() for process in processes if process.stdout]
    print("read" if set(read) == {"read\n"} else read, flush=True)
    sys.stdin.read()
    for process in processes:
        if process.stdin:
            process.stdin.close()
    # Wait for the processes and not for the end of their output: a group's server keeps the output open.
    for process in processes:
        process.wait(_LIMIT_S)


def memory_rows(ranks: int, samples: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each contender, torch first."""
    theirs = 0
    for contender in MEMORY_CONTENDERS:
        size_bytes, processes = memory_of(contender, ranks, samples)
        theirs = theirs or size_bytes
        yield (
            contender,
            str(processes),
            f"{size_bytes / (1 << 20):,.0f}",
            f"{size_bytes / theirs:.3f}",
        )


def main() -> None:
    """Run one rank."""
    contender, *numbers = sys.argv[1:]
    loader: Any = _loader(contender, *map(int, numbers))
    batches = iter(loader)
    last = -(-len(loader.sampler) // _BATCH) - 1
    next(itertools.islice(batches, last, None))
    print("read", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
