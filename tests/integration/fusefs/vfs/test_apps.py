"""Programs people use, on the mount: rsync, pip, git, sqlite, tar, torch; what a database costs; who may enter."""

import contextlib
import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path

import orjson
import pytest

from fusefs.mounts.lifecycle import MountConfig, start
from fusefs.stores.local.store import LocalStore
from fusefs.tools.fsck import verify
from fusefs.tree.namespace import StripedFiles
from tests.support.fusefs.model import fast_directory
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT, ProvenMount, proven_mount, without
from tests.support.fusefs.unprivileged import NOBODY, run_unprivileged

pytestmark = [pytest.mark.fuse, pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT)]
DATA = os.urandom(300_000)
GIT = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"]


@pytest.fixture(scope="module")
def mounted():
    with proven_mount(files={"striping": {"unit": 65536, "count": 3}, "plain_limit": 65536}) as it:
        yield it


@pytest.fixture
def folder(mounted, request):
    yield mounted.folder(request.node.name.replace("/", "-"))
    mounted.check()


def a_tree(root):
    """Files of many sizes, modes and times, links, and an empty directory."""
    (root / "deep/er").mkdir(parents=True)
    (root / "empty").mkdir()
    for i, size in enumerate([0, 1, 4095, 65_536, 65_537, 200_000, 300_000]):
        path = root / ("deep/er" if i % 2 else ".") / f"f{i}"
        path.write_bytes(DATA[:size])
        path.chmod(0o640 if i % 3 else 0o755)
        os.utime(path, (1_700_000_000 + i, 1_700_000_000 + i))
    (root / "link").symlink_to("deep/er/f1")
    return root


@pytest.mark.skipif(**without("rsync"))
def test_rsync_copies_a_tree_and_finds_nothing_to_do_the_second_time(mounted, folder, tmp_path):
    source = a_tree(tmp_path)

    first = mounted.run("rsync", "-a", "--stats", f"{source}/", f"{folder}/copy/")
    second = mounted.run(
        "rsync", "-a", "--stats", "--itemize-changes", f"{source}/", f"{folder}/copy/"
    )
    compared = mounted.run("rsync", "-anc", "--itemize-changes", f"{source}/", f"{folder}/copy/")

    assert "regular files transferred: 7" in first
    assert "regular files transferred: 0" in second
    assert "Literal data: 0 bytes" in second
    assert compared == ""
    assert "." not in {line[:1] for line in second.splitlines()}


COPIES = {
    "rsync": ["rsync", "-aX", "{source}/", "{target}/"],
    "cp": ["cp", "-a", "{source}", "{target}"],
    "tar": ["sh", "-c", "mkdir {target} && tar -C {source} -cf - . | tar -C {target} -xpf -"],
}


@pytest.mark.skipif(**without("rsync"))
@pytest.mark.parametrize("how", COPIES)
def test_modes_and_times_of_directories_are_kept_over_a_remount(how, tmp_path):
    source = a_tree(tmp_path)
    for name, mode in (("empty", 0o700), ("deep/er", 0o2750), ("deep", 0o1777), (".", 0o711)):
        (source / name).chmod(mode)
        os.utime(source / name, ns=(10**18, 10**18 + len(name)))
    os.setxattr(source / "deep", "user.origin", b"tape")
    with proven_mount() as mounted:
        target = mounted.root / "copy"
        mounted.run(*[word.format(source=source, target=target) for word in COPIES[how]])
        mounted.remount()

        compared = mounted.run("rsync", "-anci", f"{source}/", f"{target}/")
        if how != "tar":  # which keeps no extended attributes unless told
            assert os.getxattr(target / "deep", "user.origin") == b"tape"

        assert compared == ""
        mounted.check()


def a_wheel(folder):
    """A pure Python wheel, made without a network or a build backend."""
    wheel = folder / "tinything-1.0-py3-none-any.whl"
    info = "tinything-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinything/__init__.py", "from tinything.deep import answer\n")
        archive.writestr("tinything/deep.py", "def answer():\n    return 42\n")
        archive.writestr("tinything/big.bin", DATA)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_pip_installs_a_wheel_and_python_imports_it_from_there(mounted, folder, tmp_path):
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-index",
    ]

    mounted.run(*pip, "--root-user-action=ignore", "--target", folder / "site", a_wheel(tmp_path))
    said = mounted.run(
        sys.executable, "-c", "import tinything; print(tinything.__file__, tinything.answer())",
        env={**os.environ, "PYTHONPATH": str(folder / "site")},
    )  # fmt: skip

    assert said.split() == [str(folder / "site/tinything/__init__.py"), "42"]
    assert (folder / "site/tinything/big.bin").read_bytes() == DATA
    assert list((folder / "site/tinything/__pycache__").iterdir())


@pytest.mark.skipif(**without("git"))
def test_git_clones_commits_branches_packs_and_finds_its_objects_whole(mounted, folder, tmp_path):
    origin = a_tree(tmp_path)
    mounted.run(*GIT, "init", "-q", ".", cwd=origin)
    mounted.run(*GIT, "add", ".", cwd=origin)
    mounted.run(*GIT, "commit", "-qm", "one", cwd=origin)

    mounted.run(*GIT, "clone", "-q", origin, folder / "clone")
    clone = folder / "clone"
    for turn in range(3):
        mounted.run(*GIT, "checkout", "-qb", f"branch-{turn}", cwd=clone)
        (clone / "f0").write_bytes(DATA[turn : turn + 90_000])
        mounted.run(*GIT, "commit", "-qam", f"turn {turn}", cwd=clone)
    mounted.run(*GIT, "gc", "-q", "--prune=now", cwd=clone)
    mounted.run(*GIT, "checkout", "-q", "main", cwd=clone)

    assert mounted.run(*GIT, "fsck", "--full", cwd=clone).count("error") == 0
    assert mounted.run(*GIT, "status", "--porcelain", cwd=clone) == ""
    assert mounted.run(*GIT, "show", "branch-2:f0", cwd=clone, errors="replace")
    assert (clone / "deep/er/f5").read_bytes() == DATA[:200_000]


@pytest.mark.skipif(**without("tar"))
def test_tar_packs_on_the_mount_and_unpacks_what_it_packed(mounted, folder, tmp_path):
    source = a_tree(tmp_path)

    mounted.run("tar", "-czf", folder / "a.tar.gz", "-C", source, ".")
    (folder / "out").mkdir()
    mounted.run("tar", "-xpzf", folder / "a.tar.gz", "-C", folder / "out", "--no-same-owner")

    mounted.run("diff", "-r", source, folder / "out")
    assert (folder / "out/f0").stat().st_mode & 0o777 == 0o755
    assert (folder / "out/f4").stat().st_mtime == 1_700_000_004


@pytest.mark.parametrize("mode", ["delete", "truncate", "persist", "memory", "off", "wal"])
def test_sqlite_keeps_what_it_committed_in_every_journal_mode(folder, mode):
    db = sqlite3.connect(folder / "db")
    assert db.execute(f"pragma journal_mode={mode}").fetchone() == (mode,)
    db.execute("create table t (k integer primary key, v blob)")
    for turn in range(5):
        with db:
            rows = [(turn * 100 + i, DATA[i : i + 900]) for i in range(100)]
            db.executemany("insert into t values (?, ?)", rows)
    with db:
        db.execute("update t set v = zeroblob(50) where k % 7 = 0")
    db.close()

    again = sqlite3.connect(folder / "db")
    assert again.execute("pragma integrity_check").fetchone() == ("ok",)
    assert again.execute("select count(*), sum(length(v) = 50) from t").fetchone() == (500, 72)
    again.close()


HOLDER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("begin exclusive"); db.execute("insert into t values (1)")
print("held", flush=True); sys.stdin.readline(); db.execute("commit"); print("done", flush=True)
"""


def test_sqlites_locks_hold_between_processes_of_one_mount(folder):
    db = sqlite3.connect(folder / "db", timeout=0)
    db.execute("create table t (v)")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder / "db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"

    with pytest.raises(sqlite3.OperationalError, match="locked"):
        db.execute("select * from t").fetchall()
    said, _ = holder.communicate("go on\n", timeout=60)

    assert said == "done\n"
    assert db.execute("select * from t").fetchall() == [(1,)]
    db.close()


def test_a_commit_to_a_large_database_writes_what_it_changed(mounted, folder):
    db = sqlite3.connect(folder / "db")
    with db:
        db.execute("create table t (k integer primary key, v blob)")
        db.executemany("insert into t values (?, zeroblob(4000))", [(i,) for i in range(4000)])
    size, before = (folder / "db").stat().st_size, written(mounted)
    assert size > 16e6

    for k in range(0, 4000, 400):
        with db:
            db.execute("update t set v = ? where k = ?", (DATA[:4000], k))
    db.close()

    # Ten commits: each a journal and a few granules of 64 KiB, not 16 MB.
    assert written(mounted) - before < size / 2
    again = sqlite3.connect(folder / "db")
    assert again.execute("pragma integrity_check").fetchone() == ("ok",)
    assert again.execute("select count(*) from t where v = ?", (DATA[:4000],)).fetchone() == (10,)
    again.close()


def written(mounted):
    """Bytes the daemon has written, to the store and to its spools, by the kernel's count."""
    lines = Path(f"/proc/{mounted.process.pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def test_torch_saves_and_loads_its_tensors(folder):
    torch = pytest.importorskip("torch", reason="torch is an extra of its own")
    state = {f"layer{i}": torch.arange(i * 10_000, dtype=torch.float32) for i in range(6)}

    torch.save(state, folder / "model.pt")
    loaded = torch.load(folder / "model.pt", weights_only=True)
    huge_page_buffer = torch.load(folder / "model.pt", weights_only=True, mmap=True)

    assert loaded.keys() == huge_page_buffer.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert all(torch.equal(huge_page_buffer[name], tensor) for name, tensor in state.items())


def test_what_is_open_when_the_daemon_is_told_to_end_is_kept_as_it_is_then():
    base = fast_directory("fusefs-term-")
    mounted = ProvenMount(base)
    (mounted.root / "db").write_bytes(bytes(3 << 20))
    log = (mounted.root / "log").open("wb", buffering=0)
    log.write(b"line\n" * 100)
    db = (mounted.root / "db").open("r+b", buffering=0)
    db.seek(1 << 20)
    db.write(b"row")

    mounted.end()

    for file in (log, db):
        with pytest.raises(OSError, match=r"not connected|aborted"):
            file.write(b"too late")
        with contextlib.suppress(OSError):
            file.close()
    files = StripedFiles(LocalStore(base / "store"))
    with files.open("log") as file:
        assert bytes(file.reader.read(0, 1000)) == b"line\n" * 100
    with files.open("db") as file:
        assert bytes(file.reader.read((1 << 20) - 1, 5)) == b"\0row\0"
    files.close()
    shutil.rmtree(base)


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from fusefs.mounts.lifecycle import mount
base = Path(sys.argv[1])
with mount(str(base / "store"), base / "mnt") as root:
    (root / "d").mkdir()
    (root / "d/f").write_bytes(os.urandom(3 << 20))
    (root / "d/f").rename(root / "f")
    with (root / "f").open("r+b") as file:
        file.seek(5)
        file.write(b"mine")
    assert (root / "f").read_bytes()[5:9] == b"mine"
    assert (root / "f").stat().st_uid == os.getuid()
    print("up", flush=True)
    sys.stdin.readline()
assert not os.path.ismount(base / "mnt")
print("down", flush=True)
"""


@pytest.fixture
def of_nobody():
    base = fast_directory("fusefs-nobody-")
    for folder in (base, base / "store", base / "mnt"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        if NOBODY:
            os.chown(folder, 65534, 65534)
    yield base
    shutil.rmtree(base, ignore_errors=True)


def test_a_user_without_rights_mounts_works_and_unmounts_and_nobody_else_gets_in(of_nobody):
    def nobody_else():
        if NOBODY:  # we are somebody else, and root at that
            with pytest.raises(PermissionError):
                (of_nobody / "mnt/f").read_bytes()

    log = run_unprivileged(UNPRIVILEGED, of_nobody, nobody_else)

    assert "defect" not in log
    files = StripedFiles(LocalStore(of_nobody / "store"))
    assert verify(files, read_data=True, grace_s=0).faults == []
    assert [info.name for info in files.listing("")] == ["d", "f"]
    files.close()


def test_what_one_mount_holds_open_for_change_survives_what_the_other_publishes(mounted, folder):
    """Two mounts change one file: the last close wins, or says ESTALE; the store stays whole."""
    (folder / "f").write_bytes(DATA)
    place = fast_directory("fusefs-second-")
    process = start(MountConfig(store=mounted.store, mountpoint=str(place)), log_path=os.devnull)
    other = place / folder.name / "f"
    here = (folder / "f").open("r+b", buffering=0)
    here.seek(100)
    here.write(b"here")
    other.write_bytes(DATA[::-1])

    expected = DATA[:100] + b"here" + DATA[104:]
    # Where the first says so, the other does too: what was written is still not published.
    for publish in (lambda: os.fsync(here.fileno()), here.close):
        try:
            publish()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            expected = DATA[::-1]

    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    place.rmdir()
    found = (folder / "f").read_bytes()
    assert orjson.loads(os.getxattr(folder / "f", "user.omnifs.layout"))["size_bytes"] == len(DATA)
    assert found == expected
