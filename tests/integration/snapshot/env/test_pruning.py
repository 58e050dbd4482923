"""Pruning of stores and node caches: what is used stays, what is not goes, whoever works or dies meanwhile."""

import json
import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from fusefs.stores.local.store import LocalStore
from omniload.base.errors import ConfigError, OmniloadError, StateError
from snapshot.commands.env import command
from snapshot.env.flow.save import capture, install_and_save, save
from snapshot.env.format.entries import Kind
from snapshot.env.node.cache import CACHE_VARIABLE, NodeCache, locked_now, prune_cache, together
from snapshot.env.node.overlay import keys_mounted, mount_source, mounts_at
from snapshot.env.store.repository import CONDEMNED, MANIFESTS, PACKS, Repository, prune_store
from tests.support.snapshot.env_builders import (
    a_repository,
    a_restorer,
    an_installation,
    contents,
    remake,
    saved,
)

pytestmark = pytest.mark.slow

DAY_S, HOUR_NS = 86400.0, 3600 * 10**9
LATER = int(3 * DAY_S * 1e9)
OTHER = """
import sys
site = f"{sys.argv[1]}/lib/site-packages"
open(f"{site}/other.py", "wb").write(bytes(range(256)) * 900)
"""


def names_in(folder, where):
    path = Path(folder) / "store" / where
    return {each.name for each in path.iterdir()} if path.exists() else set()


def prune(folder, *keys, after_ns=0, **changes):
    with a_repository(Path(folder) / "store") as repository:
        now_ns = time.time_ns() + after_ns
        return prune_store(repository, keys, **{"grace_s": DAY_S, "now_ns": now_ns, **changes})


@pytest.fixture
def two(tmp_path):
    """A store of two snapshots in a pack of their own, and the environment of both."""
    environment, first, _ = saved(tmp_path)
    with a_repository(tmp_path / "store") as repository:
        second = install_and_save(
            environment, repository, an_installation(environment, OTHER), byte_code=False
        )
    remake(environment, tmp_path)
    assert not set(first.head.packs) & set(second.head.packs)
    return tmp_path, environment, first, second


def test_packs_of_a_removed_snapshot_go_a_grace_after_they_were_condemned(two):
    folder, environment, first, second = two

    gone = prune(folder, second.head.key)
    held_back = prune(folder, after_ns=HOUR_NS)
    condemned = prune(folder, after_ns=LATER)
    (mark,) = names_in(folder, CONDEMNED)
    waiting = prune(folder, after_ns=HOUR_NS)
    removed = prune(folder, after_ns=LATER)

    assert gone.snapshots == (second.head.key,)
    assert names_in(folder, MANIFESTS) == {first.head.key}
    assert held_back.verdict == ((), (), ())
    assert condemned.verdict == ((), second.head.packs, ())
    assert (mark,) == second.head.packs
    assert waiting.verdict.removed == ()
    assert removed.verdict == (second.head.packs, (), ())
    assert removed.freed_bytes > 0
    assert names_in(folder, PACKS) == set(first.head.packs)
    assert names_in(folder, CONDEMNED) == set()
    assert a_restorer(environment, folder).restore(first.head.key, "copy").form == "copy"


def test_a_dry_run_tells_the_same_and_does_nothing(two):
    folder, _, first, second = two

    told = prune(folder, second.head.key, after_ns=LATER, act=False)

    assert told.verdict.condemned == second.head.packs
    assert names_in(folder, MANIFESTS) == {first.head.key, second.head.key}
    assert names_in(folder, CONDEMNED) == set()


def test_a_save_does_not_rely_on_a_condemned_pack_and_pardons_nothing(two):
    folder, environment, first, _ = two
    prune(folder, first.head.key, after_ns=LATER)
    assert names_in(folder, CONDEMNED) == set(first.head.packs)

    with a_repository(folder / "store") as repository:
        again = install_and_save(
            environment, repository, an_installation(environment), byte_code=False
        )

    assert again.head.key == first.head.key
    assert not set(again.head.packs) & set(first.head.packs)
    assert prune(folder, after_ns=LATER).verdict.removed == first.head.packs
    remake(environment, folder)
    assert a_restorer(environment, folder, "another").restore(again.head.key, "copy").form == "copy"


def test_a_save_that_relied_on_what_is_condemned_meanwhile_is_told_to_begin_again(two):
    folder, environment, first, _ = two
    installation = an_installation(environment)
    with a_repository(folder / "store") as repository, environment.locked():
        document = environment.document(installation, "another image")
        captured = capture(
            environment.interpreter, environment.targets, installation, byte_code=False
        )
        found = repository.known_contents

        def condemned_after(wanted):
            known = found(wanted)
            assert {each.pack for each in known.values()} == set(first.head.packs)
            prune(folder, first.head.key, after_ns=LATER)
            return known

        repository.known_contents = condemned_after
        with pytest.raises(StateError, match="was condemned while this snapshot was saved"):
            save(repository, captured, document)
        repository.known_contents = found
        manifest = save(repository, captured, document)

    assert not set(manifest.head.packs) & set(first.head.packs)


def test_a_condemned_pack_that_a_manifest_names_after_all_is_pardoned(two):
    folder, _, first, _ = two
    with a_repository(folder / "store") as repository:
        repository.store.publish(f"{CONDEMNED}/{first.head.packs[0]}", b"")

    done = prune(folder, after_ns=LATER)

    assert done.verdict == ((), (), first.head.packs)
    assert names_in(folder, CONDEMNED) == set()


def test_no_pack_goes_while_a_manifest_cannot_be_read(two):
    folder, _, first, second = two
    path = folder / "store" / MANIFESTS / first.head.key
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(StateError, match=f"omniload env prune -o STORE {first.head.key}"):
        prune(folder, after_ns=LATER)
    assert names_in(folder, CONDEMNED) == set()
    prune(folder, first.head.key, after_ns=LATER)

    assert names_in(folder, CONDEMNED) == set(first.head.packs)
    assert names_in(folder, MANIFESTS) == {second.head.key}


def test_what_is_no_snapshot_is_passed_over(two):
    folder, _, first, second = two
    (folder / "store" / MANIFESTS / "README").write_text("not ours")

    prune(folder, after_ns=LATER)

    assert names_in(folder, CONDEMNED) == set()
    with a_repository(folder / "store") as repository:
        assert set(repository.all_keys()) == {first.head.key, second.head.key}


class DyingStore(LocalStore):
    """Kills its own process at the change of a given number."""

    left = 0

    def _change(self):
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def remove(self, path):
        self._change()
        super().remove(path)

    def publish(self, path, data, before=None, mode=None):
        self._change()
        super().publish(path, data, before)


def killed_at(change, run):
    """Run in a process that dies at a change; return whether it did."""
    child = os.fork()
    if child == 0:
        DyingStore.left = change
        try:
            run()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_run_killed_at_any_change_is_finished_by_the_next(two):
    folder, environment, first, second = two
    kills = 0

    def run(after_ns):
        with closing(DyingStore(folder / "store")) as store:
            now_ns = time.time_ns() + after_ns
            prune_store(Repository(store), [second.head.key], grace_s=DAY_S, now_ns=now_ns)

    for after_ns in (LATER, 2 * LATER):
        change = 0
        while killed_at(change, lambda after=after_ns: run(after)):
            change, kills = change + 1, kills + 1
            with a_repository(folder / "store") as repository:
                assert set(repository.manifest(first.head.key).head.packs) <= names_in(
                    folder, PACKS
                )

    assert kills >= 4
    assert names_in(folder, PACKS) == set(first.head.packs)
    assert names_in(folder, CONDEMNED) == set()
    assert a_restorer(environment, folder).restore(first.head.key, "copy").form == "copy"


# ---------------------------------------------------------------- the node cache


def pruned(cache, after_ns=0, **changes):
    now_ns = time.time_ns() + after_ns
    found = prune_cache(cache, **{"unused_s": DAY_S, "now_ns": now_ns, **changes})
    return {each.name: (each.kind, each.outcome) for each in found}


@pytest.fixture
def restored(tmp_path):
    environment, manifest, held = saved(tmp_path)
    restorer = a_restorer(environment, tmp_path)
    restorer.restore(manifest.head.key, "link")
    return environment, restorer, manifest.head.key, held


def test_a_tree_that_nobody_used_goes_and_what_was_linked_to_it_stays(restored):
    environment, restorer, key, held = restored

    assert pruned(restorer.cache)[key] == ("tree", "used")
    assert pruned(restorer.cache, LATER, act=False)[key] == ("tree", "removed")
    assert restorer.cache.tree(key) is not None
    assert pruned(restorer.cache, LATER)[key] == ("tree", "removed")

    assert restorer.cache.tree(key) is None
    assert contents(environment) == held
    assert pruned(restorer.cache, LATER) == {}
    assert restorer.restore(key, "copy").form == "copy"


def test_a_restore_counts_as_use(restored):
    environment, restorer, key, _ = restored
    old = time.time_ns() - LATER
    os.utime(restorer.cache.tree(key).folder / "head.json", ns=(old, old))
    with environment.locked():
        environment.clear(environment.heal())

    restorer.restore(key, "copy")

    assert pruned(restorer.cache)[key] == ("tree", "used")


def test_a_tree_in_use_is_passed_over(restored):
    _, restorer, key, _ = restored

    with together(restorer.cache.lock(key)):
        assert pruned(restorer.cache, LATER)[key] == ("tree", "busy")
        with locked_now(restorer.cache.lock(key)) as held:
            assert not held

    assert restorer.cache.tree(key) is not None


def test_what_a_restore_that_died_left_goes_unless_it_is_at_work(restored):
    _, restorer, key, _ = restored
    left = restorer.cache.partial("f" * 64)
    (left.folder / "half").write_text("x" * 100)

    with together(restorer.cache.lock("f" * 64)):
        assert pruned(restorer.cache)["f" * 64] == ("leftover", "busy")
    assert pruned(restorer.cache, act=False)["f" * 64] == ("leftover", "removed")
    assert (left.folder / "half").exists()

    assert pruned(restorer.cache)["f" * 64] == ("leftover", "removed")
    assert not left.folder.exists()
    assert restorer.cache.tree(key) is not None


def test_a_prune_killed_after_a_tree_is_set_aside_is_finished_by_the_next(restored, monkeypatch):
    _, restorer, key, _ = restored
    cache = restorer.cache

    def run():
        monkeypatch.setattr(
            "snapshot.env.node.cache.discard", lambda _: os.kill(os.getpid(), signal.SIGKILL)
        )
        pruned(cache, LATER)

    assert killed_at(0, run)
    assert cache.tree(key) is None
    (left,) = (cache.folder / "partial").iterdir()
    assert pruned(cache)[left.name] == ("leftover", "removed")
    assert not left.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="MOUNTS NOT TESTED: only root may mount")
def test_a_tree_that_a_mount_shows_stays_whoever_mounted_it(tmp_path):
    environment, manifest, held = saved(tmp_path)
    restorer, key = a_restorer(environment, tmp_path), manifest.head.key
    if restorer.restore(key, "auto").form != "mount":
        pytest.skip("MOUNTS NOT TESTED: no overlay can be mounted here")
    keys, all_seen = keys_mounted()

    assert key in keys
    assert mounts_at(environment.targets[0].path)[0].source == mount_source(key)
    assert pruned(restorer.cache, LATER)[key] == ("tree", "mounted")
    assert contents(environment) == held
    with environment.locked():
        environment.clear(environment.heal())
    # Where not every process can be asked, a mount elsewhere may show it until the next boot.
    outcome = "removed" if all_seen else "mounted"
    assert pruned(restorer.cache, LATER)[key] == ("tree", outcome)


def a_process(proc, number, space, mounts="", readable=True):
    folder = proc / str(number) / "ns"
    folder.mkdir(parents=True)
    (folder / "mnt").symlink_to(f"mnt:[{space}]")
    if readable:
        (proc / str(number) / "mountinfo").write_text(mounts)
    else:
        (proc / str(number) / "mountinfo").mkdir()  # reading it fails as a denial would


LINE = "36 35 0:30 / /v rw - overlay {} ro\n"


def test_mounts_are_looked_for_in_every_namespace_once(tmp_path):
    a_process(tmp_path, 1, 1, LINE.format("omniload-env:aa") + LINE.format("overlay"))
    a_process(tmp_path, 2, 2, LINE.format("omniload-env:bb"))
    a_process(tmp_path, 3, 2, LINE.format("omniload-env:cc"))
    (tmp_path / "4").mkdir()  # has ended
    (tmp_path / "uptime").write_text("1")

    keys, whole = keys_mounted(tmp_path)

    assert keys in ({"aa", "bb"}, {"aa", "cc"})  # one of the processes of a namespace is asked
    assert not whole


def test_one_process_that_cannot_be_asked_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("snapshot.env.node.overlay._FIRST_PROCESSES", 5)
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").write_text("")
    number = (tmp_path / "self" / "ns" / "pid").stat().st_ino
    monkeypatch.setattr("snapshot.env.node.overlay._FIRST_PROCESSES", number)
    a_process(tmp_path, 1, 1, LINE.format("omniload-env:aa"))
    assert keys_mounted(tmp_path) == ({"aa"}, True)

    a_process(tmp_path, 2, 2, readable=False)

    assert keys_mounted(tmp_path) == ({"aa"}, False)


# ---------------------------------------------------------------- the command


@pytest.fixture
def here(two, monkeypatch):
    folder, *rest = two
    monkeypatch.setenv(CACHE_VARIABLE, str(folder / "cache"))
    monkeypatch.chdir(folder)
    return folder, *rest


def run(*words):
    result = CliRunner().invoke(command, ["prune", *map(str, words)], prog_name="omniload env")
    if isinstance(result.exception, OmniloadError):
        raise result.exception
    assert result.exception is None, result.output
    return result.stdout


def test_the_command_prunes_a_store_in_two_runs(here):
    folder, _, first, second = here

    assert "snapshot " + first.head.key[:16] + ": would be removed" in run(
        "-o", "store", first.head.key[:9], "--dry-run"
    )
    assert "0 removed (0 B), 1 condemned, 0 pardoned" in run(
        "-o", "store", first.head.key[:9], "--grace", "0s"
    )
    told = json.loads(run("-o", "store", "--grace", "0s", "--json"))

    assert told["removed"] == list(first.head.packs)
    assert told["snapshots"] == []
    assert told["freed_bytes"] > 0
    assert names_in(folder, PACKS) == set(second.head.packs)


def test_the_command_prunes_the_node_cache(here):
    folder, environment, first, _ = here
    a_restorer(environment, folder).restore(first.head.key, "copy")

    assert "used, 0 B" in run()
    assert "would be removed" in run("--unused", "0s", "--dry-run")
    assert "0 B freed" not in run("--unused", "0s")
    assert json.loads(run("--unused", "0s", "--json")) == []
    assert NodeCache(folder / "cache").tree(first.head.key) is None


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["3f9a"], ConfigError, "name it with -o"),
        (["-o", "store", "0" * 64], ConfigError, "no snapshot 0000"),
        (["-o", "store", "0000"], StateError, "begins 0 keys"),
        (["-o", "nowhere"], ConfigError, "nowhere"),
    ],
)
def test_a_mistake_is_told_and_removes_nothing(here, words, error, message):
    folder, _, first, second = here

    with pytest.raises(error, match=message):
        run(*words)

    assert names_in(folder, MANIFESTS) == {first.head.key, second.head.key}


@pytest.mark.parametrize(
    ("option", "value"), [("--unused", "long"), ("--grace", "1y"), ("--unused", "-1d")]
)
def test_what_is_no_duration_is_refused_and_removes_nothing(here, option, value):
    folder, _, first, second = here

    result = CliRunner().invoke(command, ["prune", "-o", "store", option, value])

    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output
    assert names_in(folder, MANIFESTS) == {first.head.key, second.head.key}


def test_a_store_in_the_environment_is_not_pruned_unless_it_is_named(here, monkeypatch):
    folder, *_ = here
    monkeypatch.setenv("OMNILOAD_ENV_STORE", str(folder / "store"))

    assert "freed in" in run("--unused", "0s")

    assert names_in(folder, CONDEMNED) == set()


def test_deletions_and_twins_are_still_restored_after_a_prune(two):
    folder, environment, first, second = two
    prune(folder, second.head.key, after_ns=LATER)
    prune(folder, after_ns=2 * LATER)

    a_restorer(environment, folder).restore(first.head.key, "copy")

    assert any(entry.kind is Kind.DELETED for entry in first.entries)
    assert not (Path(environment.interpreter.purelib) / "old.py").exists()
