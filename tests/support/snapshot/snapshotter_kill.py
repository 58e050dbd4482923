"""Kills a snapshotter at every line of an operation: ``python -m tests.support.snapshot.snapshotter_kill FOLDER``.

For each operation and each line that it runs, a process is forked, prepares the operation, begins it and kills itself
at that line. Then this process opens the remains and looks at them. It prints, as JSON, after how many lines the
operation was not begun and after how many it was done; anything in between is an error. Lines between which no byte
on the disk changes leave the same remains, so they are killed only once for all of them. A process that runs to the
end shows which lines these are.
"""

import json
import os
import shutil
import signal
import sys
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

from snapshot.engines.containerd.chain import chain_ids
from snapshot.engines.containerd.records import SnapshotExistsError
from snapshot.engines.containerd.snapshotter import Snapshotter
from snapshot.engines.containerd.store import SnapshotStore
from tests.support.snapshot.snapshotter_builders import (
    FakeImages,
    FakeViews,
    a_kept_image,
    labels_of,
)

KEPT = a_kept_image(2)
CHAIN = chain_ids(KEPT.image().config.rootfs.diff_ids)
OURS = str(Path(__file__).parents[3] / "snapshot/engines/")


def opened(folder):
    return Snapshotter(folder / "root", FakeImages(KEPT), FakeViews(folder), lambda: 1)


def lazily(snapshotter, place):
    with suppress(SnapshotExistsError):
        snapshotter.prepare(f"e{place}", CHAIN[place - 1] if place else "", labels_of(KEPT, place))


def before(snapshotter):
    """Prepare the start of every operation: a lazy layer, a folder on it, and a place to write."""
    lazily(snapshotter, 0)
    snapshotter.prepare("new", CHAIN[0], {})
    snapshotter.commit("layer", "new", {})
    snapshotter.prepare("box", "layer", {})


OPERATIONS = {
    "prepare": lambda s: s.prepare("other", "layer", {}),
    "view": lambda s: s.prepare("other", CHAIN[0], {}, "view"),
    "lazy": lambda s: lazily(s, 1),
    "commit": lambda s: s.commit("box-layer", "box", {}),
    "remove": lambda s: s.remove("box"),
    "label": lambda s: s.update("box", {"x": "1"}, ()),
}


def traced(folder, operation, at_line):
    """Run an operation here; call ``at_line`` with the number of each of our lines before it runs."""
    snapshotter = opened(folder)
    numbers = count()

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            at_line(next(numbers))
        return trace

    sys.settrace(trace)
    operation(snapshotter)
    sys.settrace(None)


def forked(work):
    """Do work in a forked process; return its exit code, as ``waitstatus_to_exitcode`` does."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def on_disk(folder):
    """Return all contents of a folder: names, modes and bytes."""
    paths = sorted(folder.rglob("*"))
    return [(p, p.stat().st_mode, p.read_bytes() if p.is_file() else b"") for p in paths]


def lines_of(folder, operation):
    """Run an operation; return for each of its lines whether the disk differs from the state at the line before."""
    told = folder.with_name("told")
    seen, changes = [None], []

    def look(_):
        found = on_disk(folder)
        changes.append(found != seen[0])
        seen[0] = found

    def work():
        traced(folder, operation, look)
        told.write_text(json.dumps(changes))

    assert forked(work) == 0
    return json.loads(told.read_text())


def killed(folder, operation, line):
    """Run an operation in a process that kills itself at one of our lines."""

    def at_line(number):
        if number == line:
            os.kill(os.getpid(), signal.SIGKILL)

    assert forked(lambda: traced(folder, operation, at_line)) == -signal.SIGKILL


def state_of(folder):
    """Open the remains as the next start does; return the answer that containerd would get."""
    snapshotter = opened(folder)
    try:
        rows = snapshotter.listing()
        folders = {p.name for p in (folder / "root/snapshots").iterdir()}
        with_files = {str(row.number) for row in rows if not row.is_lazy}
        assert folders == with_files, (folders, with_files)
        for row in rows:
            if row.kind != "committed":
                assert snapshotter.mounts(row.key)
            if not row.is_lazy:
                assert (folder / f"root/snapshots/{row.number}/fs").is_dir()
            if row.kind == "active":
                assert (folder / f"root/snapshots/{row.number}/work").is_dir()
        images = {row.image for row in rows if row.is_lazy}
        return [(row.key, row.parent, row.kind, dict(row.labels), row.layers) for row in rows]
    finally:
        snapshotter.close()
        with closing(SnapshotStore(folder / "root/state.sqlite")) as store:
            assert all(store.image(digest) == KEPT for digest in images)


def main():
    folder = Path(sys.argv[1])
    start = folder / "start"
    snapshotter = opened(start)
    before(snapshotter)
    snapshotter.close()
    first = state_of(start)
    told = {}
    work = folder / "work"

    def anew():
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(start, work)

    for name, operation in OPERATIONS.items():
        anew()
        early = []
        changes = lines_of(work, operation)
        done = state_of(work)
        for line, is_another in enumerate(changes):
            # The last line is always included, because the operation ends after it.
            if is_another or line == len(changes) - 1:
                anew()
                killed(work, operation, line)
                found = state_of(work)
            early.append(found)
        assert done != first, name
        assert all(state in (first, done) for state in early), name
        told[name] = [early.count(first), early.count(done)]
    print(json.dumps(told))  # noqa: T201 -- what it is run for


if __name__ == "__main__":
    main()
