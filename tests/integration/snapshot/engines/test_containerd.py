"""Real containers of a real containerd, started from images whose layers stay in a real registry."""

import os
import shutil
import signal
import sqlite3
import subprocess
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import zstandard
from click.testing import CliRunner

from snapshot.commands.image import command
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_image
from snapshot.image.trace.trace import decode_trace, hot_blocks
from snapshot.image.tree.merge import merge
from snapshot.oci.image import open_store, resolve
from tests.support.snapshot.containerd_builders import (
    Containerd,
    Link,
    a_python_image,
    daemons_of,
    run,
    served_snapshotter,
    views_of,
)
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_image
from tests.support.snapshot.registries.registry import needs, running_registry

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

WAITS_S = 60


def until(holds, what, left=str):
    """Return what ``holds`` says once it says something; an engine tells nobody when it has tidied up."""
    end_s = time.monotonic() + WAITS_S
    while not (found := holds()):
        assert time.monotonic() < end_s, f"in {WAITS_S} s {what} {left()}"
        time.sleep(0.02)
    return found


class Place:
    """A registry, a containerd, and the images in them."""

    def __init__(self, folder, registry):
        self.folder, self.registry = folder, registry
        self.link = Link(registry)
        self.containerd = None
        self.command = ()

    @contextmanager
    def counted(self):
        """Yield a function of the bytes that the registry sent since."""
        before = self.link.bytes_back
        yield lambda: self.link.bytes_back - before

    def forget(self):
        """Have containerd forget all images: one that CRI pulled has several names."""
        names = self.containerd.ctr("images", "ls", "-q").stdout.split()
        self.containerd.ctr("images", "rm", "--sync", *names, check=False)

    @contextmanager
    def served(self):
        """Run a snapshotter; yield once containerd, which tries again every few seconds, speaks to it."""
        line = ("snapshots", "--snapshotter", "omniload")
        with served_snapshotter(self.folder) as process:
            until(
                lambda: not self.containerd.ctr(*line, "prepare", "probe", check=False).returncode,
                "containerd reaches the snapshotter",
            )
            self.containerd.ctr(*line, "rm", "probe")
            yield process

    def wait_collected(self):
        """Wait until the collector has taken every snapshot, and nothing shows them any more."""
        until(lambda: not self.rows(), "every snapshot is collected but", self.rows)
        self.wait_unmounted()

    def wait_unmounted(self):
        """Wait until nothing is mounted, and what was recorded is kept: a process does that behind its unmount."""
        for what, left in (("view is unmounted", views_of), ("process has ended", daemons_of)):
            there = partial(left, self.folder)
            until(lambda there=there: not there(), f"every {what} but", there)

    def rows(self):
        with sqlite3.connect(f"file:{self.folder}/sn/state.sqlite?mode=ro", uri=True) as base:
            found = list(base.execute("SELECT key, kind, layers FROM snapshots ORDER BY number"))
        base.close()
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    needs("containerd", "ctr", "runc", "umoci", "skopeo", "docker-registry", "umount")
    if not Path("/dev/fuse").exists() or os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs /dev/fuse and root")
    folder = tmp_path_factory.mktemp("c")
    layout = folder / "layout"
    words = a_python_image(folder, layout)
    (folder / "more").mkdir()
    (folder / "more/hello").write_text("hello")
    run("umoci", "tag", "--image", f"{layout}:v", "kube")
    run("umoci", "insert", "--image", f"{layout}:kube", folder / "more", "/more")
    with running_registry(folder) as registry:
        found = Place(folder, registry)
        copy = ("skopeo", "copy", "-q", "--dest-tls-verify=false")
        for tag in ("v", "kube"):
            run(*copy, f"oci:{layout}:{tag}", f"docker://{registry}/a/plain:{tag}")
        store, _ = open_store(f"{registry}/a/plain:small")
        tar = a_tar(a_member("more/hello", b"hello"))
        layer = a_layer(store, zstandard.ZstdCompressor().compress(tar), "zstd")
        an_image(store, [(layer, tar)], "small")
        store.close()
        line = ["convert", f"{registry}/a/plain:v", f"{registry}/a/lazy:v"]
        made = CliRunner().invoke(command, line)
        assert made.exit_code == 0, made.output
        shutil.rmtree(folder / "base")
        with found.link.running() as address:
            found.address, found.command = address, words
            found.containerd = Containerd(folder)
            try:
                yield found
            finally:
                found.containerd.close()
                for view in views_of(folder):
                    subprocess.run(["umount", "-l", view], check=False)


@pytest.fixture
def served(place):
    """A snapshotter that runs, and an empty cache; afterwards containerd knows no image."""
    shutil.rmtree(place.folder / "cache", ignore_errors=True)
    with place.served() as process:
        yield process
        if process.poll() is None:
            place.forget()
            place.wait_collected()


def test_a_container_starts_from_layers_that_stay_in_the_registry(place, served):
    image = f"{place.address}/a/lazy:v"
    with place.counted() as moved:
        assert b"sha256:" in place.containerd.pull(image)
        pulled = moved()
        first = place.containerd.start(image, "first")
        lazily = moved()
        second = place.containerd.start(image, "second")
        again = moved() - lazily
    with place.counted() as moved:
        place.containerd.ctr("content", "fetch", "--plain-http", f"{place.address}/a/plain:v")
        whole = moved()

    assert first.stdout == second.stdout
    assert first.stdout.startswith("10 ")
    assert pulled < 0.05 * whole
    assert lazily < 0.6 * whole
    assert again < 0.05 * whole
    assert [layers for _, kind, layers in place.rows() if kind == "committed"][:2] == [1, 2]
    assert len(views_of(place.folder)) == 1


def test_what_a_container_writes_is_its_own_and_can_become_a_layer(place, served):
    image = f"{place.address}/a/lazy:v"
    place.containerd.pull(image)
    python = place.command[0]
    write = "import os; os.remove('/etc/passwd'); open('/new', 'w').write('x'); print(os.listdir('/etc'))"
    look = "import os; print(os.path.exists('/new'), open('/etc/passwd').read()[:4])"

    wrote = place.containerd.start(image, "one", python, "-c", write)
    looked = place.containerd.start(image, "two", python, "-c", look)

    assert "passwd" not in wrote.stdout
    assert looked.stdout == "False root\n"
    top = place.rows()[1][0]
    snapshots = ("snapshots", "--snapshotter", "omniload")
    place.containerd.ctr(*snapshots, "prepare", "key", top)
    place.containerd.ctr(*snapshots, "commit", "mine", "key")
    try:
        place.containerd.ctr(*snapshots, "prepare", "child", "mine")
        place.containerd.ctr(*snapshots, "view", "look", "mine")
        refused = place.containerd.ctr(*snapshots, "rm", "mine", check=False)
    finally:
        # Nothing refers to the view, so the collector takes it. If it did already, containerd 1.6 still
        # counts it as a child and never removes "mine" by name: the collector shall take that, too.
        place.containerd.ctr(*snapshots, "rm", "child")
        place.containerd.ctr(*snapshots, "label", "mine", "containerd.io/gc.root=")

    assert refused.returncode
    assert "cannot remove snapshot with child" in refused.stderr


def test_a_snapshotter_that_is_killed_disturbs_no_container_and_goes_on_when_started_again(
    place, served
):
    image = f"{place.address}/a/lazy:v"
    place.containerd.pull(image)
    python = place.command[0]
    script = "print('up', flush=True); input(); import numpy; print(numpy.arange(4).sum())"
    line = [
        "ctr",
        "-a",
        str(place.containerd.socket),
        "-n",
        "k8s.io",
        "run",
        "--rm",
        "--snapshotter",
        "omniload",
    ]
    with subprocess.Popen(
        [*line, image, "long", python, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "up\n"
        served.kill()
        served.wait()
        (view,) = views_of(place.folder)
        out, err = process.communicate("\n", timeout=120)
    assert (out, err, process.returncode) == ("6\n", "", 0)

    with place.served() as again:
        assert place.containerd.start(image, "after").stdout.startswith("10 ")
        assert views_of(place.folder) == [view]

        again.send_signal(signal.SIGTERM)
        assert again.wait() == 0
    with place.served():
        place.forget()
        place.wait_collected()  # the view of an earlier snapshotter, too


def test_a_view_whose_process_died_is_shown_again_without_the_registry(place, served):
    image = f"{place.address}/a/lazy:v"
    place.containerd.pull(image)
    words = (place.command[0], "-S", "-c", "print(open('/etc/passwd').read()[:4])")
    assert place.containerd.start(image, "first", *words).stdout == "root\n"
    (view,) = views_of(place.folder)
    subprocess.run(["umount", "-l", view], check=True)
    until(lambda: not views_of(place.folder), "it is gone")

    place.link.is_cut = True
    try:
        found = place.containerd.start(image, "second", *words)
    finally:
        place.link.is_cut = False

    assert found.stdout == "root\n"


def test_what_the_first_start_touched_comes_first_on_the_next(place, served):
    image = f"{place.address}/a/lazy:v"
    place.containerd.pull(image)
    with place.counted() as moved:
        began = place.containerd.start(image, "first")
        cold = moved()
    assert began.stdout.startswith("10 "), began
    place.forget()
    place.wait_unmounted()
    (trace_path,) = (place.folder / "cache/traces").rglob("*.trace")
    trace = decode_trace(trace_path.read_bytes(), name="it")
    assert trace.command == place.command
    assert any("numpy" in touch.path for touch in trace.touches)
    shutil.rmtree(place.folder / "cache/blocks")

    place.containerd.pull(image)
    top = place.rows()[1][0]
    place.containerd.ctr("snapshots", "--snapshotter", "omniload", "prepare", "warm", top)
    store, name = open_store(f"{place.registry}/a/lazy:v")
    indexes = index_image(store, resolve(store, name), IndexCache(place.folder / "cache/indexes"))
    store.close()
    refs = hot_blocks(trace, merge([index.entries for index in indexes]), indexes)
    kept = BlockStore(place.folder / "cache/blocks", 1 << 40)
    until(lambda: all(kept.has(ref.digest) for ref in refs), "all hot blocks come by themselves")
    with place.counted() as moved:
        found = place.containerd.start(image, "second")
        warm = moved()
    place.containerd.ctr("snapshots", "--snapshotter", "omniload", "rm", "warm")

    assert found.stdout.startswith("10 ")
    assert len(refs) > 50
    assert cold > 5_000_000
    assert warm < 0.1 * cold


def test_kubernetes_pulls_lazily_by_itself_and_gzip_layers_too(place, served):
    image = f"{place.address}/a/plain:kube"

    assert b"sha256:" in place.containerd.pull(image)

    rows = [row for row in place.rows() if row[1] == "committed"]
    assert [layers for _, _, layers in rows] == [1, 2, 3]
    contents = place.containerd.ctr("content", "ls", "-q").stdout.split()
    assert len(contents) == 2, "manifest and configuration, no layer"
    words = (place.command[0], "-c", "import numpy; print(open('/more/hello').read())")
    found = place.containerd.start(image, "pod", *words)
    assert found.stdout == "hello\n"


def test_two_images_share_the_layers_they_have_in_common(place, served):
    place.containerd.pull(f"{place.address}/a/lazy:v")
    with place.counted() as moved:
        place.containerd.pull(f"{place.address}/a/plain:kube")
        pulled = moved()

    # The probe of ``served`` goes as containerd collects, a moment later.
    assert [layers for _, kind, layers in place.rows() if kind == "committed"] == [1, 2, 3]
    assert pulled < 1_000_000, "of three layers only the small one is new"


def test_a_layer_that_is_not_read_in_parts_is_unpacked_as_ever_and_the_log_says_why(place, served):
    image = f"{place.address}/a/plain:small"

    place.containerd.pull(image)

    rows = [(kind, layers) for _, kind, layers in place.rows()]
    assert ("committed", 0) in rows
    assert "zstd without a table" in (place.folder / "sn.log").read_text()
    (name,) = [key for key, kind, _ in place.rows() if kind == "committed"]
    fs = list((place.folder / "sn/snapshots").glob("*/fs/more/hello"))
    assert [path.read_text() for path in fs] == ["hello"], name
