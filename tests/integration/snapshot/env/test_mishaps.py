"""What goes wrong around a restore: full disks, trees in use, other users, stores that were mended."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError
from snapshot.env.key.interpreter import find_python, probe
from snapshot.env.node.cache import SHARED, NodeCache, exclusively, together
from snapshot.env.node.overlay import mount_overlay, mounts_at, umount
from snapshot.env.node.tree import discard
from snapshot.env.store.repository import ROOT
from snapshot.env.target.records import Records
from tests.support.fusefs.model import fast_directory
from tests.support.programs import finished
from tests.support.snapshot.env_builders import (
    a_repository,
    a_restorer,
    an_environment,
    an_installation,
    contents,
    environment_at,
    remake,
    saved,
)

pytestmark = pytest.mark.slow

NOBODY = 65534


@pytest.fixture
def mounting(tmp_path):
    """Whether overlays can be mounted; what is left of them is taken off at the end."""
    environment, manifest, _ = saved(tmp_path / "probe")
    a_restorer(environment, tmp_path / "probe").restore(manifest.head.key)
    able = any(mounts_at(target.path) for target in environment.targets)
    yield able
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    for path in (line.split(" ")[4] for line in lines if f" {tmp_path}" in line):
        umount(path, lazily=True)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of a mebibyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
    if subprocess.run(words, check=False, capture_output=True).returncode != 0:
        pytest.skip("FULL DISK NOT TESTED: no tmpfs can be mounted here; run as root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def needs(able):
    if not able:
        pytest.skip("OVERLAY NOT TESTED: it cannot be mounted here; run as root")


def test_a_form_that_is_asked_for_replaces_another_one(tmp_path, mounting):
    needs(mounting)
    environment, manifest, held = saved(tmp_path)
    restorer, key = a_restorer(environment, tmp_path), manifest.head.key
    for form in ("mount", "link", "copy", "mount"):
        restored = restorer.restore(key, form)

        assert (restored.form, restored.already) == (form, False)
        assert contents(environment) == held
    assert restorer.restore(key, "auto").already


def test_a_restore_that_knows_of_fewer_targets_takes_off_every_mount(tmp_path, mounting):
    needs(mounting)
    environment, manifest, _ = saved(tmp_path)
    a_restorer(environment, tmp_path).restore(manifest.head.key, "mount")
    fewer = environment_at(environment.interpreter.prefix)
    fewer = type(fewer)(fewer.interpreter, fewer.targets[:1], fewer.records)

    with fewer.locked():
        record = fewer.heal()
        assert record.key == manifest.head.key
        fewer.clear(record)

    assert [mounts_at(target.path) for target in environment.targets] == [[], []]


def test_a_tree_that_is_dropped_stays_under_the_mounts_that_show_it(tmp_path, mounting):
    needs(mounting)
    environment, manifest, held = saved(tmp_path)
    restorer, key = a_restorer(environment, tmp_path), manifest.head.key
    restorer.restore(key, "mount")

    restorer.cache.drop(key)

    assert restorer.cache.tree(key) is None
    assert contents(environment) == held
    left = list((restorer.cache.folder / "partial").iterdir())
    assert len(left) == 1
    (left[0] / "mounted").write_text("another start of the kernel")
    restorer.cache.drop(key)
    assert list((restorer.cache.folder / "partial").iterdir()) == []


def test_a_tree_without_marks_of_deletions_is_not_mounted(tmp_path, monkeypatch):
    environment, manifest, held = saved(tmp_path)

    def mknod(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.mknod", mknod)

    restored = a_restorer(environment, tmp_path).restore(manifest.head.key)

    assert restored.form == "link"
    assert contents(environment) == held
    tree = NodeCache(tmp_path / "cache").tree(manifest.head.key)
    with pytest.raises(UnavailableError, match="cannot be marked"):
        mount_overlay(tree, 1, environment.targets[1].path, manifest.head.key)


def test_a_tree_that_is_used_is_not_dropped_by_another_restore(tmp_path):
    environment, manifest, held = saved(tmp_path)
    restorer, key = a_restorer(environment, tmp_path), manifest.head.key
    restorer.restore(key, "link")
    lock, done = restorer.cache.lock(key), threading.Event()
    file = Path(environment.targets[1].path) / "tree" / "__init__.py"
    file.write_text("written in place, so in the tree as well")

    def restores():
        a_restorer(environment, tmp_path).restore(key, "link")
        done.set()

    with together(lock):
        thread = threading.Thread(target=restores)
        thread.start()
        thread.join(0.2)
        assert (restorer.cache.folder / "trees" / key).exists()
        assert not done.is_set()
    thread.join()

    assert contents(environment) == held


def test_users_of_a_lock_share_it_and_keep_an_exclusive_one_out(tmp_path):
    order = []

    def alone():
        with exclusively(tmp_path / "lock"):
            order.append("alone")

    thread = threading.Thread(target=alone)
    with together(tmp_path / "lock"), together(tmp_path / "lock"):
        thread.start()
        thread.join(0.1)
        order.append("together")
    thread.join()

    assert order == ["together", "alone"]


def test_a_full_node_cache_is_emptied_again_and_the_environment_left_alone(tmp_path, small_disk):
    environment, manifest, _ = saved(tmp_path)
    before = contents(environment)
    restorer = a_restorer(environment, tmp_path)
    restorer.cache = NodeCache(small_disk / "cache")
    restorer.cache.free_bytes = lambda: 1 << 40  # as if it filled up only meanwhile

    with pytest.raises(OSError, match="No space left") as caught:
        restorer.restore(manifest.head.key, "copy")

    assert str(small_disk) in str(caught.value.filename)
    assert list((small_disk / "cache" / "partial").iterdir()) == []
    assert contents(environment) == before


def test_a_full_environment_keeps_what_it_held_and_no_stage(small_disk, tmp_path):
    environment = an_environment(small_disk)
    (tmp_path / "store").mkdir()
    script = "import sys; open(f'{sys.argv[1]}/lib/site-packages/x', 'wb').write(bytes(700 << 10))"
    made = a_restorer(environment, tmp_path).restore_or_install(
        an_installation(environment, script), ""
    )
    remake(environment, small_disk)
    before = contents(environment)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(600 << 10))

    with pytest.raises(OSError, match="No space left"):
        a_restorer(environment, tmp_path).restore(made.key, "copy")

    assert contents(environment) == before
    for target in environment.targets:
        assert not (Path(target.path) / ".omniload-env").exists()
    filler.unlink()
    assert a_restorer(environment, tmp_path).restore(made.key, "copy").form == "copy"


def test_a_store_that_is_full_is_no_reason_not_to_start(tmp_path, small_disk):
    environment = an_environment(tmp_path)
    restorer = a_restorer(environment, tmp_path)
    restorer.opened = lambda: a_repository(small_disk)
    script = "import os, sys; open(f'{sys.argv[1]}/lib/site-packages/x', 'wb').write(os.urandom(2 << 20))"

    done = restorer.restore_or_install(an_installation(environment, script), "")
    again = restorer.restore_or_install(an_installation(environment, script), "")

    assert (done.form, done.saved) == ("command", False)
    assert (again.form, again.key) == ("command", done.key)


@pytest.mark.parametrize("damage", ["pack", "manifest", "no pack"])
def test_the_remedy_for_a_damaged_store_mends_it(tmp_path, damage):
    environment, manifest, held = saved(tmp_path)
    key, store = manifest.head.key, tmp_path / "store" / ROOT
    (pack,) = (store / "packs").iterdir()
    if damage == "pack":
        data = bytearray(pack.read_bytes())
        data[40] ^= 255
        pack.write_bytes(data)
    elif damage == "manifest":
        (store / "manifests" / key).write_bytes(b"OMNIENV\0 and no more")
    else:
        pack.unlink()
    with pytest.raises(IntegrityError) as caught:
        a_restorer(environment, tmp_path).restore(key, "copy")
    if damage == "pack":
        told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        assert f"remove {ROOT}/packs/{pack.name} from the store" in told
        pack.unlink()

    _, again, held = saved(tmp_path)

    assert again.head.key == key
    a_restorer(environment, tmp_path).restore(key, "copy")
    assert contents(environment) == held


def test_a_snapshot_with_more_targets_is_told_as_such_before_it_is_fetched(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    fewer = type(environment)(environment.interpreter, environment.targets[:1], environment.records)

    with pytest.raises(StateError, match=r"made for targets .*give the same --target"):
        a_restorer(fewer, tmp_path).restore(manifest.head.key, "copy")

    assert list((tmp_path / "cache" / "trees").iterdir()) == []


def test_a_command_that_changes_nothing_is_not_recorded_by_a_restore(tmp_path):
    environment = an_environment(tmp_path)
    (tmp_path / "store").mkdir()
    restorer = a_restorer(environment, tmp_path)
    installation = an_installation(environment, "pass")

    first = restorer.restore_or_install(installation, "")
    again = restorer.restore_or_install(installation, "")

    assert (first.saved, again.saved, again.key) == (False, False, first.key)
    with a_repository(tmp_path / "store") as repository:
        assert repository.all_keys() == []


def test_a_snapshot_over_what_was_installed_here_keeps_its_own_base(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    installed = "import os, sys; os.mkdir(f'{sys.argv[1]}/lib/site-packages/x-1.0.dist-info')"
    restorer = a_restorer(environment, tmp_path)
    restorer.restore_or_install(an_installation(environment, installed), "")

    restorer.restore(manifest.head.key, "copy")

    record = environment.records.read("record")
    assert record.base["installed"] != manifest.head.document["base"]["installed"]


def test_a_command_dies_with_the_process_that_saves(tmp_path):
    environment = an_environment(tmp_path)
    script = "import os, sys; print(os.getpid(), file=sys.stderr, flush=True); sys.stdin.read()"
    driver = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from snapshot.env.flow.save import capture\n"
        "from tests.support.snapshot.env_builders import an_installation, environment_at\n"
        "environment = environment_at(sys.argv[2])\n"
        "capture(environment.interpreter, environment.targets, an_installation(environment, sys.argv[3]))"
    )
    words = [sys.executable, "-c", driver, Path(__file__).parents[4]]
    saver = subprocess.Popen(
        [*words, environment.interpreter.prefix, script],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child = os.pidfd_open(int(saver.stderr.readline()))
    saver.kill()
    saver.wait()

    # The pipe of its standard input is still open here: it ends by the signal alone.
    assert saver.stderr.read() == ""
    os.close(child)
    saver.stdin.close()
    saver.stderr.close()


NOBODYS = """
import json, os, sys
import encodings.ascii, encodings.utf_8_sig, encodings.latin_1
root, home, roots, key = sys.argv[1:]
sys.path.insert(0, root)
from tests.support.snapshot import env_builders as builders
from snapshot.env.flow import save
from snapshot.env.node import cache, extraction
from snapshot.env.target import environment, moves
# Imported before, since nobody may not read an interpreter below /root.
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)

script = '''
cd "$1/lib/site-packages"
mkdir closed
echo 1 > closed/file
ln -s closed/file link
echo changed > base.py
rm old.py
chmod 555 closed
chmod 444 closed/file
'''

def the_environment():
    environment = builders.an_environment(home)
    command = ("sh", "-c", script, "sh", environment.interpreter.prefix)
    return environment, builders.an_installation(environment, command=command)

environment, installation = the_environment()
before = builders.contents(environment)
made = builders.a_restorer(environment, home).restore_or_install(installation, "")
held = builders.contents(environment)
found = {"saved": made.saved, "forms": [], "same": [], "undone": []}
builders.discard(environment.interpreter.prefix)
environment, installation = the_environment()
restorer = builders.a_restorer(environment, home)
for form in ("auto", "copy", "link"):
    found["forms"].append(restorer.restore(made.key, form).form)
    found["same"].append(builders.contents(environment) == held)
with environment.locked():
    environment.clear(environment.heal())
found["undone"].append(builders.contents(environment) == before)
restorer.cache.drop(made.key)
found["left"] = sum(len(os.listdir(restorer.cache.folder / name)) for name in ("trees", "partial"))

# Another environment, a tree that root extracted.
environment = builders.environment_at(roots + "/prefix")
restorer = builders.a_restorer(environment, roots)
found["forms"].append(restorer.restore(key, "auto").form)
found["roots"] = sorted(builders.contents(environment))
try:
    restorer.cache.tree(key).mark_linked()
except PermissionError:
    found["closed"] = True
print(json.dumps(found))
"""


@pytest.fixture
def open_folder():
    """A folder that others may look into; those of pytest are closed to them."""
    folder = fast_directory("omniload-env-")
    folder.chmod(0o755)
    yield folder
    discard(folder)


def test_a_user_without_rights_saves_restores_and_undoes(open_folder):
    if os.geteuid() != 0:
        pytest.skip("OTHER USER NOT TESTED: nobody can be become; run as root")
    home, roots = open_folder / "home", open_folder / "roots"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    (roots / "cache").mkdir(parents=True)
    (roots / "cache" / SHARED).touch()
    environment, manifest, held = saved(roots)
    a_restorer(environment, roots).restore(manifest.head.key, "copy")
    held = sorted(contents(environment))
    remake(environment, roots)
    subprocess.run(["chown", "-R", str(NOBODY), environment.interpreter.prefix], check=True)

    words = [Path(__file__).parents[4], home, roots, manifest.head.key]
    done = finished([sys.executable, "-c", NOBODYS, *words], limit_s=240, cwd="/")

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found == {
        "saved": True,
        "forms": ["link", "copy", "link", "copy"],
        "same": [True, True, True],
        "undone": [True],
        "left": 0,
        "roots": held,
        "closed": True,
    }


def test_something_that_is_no_interpreter_is_a_clear_fault(tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho not json\n")
    script.chmod(0o755)

    with pytest.raises(ConfigError, match="cannot be asked about itself"):
        probe(str(script))
    script.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ConfigError, match="cannot be asked about itself"):
        probe(str(script))


def test_an_environment_behind_a_closed_folder_is_told(monkeypatch, tmp_path):
    def is_dir(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", is_dir)

    with pytest.raises(ConfigError, match="may not look there"):
        find_python(str(tmp_path))


def test_a_prefix_of_any_bytes_has_a_key_and_is_restored(tmp_path):
    folder = tmp_path / os.fsdecode(b"a b,c:d\\ \xff")
    folder.mkdir()
    environment, manifest, held = saved(folder)
    restorer = a_restorer(environment, folder)

    for form in ("auto", "copy"):
        restorer.restore(manifest.head.key, form)
        assert contents(environment) == held
    with environment.locked():
        environment.clear(environment.heal())
    assert "\\udcff" in manifest.head.document["prefix"]


def test_a_target_of_two_environments_belongs_to_the_one_that_restored_into_it(tmp_path):
    environment, manifest, held = saved(tmp_path)
    before = contents(environment)
    a_restorer(environment, tmp_path).restore(manifest.head.key, "link")
    other = type(environment)(
        environment.interpreter, environment.targets, Records(str(tmp_path / "other"))
    )
    (tmp_path / "other").mkdir()

    with pytest.raises(StateError, match=r"restored for .*take it off with umount"):
        a_restorer(other, tmp_path).restore(manifest.head.key, "copy")

    assert contents(environment) == held
    with environment.locked():
        environment.clear(environment.heal())
    assert contents(environment) == before
    assert a_restorer(other, tmp_path).restore(manifest.head.key, "copy").form == "copy"
