"""``omniload fs`` over a folder, without a mount: what it says, and what it says to wrong input."""

import json
import shutil

import pytest
from click.testing import CliRunner

from fusefs.cli import command
from fusefs.stores.local.store import LocalStore
from fusefs.stores.memory import MemoryStore
from fusefs.tree.namespace import StripedFiles
from omniload.base.errors import ConfigError, IntegrityError, StateError

BIG = bytes(range(256)) * 10_000


@pytest.fixture
def store(tmp_path):
    (tmp_path / "store").mkdir()
    files = StripedFiles(LocalStore(tmp_path / "store"))
    files.write_file("d/big", BIG)
    files.write_file("d/small", b"small")
    files.close()
    return tmp_path / "store"


def cli(*words):
    return CliRunner().invoke(command, [str(word) for word in words])


def said(error, *words):
    done = cli(*words)
    assert isinstance(done.exception, error), done.output
    return str(done.exception)


@pytest.mark.parametrize(
    "words",
    [
        ["stat", "../x", "--store", "{store}"],
        ["prefetch", "../x", "--store", "{store}", "--disk-cache", "{cache}"],
        ["drop", "d/../../x", "--store", "{store}", "--disk-cache", "{cache}"],
        ["export", "../x", "{cache}/out", "--store", "{store}"],
    ],
)
def test_a_path_that_leaves_the_store_is_refused_by_every_command(store, tmp_path, words):
    words = [word.format(store=store, cache=tmp_path / "cache") for word in words]

    assert "give a plain path from the root of the store" in said(ConfigError, *words)


@pytest.mark.parametrize(
    "words",
    [
        ["stat", "none", "--store", "{store}"],
        ["prefetch", "none", "--store", "{store}", "--disk-cache", "{cache}"],
        ["drop", "none", "--store", "{store}", "--disk-cache", "{cache}"],
        ["export", "none", "{cache}/out", "--store", "{store}"],
    ],
)
def test_a_path_that_is_not_there_is_named_by_every_command(store, tmp_path, words):
    words = [word.format(store=store, cache=tmp_path / "cache") for word in words]

    assert said(StateError, *words).startswith("'none' is not in ")


@pytest.mark.parametrize("verb", ["prefetch", "drop"])
@pytest.mark.parametrize("option", ["--disk-cache", "--capacity"])
def test_settings_of_a_cache_are_refused_where_the_mount_has_its_own(tmp_path, verb, option):
    message = said(ConfigError, verb, tmp_path, option, "1GiB")

    assert message.startswith(f"{option} goes with --store only")


@pytest.mark.parametrize("verb", ["stat", "prefetch", "drop"])
def test_what_lies_on_no_mount_says_so(tmp_path, verb):
    (tmp_path / "f").touch()

    assert "lies on no mount of ours" in said(StateError, verb, tmp_path / "f")


def test_stat_tells_files_from_directories(store):
    assert cli("stat", "d", "--store", store).output == "d: directory, mode 0755\n"
    assert "in units of 1 MiB over 4 objects" in cli("stat", "/d/big/", "--store", store).output
    shown = json.loads(cli("stat", "d", "--store", store, "--json").output)
    assert (shown["kind"], shown["mode"]) == ("directory", "0755")


def test_export_names_what_it_wrote_as_it_was_asked_to(store, tmp_path):
    for _ in range(2):  # the second time the folder is there
        done = cli("export", "d", tmp_path / "out/deep", "--store", store, "--force")

        names = [line.partition(":")[0] for line in done.output.splitlines()]
        assert names == [f"{tmp_path}/out/deep/big", f"{tmp_path}/out/deep/small"]
    assert (tmp_path / "out/deep/big").read_bytes() == BIG


def test_verify_counts_and_ends_with_0(store):
    done = cli("verify", store, "--read-data", "--json")

    found = json.loads(done.output)
    assert done.exit_code == 0
    assert (found["files"], found["manifests"], found["objects"]) == (2, 1, 3)
    assert found["bytes_verified"] == len(BIG)


def test_verify_of_a_store_that_lost_all_its_objects_is_no_clean_bill(store):
    shutil.rmtree(store / ".omnifs/objects")

    done = cli("verify", store)

    assert isinstance(done.exception, IntegrityError)
    assert done.output.count("missing: ") == 3


def test_verify_of_a_store_that_is_not_there_is_no_clean_bill(monkeypatch):
    """As HDFS and S3 are: opening them finds nothing out."""
    store = MemoryStore()
    monkeypatch.setattr("fusefs.commands.store_options.open_store", lambda _: store)
    monkeypatch.setattr(store, "stat", _nothing_there)

    assert "is not there; make the directory" in said(ConfigError, "verify", "hdfs://n:1/typo")


def _nothing_there(path):
    raise FileNotFoundError(2, "nothing there", path)


def test_verify_of_a_folder_within_a_store_finds_no_objects_and_says_so(store):
    assert "3 faults cost data" in said(IntegrityError, "verify", store / "d")


@pytest.mark.parametrize("below", ["", "ckpt"])
def test_verify_of_a_mount_names_its_store(tmp_path, below):
    (tmp_path / ".omnifs").mkdir()
    (tmp_path / ".omnifs/stats.json").write_text('{"store": "hdfs://nn/jobs"}')
    (tmp_path / "ckpt").mkdir()

    message = said(ConfigError, "verify", tmp_path / below)

    wanted = f"hdfs://nn/jobs/{below}".rstrip("/")
    assert message.endswith(f"is a mount of {wanted}; give that store")


@pytest.mark.parametrize("grace", ["-1", "soon"])
def test_a_grace_that_is_no_time_is_refused(store, grace):
    done = cli("verify", store, "--grace", grace)

    assert done.exit_code == 2
    assert "--grace" in done.output


@pytest.mark.parametrize("log", [("--log", "no/log"), ("-o", "log=no/log")])
def test_a_log_that_cannot_be_written_is_said_before_anything_is_mounted(
    store, tmp_path, monkeypatch, log
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnt").mkdir()

    message = said(ConfigError, "mount", store, tmp_path / "mnt", *log)

    assert message.endswith("cannot be written: No such file or directory; name a file")


def test_an_empty_text_is_no_place(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert "the mount point is an empty text" in said(ConfigError, "mount", store, "")
    assert "names nothing" in said(ConfigError, "verify", "", "--repair")


def test_a_grace_that_is_no_number_is_refused_before_anything_is_repaired(store):
    done = cli("verify", str(store), "--repair", "--grace", "nan")

    assert done.exit_code == 2
    assert "'nan' is no number to go by" in done.output
