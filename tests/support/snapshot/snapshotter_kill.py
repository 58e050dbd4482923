"""Kills a snapshotter at every line of an operation: ``python -m tests.support.snapshot.snapshotter_kill FOLDER``.

For each operation and each line that it runs, a process is forked, does what came before,
begins the operation and kills itself there. Then this process opens what is left and
looks. It prints, as JSON, how many kills found the operation not begun and how many done;
anything in between is an error.
"""

import json
import os
import shutil
import signal
import sys
from contextlib import closing, suppress
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
    """What every operation starts from: a lazy layer, a folder on it, and a place to write."""
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


def killed(folder, operation, line):
    """Run an operation in a process that kills itself at a line of ours; tell whether it did."""
    child = os.fork()
    if child == 0:
        snapshotter = opened(folder)
        left = [line]

        def trace(frame, event, _):
            if not frame.f_code.co_filename.startswith(OURS):
                return None
            if event == "line":
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        operation(snapshotter)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def state_of(folder):
    """Open what is left, as the next start does; return what containerd would be told."""
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
    for name, operation in OPERATIONS.items():
        work, line = folder / "work", 0
        outcomes = []
        while True:
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(start, work)
            died = killed(work, operation, line)
            outcomes.append(state_of(work))
            if not died:
                break
            line += 1
        *early, done = outcomes
        assert done != first, name
        assert all(state in (first, done) for state in early), name
        told[name] = [early.count(first), early.count(done)]
    print(json.dumps(told))  # noqa: T201 -- what it is run for


if __name__ == "__main__":
    main()
