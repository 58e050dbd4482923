"""Save, restore, fall back, undo: in every form, by several processes, on hostile and damaged stores."""

import os
import shutil
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError
from snapshot.env.flow.save import install_and_save
from snapshot.env.format.entries import Entry, Kind
from snapshot.env.format.manifest import encode_manifest
from snapshot.env.key.interpreter import environment_of, find_python, probe
from snapshot.env.key.keys import key_of
from snapshot.env.node.cache import NodeCache
from snapshot.env.node.overlay import mounts_at, umount
from snapshot.env.node.tree import TreeHead
from snapshot.env.store.repository import ROOT
from tests.support.snapshot.env_builders import (
    INSTALL,
    SITE,
    a_repository,
    a_restorer,
    an_environment,
    an_installation,
    changes,
    contents,
    environment_at,
    remake,
    saved,
)

FORMS = ["mount", "link", "copy"]


@contextmanager
def unmounted_after(environment):
    """Take every overlay off when a test is over."""
    try:
        yield
    finally:
        for target in environment.targets:
            while mounts_at(target.path):
                umount(target.path, lazily=True)


def restored(folder, environment, key, form):
    """Restore in a form; skip where this machine cannot mount."""
    try:
        return a_restorer(environment, folder).restore(key, form)
    except UnavailableError as error:
        if form != "mount":
            raise
        pytest.skip(f"OVERLAY NOT TESTED: {error}")


@pytest.mark.parametrize("form", FORMS)
def test_a_restored_environment_is_what_the_command_left_and_undo_brings_the_old_one(
    tmp_path, form
):
    environment, manifest, held = saved(tmp_path)
    before = contents(environment)

    with unmounted_after(environment):
        done = restored(tmp_path, environment, manifest.head.key, form)

        assert (done.form, done.already) == (form, False)
        assert contents(environment) == held
        assert changes(environment, tmp_path, manifest.head.key) == []
        site = Path(environment.targets[1].path)
        assert not (site / "old.py").exists()
        assert not (site / "gone").exists()
        assert (site / "kept.py").read_text() == "KEPT = 1\n"
        with environment.locked():
            environment.clear(environment.heal())
        assert contents(environment) == before
        assert environment.records.read("record") is None


@pytest.mark.parametrize("form", FORMS)
def test_a_second_restore_finds_it_there(tmp_path, form):
    environment, manifest, held = saved(tmp_path)

    with unmounted_after(environment):
        restored(tmp_path, environment, manifest.head.key, form)
        again = restored(tmp_path, environment, manifest.head.key, form)

        assert again.already
        assert again.form == form
        assert contents(environment) == held


@pytest.mark.parametrize("form", FORMS)
def test_another_snapshot_replaces_the_first_and_sees_the_same_base(tmp_path, form):
    environment, first, _ = saved(tmp_path)
    other = INSTALL.replace("from the snapshot", "from the other")
    _, second, held = saved(tmp_path, other)
    assert first.head.key != second.head.key

    with unmounted_after(environment):
        restored(tmp_path, environment, first.head.key, form)
        restored(tmp_path, environment, second.head.key, form)

        assert contents(environment) == held
        record = environment.records.read("record")
        assert record.key == second.head.key
        assert record.base == first.head.document["base"]


def test_a_mounted_environment_cannot_be_written_and_shares_the_tree(tmp_path):
    environment, manifest, _ = saved(tmp_path)

    with unmounted_after(environment):
        restored(tmp_path, environment, manifest.head.key, "mount")
        site = Path(environment.targets[1].path)

        with pytest.raises(OSError, match="Read-only"):
            (site / "new").write_text("x")
        assert [mount.source for mount in mounts_at(str(site))] == [
            f"omniload-env:{manifest.head.key}"
        ]


def test_a_mount_that_is_in_use_is_not_taken_off_unless_lazily(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    before = contents(environment)

    with unmounted_after(environment):
        restored(tmp_path, environment, manifest.head.key, "mount")
        with (Path(environment.targets[1].path) / "kept.py").open():
            with environment.locked(), pytest.raises(StateError, match="is in use"):
                environment.clear(environment.heal())
            with environment.locked():
                environment.clear(environment.heal(), lazily=True)
        assert contents(environment) == before


def test_links_share_inodes_and_copies_do_not(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    file = Path(environment.targets[1].path) / "tree" / "__init__.py"

    a_restorer(environment, tmp_path).restore(manifest.head.key, "link")
    assert file.stat().st_nlink == 2

    remake(environment, tmp_path)
    a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")
    assert file.stat().st_nlink == 1


def test_where_nothing_can_be_mounted_files_are_linked(tmp_path, monkeypatch):
    environment, manifest, held = saved(tmp_path)

    def refuse(*_):
        raise UnavailableError("no")

    monkeypatch.setattr("snapshot.env.flow.restore.mount_overlay", refuse)
    done = a_restorer(environment, tmp_path).restore(manifest.head.key)

    assert done.form == "link"
    assert contents(environment) == held
    with environment.locked():
        environment.clear(environment.heal())
    with pytest.raises(UnavailableError):
        a_restorer(environment, tmp_path).restore(manifest.head.key, "mount")


def test_where_nothing_can_be_linked_files_are_copied(tmp_path, monkeypatch):
    environment, manifest, held = saved(tmp_path)

    def refuse(*_args, **_kwargs):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("snapshot.env.flow.restore.mount_overlay", _unavailable)
    monkeypatch.setattr(os, "link", refuse)

    assert a_restorer(environment, tmp_path).restore(manifest.head.key).form == "copy"
    assert contents(environment) == held


def _unavailable(*_):
    raise UnavailableError("no")


def test_a_key_without_a_snapshot_gives_nothing_and_changes_nothing(tmp_path):
    environment, _, _ = saved(tmp_path)
    before = contents(environment)

    assert a_restorer(environment, tmp_path).restore("0" * 64) is None
    assert contents(environment) == before


def test_without_a_snapshot_the_command_is_run_and_recorded_and_the_next_restores(tmp_path):
    environment = an_environment(tmp_path)
    installation = an_installation(environment)
    (tmp_path / "store").mkdir()

    first = a_restorer(environment, tmp_path).restore_or_install(installation, "")
    held = contents(environment)
    again = a_restorer(environment, tmp_path).restore_or_install(installation, "")
    remake(environment, tmp_path)
    other = a_restorer(environment, tmp_path).restore_or_install(installation, "", "copy")

    assert (first.form, first.saved) == ("command", True)
    assert (again.form, again.already) == ("command", True)
    assert (other.form, other.key) == ("copy", first.key)
    assert contents(environment).keys() >= held.keys()
    assert changes(environment, tmp_path, first.key) == []


def test_a_store_that_does_not_answer_is_no_reason_not_to_start(tmp_path):
    environment = an_environment(tmp_path)
    restorer = a_restorer(environment, tmp_path)
    restorer.opened = _unavailable

    done = restorer.restore_or_install(an_installation(environment), "")

    assert (done.form, done.saved) == ("command", False)
    assert (Path(environment.targets[1].path) / "tree" / "__init__.py").exists()


def test_a_node_that_has_the_tree_does_not_ask_the_store(tmp_path):
    environment, manifest, held = saved(tmp_path)
    a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")
    remake(environment, tmp_path)
    restorer = a_restorer(environment, tmp_path)
    restorer.opened = _unavailable

    assert restorer.restore(manifest.head.key, "copy").stored_bytes == 0
    assert contents(environment) == held


def test_a_command_that_fails_saves_nothing(tmp_path):
    environment = an_environment(tmp_path)
    installation = an_installation(environment, "raise SystemExit(7)")

    with a_repository(tmp_path / "store") as repository:
        with pytest.raises(StateError, match="ended with 7; nothing was saved"):
            install_and_save(environment, repository, installation)

        assert repository.all_keys() == []


def test_a_command_that_is_not_there_is_a_clear_fault(tmp_path):
    environment = an_environment(tmp_path)
    installation = an_installation(environment, command=("no-such-program",))

    with (
        a_repository(tmp_path / "store") as repository,
        pytest.raises(StateError, match="cannot be run"),
    ):
        install_and_save(environment, repository, installation)


def test_the_same_command_in_the_same_environment_is_not_saved_as_an_empty_change(tmp_path):
    environment = an_environment(tmp_path)
    script = "import sys; open(f'{sys.argv[1]}/lib/site-packages/x', 'w').close()"
    with a_repository(tmp_path / "store") as repository:
        install_and_save(environment, repository, an_installation(environment, script))

        with pytest.raises(StateError, match="by the same command before"):
            install_and_save(environment, repository, an_installation(environment, script))


def test_another_request_after_an_installation_has_the_installed_as_its_base(tmp_path):
    environment = an_environment(tmp_path)
    script = "import os, sys; os.mkdir(f'{sys.argv[1]}/lib/site-packages/' + sys.argv[2])"
    first = an_installation(environment, script)
    one = replace_words(first, "one-1.0.dist-info")
    two = replace_words(first, "two-1.0.dist-info")
    restorer = a_restorer(environment, tmp_path)
    (tmp_path / "store").mkdir()

    made = restorer.restore_or_install(one, "")
    with environment.locked():
        again, other = environment.document(one, ""), environment.document(two, "")

    assert key_of(again) == made.key
    assert again["base"] != other["base"]


def replace_words(installation, *words):
    return installation._replace(command=(*installation.command, *words))


def test_contents_that_the_store_has_are_not_stored_again(tmp_path):
    _, first, _ = saved(tmp_path)
    more = INSTALL + "put(f'{site}/tree/more.py', b'MORE = 1\\n')\n"
    environment, second, held = saved(tmp_path, more)

    assert second.head.stored_bytes < first.head.stored_bytes
    shared = set(first.contents) & set(second.contents)
    assert {first.contents[d].size_bytes for d in shared} >= {1_280_000}
    assert set(first.head.packs) < set(second.head.packs)
    a_restorer(environment, tmp_path).restore(second.head.key, "copy")
    assert contents(environment) == held


def test_twin_files_are_stored_once(tmp_path):
    _, manifest, _ = saved(tmp_path)

    files = [entry for entry in manifest.entries if entry.kind is Kind.FILE]
    assert len({entry.digest for entry in files}) == len(files) - 1


def test_two_saves_of_the_same_key_keep_the_first(tmp_path):
    _, first, _ = saved(tmp_path)
    _, second, _ = saved(tmp_path)

    assert first.head.key == second.head.key
    assert second.head.created_ns == first.head.created_ns


def test_a_file_larger_than_a_read_and_its_twin_come_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("snapshot.env.node.extraction.UNIT_BYTES", 1 << 20)
    script = (
        "import os, random, sys\n"
        "data = random.Random(1).randbytes(5_000_001)\n"
        "for name in ('large', 'twin'):\n"
        "    open(f'{sys.argv[1]}/lib/site-packages/{name}', 'wb').write(data)\n"
        "    os.chmod(f'{sys.argv[1]}/lib/site-packages/{name}', 0o600)\n"
    )
    environment, manifest, held = saved(tmp_path, script)

    done = a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")

    assert contents(environment) == held
    assert done.stored_bytes >= 5_000_001


def test_processes_that_restore_at_once_do_it_once(tmp_path):
    environment, manifest, held = saved(tmp_path)
    outcomes, start = [], threading.Barrier(6)

    def restore():
        start.wait()
        outcomes.append(a_restorer(environment, tmp_path).restore(manifest.head.key, "link"))

    threads = [threading.Thread(target=restore) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(done.already for done in outcomes) == [False] + [True] * 5
    assert sum(done.stored_bytes > 0 for done in outcomes) == 1
    assert contents(environment) == held


def test_environments_of_a_node_share_one_extraction(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    cache, reads = NodeCache(tmp_path / "cache"), []

    @contextmanager
    def counted():
        with a_repository(tmp_path / "store") as repository:
            yield repository
            reads.append(repository.bytes_read)

    for _ in range(2):
        remake(environment, tmp_path)
        restorer = a_restorer(environment, tmp_path)
        restorer.cache, restorer.opened = cache, counted
        restorer.restore(manifest.head.key, "link")

    assert len(reads) == 1


def test_a_file_changed_through_a_link_is_noticed_and_fetched_again(tmp_path):
    environment, manifest, held = saved(tmp_path)
    restorer = a_restorer(environment, tmp_path)
    restorer.restore(manifest.head.key, "link")
    (Path(environment.targets[1].path) / "tree" / "__init__.py").write_text("changed in place")

    again = restorer.restore(manifest.head.key, "link")

    assert not again.already
    assert contents(environment) == held


def _swap(path, link, *, same_time=False):
    seen = path.lstat()
    path.unlink()
    path.symlink_to(link)
    if same_time:
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns), follow_symlinks=False)


def _rot(path):
    seen, data = path.stat(), path.read_bytes()
    path.write_bytes(bytes(byte ^ 1 for byte in data))
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def _to_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("tree/__init__.py", lambda path: path.unlink()),
        ("base.py", lambda path: path.write_text("other")),
        ("base.py", _rot),
        ("tree/deep", lambda path: path.chmod(0o700)),
        ("old.py", lambda path: path.write_text("again")),
        ("tree/deep/er/link.bin", lambda path: _swap(path, "elsewhere")),
        ("tree/deep/er/link.bin", lambda path: _swap(path, "elsewhere", same_time=True)),
        ("tree/empty.txt", _to_folder),
    ],
    ids=["missing", "bytes", "rot", "mode", "returned", "link", "link's words", "kind"],
)
def test_what_is_not_as_in_the_snapshot_is_seen(tmp_path, path, change):
    environment, manifest, _ = saved(tmp_path)
    a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")
    change(Path(environment.targets[1].path) / path)

    assert changes(environment, tmp_path, manifest.head.key) == [path]


def hostile(folder, manifest, *entries):
    """Put a manifest with more entries in place of one on the store."""
    listed = {(e.target, e.path): e for e in (*manifest.entries, *entries)}
    changed = replace(manifest, entries=tuple(listed[place] for place in sorted(listed)))
    path = Path(folder) / "store" / ROOT / "manifests" / manifest.head.key
    path.write_bytes(encode_manifest(changed))


FILE = {"kind": Kind.FILE, "mode": 0o644, "mtime_ns": 1}


@pytest.mark.parametrize(
    "entry",
    [
        Entry(1, "../../../escaped", **FILE),
        Entry(1, "/escaped", **FILE),
        Entry(1, "l", Kind.LINK, link="/etc/passwd"),
        Entry(1, "l", Kind.LINK, link="../../../escaped"),
        Entry(1, "TREE", Kind.DIRECTORY, 0o755),
        Entry(1, "s", **{**FILE, "mode": 0o4755}),
        Entry(1, "base.py/x", **FILE),
        Entry(7, "x", **FILE),
    ],
    ids=["up", "absolute", "link out", "link up", "case", "set-uid", "below a file", "target"],
)
def test_a_hostile_snapshot_is_refused_before_anything_is_written(tmp_path, entry):
    environment, manifest, _ = saved(tmp_path)
    before = contents(environment)
    if entry.kind is Kind.FILE:
        known = next(e for e in manifest.entries if e.kind is Kind.FILE)
        entry = entry._replace(digest=known.digest, size_bytes=known.size_bytes)
    hostile(tmp_path, manifest, entry)

    with pytest.raises(IntegrityError):
        a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")

    assert contents(environment) == before
    assert not (tmp_path / "escaped").exists()
    assert not list((tmp_path / "cache" / "trees").iterdir())
    assert not list((tmp_path / "cache" / "partial").iterdir())


def test_a_link_in_the_environment_where_the_snapshot_has_a_directory_does_not_lead_a_write_out(
    tmp_path,
):
    environment, manifest, _ = saved(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    site = Path(environment.targets[1].path)
    (site / "tree").symlink_to(outside)

    a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")

    assert list(outside.iterdir()) == []
    assert (site / "tree" / "__init__.py").exists()
    assert not (site / "tree").is_symlink()


def test_a_snapshot_over_the_limit_is_refused(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    restorer = a_restorer(environment, tmp_path)
    restorer.limits = restorer.limits._replace(raw_bytes=1000)

    with pytest.raises(IntegrityError, match="more than 1000; raise the limit"):
        restorer.restore(manifest.head.key, "copy")


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    environment, manifest, _ = saved(tmp_path)
    monkeypatch.setattr(NodeCache, "free_bytes", lambda self: 10)

    with pytest.raises(StateError, match="has 10 bytes free"):
        a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")


def test_a_manifest_under_another_key_is_refused(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    folder = tmp_path / "store" / ROOT / "manifests"
    shutil.copy(folder / manifest.head.key, folder / ("1" * 64))

    with pytest.raises(IntegrityError, match="says that its key is"):
        a_restorer(environment, tmp_path).restore("1" * 64, "copy")


def test_a_manifest_with_the_document_of_another_key_is_refused(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    changed = replace(manifest, head=replace(manifest.head, document={"version": 1}))
    path = tmp_path / "store" / ROOT / "manifests" / manifest.head.key
    path.write_bytes(encode_manifest(changed))

    with pytest.raises(IntegrityError, match="document of another key"):
        a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")


def test_a_manifest_that_does_not_say_what_it_was_made_of_is_refused(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    document = {name: part for name, part in manifest.head.document.items() if name != "base"}
    head = replace(manifest.head, key=key_of(document), document=document)
    path = tmp_path / "store" / ROOT / "manifests" / head.key
    path.write_bytes(encode_manifest(replace(manifest, head=head)))

    with pytest.raises(IntegrityError, match="does not say what"):
        a_restorer(environment, tmp_path).restore(head.key, "copy")


def test_a_record_of_another_containers_mount_is_not_taken_for_ours(tmp_path):
    environment, first, _ = saved(tmp_path)
    _, second, held = saved(tmp_path, INSTALL.replace("from the snapshot", "from the other"))
    with unmounted_after(environment):
        restored(tmp_path, environment, first.head.key, "mount")
        record = environment.records.read("record")
        environment.records.write("record", replace(record, key=second.head.key))

        done = restored(tmp_path, environment, second.head.key, "mount")

        assert not done.already
        assert contents(environment) == held


def test_a_pack_that_is_gone_is_an_error_and_leaves_the_environment_alone(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    before = contents(environment)
    shutil.rmtree(tmp_path / "store" / ROOT / "packs")

    with pytest.raises(IntegrityError, match="is not in the store any more"):
        a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")

    assert contents(environment) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": "3.12.1"}, "interpreter.version"),
        ({"soabi": "cpython-312"}, "interpreter.soabi"),
        ({"libc": "musl"}, "interpreter.libc"),
    ],
)
def test_a_snapshot_of_another_interpreter_does_not_fit(tmp_path, change, named):
    environment, manifest, _ = saved(tmp_path)
    identity = {**environment.interpreter.identity, **change}
    interpreter = replace(environment.interpreter, identity=identity)
    other = replace(environment, interpreter=interpreter)

    with pytest.raises(StateError, match=named):
        a_restorer(other, tmp_path).restore(manifest.head.key, "copy")


def test_a_snapshot_of_another_prefix_does_not_fit(tmp_path):
    _, manifest, _ = saved(tmp_path)
    other = an_environment(tmp_path / "elsewhere")

    with pytest.raises(StateError, match="was made for prefix"):
        other.check_fits(TreeHead.of(manifest))


def test_special_files_are_named_and_left_out(tmp_path):
    script = "import os, sys; os.mkfifo(f'{sys.argv[1]}/lib/site-packages/pipe')\n" + INSTALL
    environment = an_environment(tmp_path)
    with a_repository(tmp_path / "store") as repository:
        manifest = install_and_save(environment, repository, an_installation(environment, script))

    assert [Path(path).name for path in manifest.head.skipped] == ["pipe"]
    assert all(entry.path != "pipe" for entry in manifest.entries)


def test_missing_byte_code_is_added_unless_not_wanted(tmp_path):
    for name, byte_code in (("with", True), ("without", False)):
        environment = an_environment(tmp_path / name)
        with a_repository(tmp_path / name / "store") as repository:
            manifest = install_and_save(
                environment, repository, an_installation(environment), byte_code=byte_code
            )
        compiled = [e.path for e in manifest.entries if e.path.startswith("tree/__pycache__/")]
        assert bool(compiled) is byte_code


def test_an_installation_is_not_undone(tmp_path):
    environment = an_environment(tmp_path)
    (tmp_path / "store").mkdir()
    a_restorer(environment, tmp_path).restore_or_install(an_installation(environment), "")

    with environment.locked(), pytest.raises(StateError, match="cannot be undone"):
        environment.clear(environment.heal())


def test_a_damaged_record_is_a_clear_fault(tmp_path):
    environment = an_environment(tmp_path)
    environment.records.folder.mkdir()
    (environment.records.folder / "record.json").write_text("{")

    with pytest.raises(StateError, match="is damaged"):
        environment.records.read("record")
    (environment.records.folder / "record.json").write_text('{"version": 2}')
    with pytest.raises(StateError, match="version 2"):
        environment.records.read("record")
    for text in ("[]", "null", '{"version": 1}', '{"version": 1, "moves": [1], "targets": []}'):
        (environment.records.folder / "record.json").write_text(text)
        with pytest.raises(StateError, match="is damaged"):
            environment.records.read("record")


def test_a_node_cache_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)

    with pytest.raises(ConfigError, match="may be written by"):
        NodeCache(tmp_path / "cache")


def test_an_interpreter_tells_about_itself_the_same_in_and_out_of_process():
    inside = probe(sys.executable)
    folder, name = os.path.split(sys.executable)
    outside = probe(f"{folder}/./{name}")

    assert inside.identity == outside.identity
    assert inside.targets == outside.targets
    assert environment_of(inside, {"PATH": "/x"})["PATH"].endswith(":/x")
    assert find_python(inside.prefix, {}).startswith(inside.prefix)


def test_site_packages_are_where_the_builders_say(tmp_path):
    environment = an_environment(tmp_path)

    assert [target.name for target in environment.targets] == ["bin", SITE]
    assert environment_at(environment.interpreter.prefix).targets == environment.targets


@pytest.mark.parametrize("form", ["link", "copy"])
def test_a_form_that_cannot_be_had_leaves_the_snapshot_in_the_form_it_has(
    tmp_path, monkeypatch, form
):
    environment, manifest, held = saved(tmp_path)
    restorer = a_restorer(environment, tmp_path)
    restorer.restore(manifest.head.key, form)
    monkeypatch.setattr("snapshot.env.flow.restore.mount_overlay", _unavailable)

    with pytest.raises(UnavailableError):
        restorer.restore(manifest.head.key, "mount")

    assert contents(environment) == held
    assert environment.records.read("record").form == form
    with environment.locked():
        environment.clear(environment.heal())
    assert environment.records.read("record") is None
