"""The striped namespace through fsspec."""

import errno
import os
import pickle
import uuid

import fsspec
import pytest

from fusefs.fsspec_filesystem import OmniFileSystem
from fusefs.stores.memory import MemoryStore
from omniload.base.errors import ConfigError

SMALL = {"striping": {"unit": 4096, "count": 3}, "plain_limit": 4096}
DATA = os.urandom(50_000)


@pytest.fixture
def omni(tmp_path):
    fs = OmniFileSystem(store=str(tmp_path), config=SMALL, skip_instance_cache=True)
    yield fs
    fs.files.close()


def test_a_file_written_through_fsspec_is_striped_and_reads_back(omni, tmp_path):
    with omni.open("ckpt/a.bin", "wb") as out:
        out.write(DATA)

    assert omni.info("ckpt/a.bin")["size"] == len(DATA)
    assert omni.info("ckpt/a.bin")["stored"] == "manifest"
    assert (tmp_path / ".omnifs/objects").is_dir()
    with omni.open("omnifs://ckpt/a.bin", "rb") as file:
        file.seek(-10, 2)
        assert file.read() == DATA[-10:]
        file.seek(5)
        assert file.read(7) == DATA[5:12]
        buffer = bytearray(100)
        assert file.readinto(buffer) == 100
        assert buffer == DATA[12:112]


def test_a_file_is_not_there_before_it_is_closed(omni):
    out = omni.open("a", "wb")
    out.write(DATA)
    assert not omni.exists("a")

    out.close()

    assert omni.cat_file("a") == DATA


def test_leaving_by_an_exception_gives_the_file_up_and_keeps_what_was_there(omni):
    omni.pipe_file("a", b"old")

    with pytest.raises(TypeError), omni.open("a", "wb") as out:
        out.write(DATA + None)

    assert omni.cat_file("a") == b"old"
    assert omni.glob(".omnifs/**") == []


def test_a_file_that_is_dropped_without_close_is_given_up(omni):
    out = omni.open("a", "wb")
    out.write(DATA)

    del out

    assert not omni.exists("a")


def test_committed_bytes_are_visible_while_writing_goes_on(omni):
    with omni.open("log", "wb") as out:
        out.write(DATA[:10_000])
        out.commit()
        assert omni.cat_file("log") == DATA[:10_000]
        out.write(DATA[10_000:])

    assert omni.cat_file("log") == DATA


def test_appending_continues_a_file(omni):
    omni.pipe_file("a", DATA[:30_000])

    with omni.open("a", "ab") as out:
        out.write(DATA[30_000:])

    assert omni.cat_file("a") == DATA


@pytest.mark.parametrize("replace", ["before", "after a commit"])
def test_nothing_is_appended_to_what_another_process_replaced(omni, tmp_path, replace):
    """Its objects are gone by then: the file would name them, and be lost with the one that replaced it."""
    omni.pipe_file("a", DATA[:30_000])
    other = OmniFileSystem(store=str(tmp_path), config=SMALL, skip_instance_cache=True)
    out = omni.open("a", "ab")
    out.write(DATA[30_000:])
    if replace == "after a commit":
        out.commit()
        out.write(DATA)
    other.pipe_file("a", DATA[::-1])

    with pytest.raises(OSError, match="replaced") as caught:
        out.close()

    assert caught.value.errno == errno.ESTALE
    assert other.cat_file("a") == DATA[::-1]
    other.files.close()


def test_ranges_may_count_from_the_end(omni):
    omni.pipe_file("a", DATA)

    assert omni.cat_file("a", start=-5) == DATA[-5:]
    assert omni.cat_file("a", 10, -10) == DATA[10:-10]
    assert omni.cat_ranges(["a", "a"], [0, 5], [3, 9]) == [DATA[:3], DATA[5:9]]


def test_directories_list_walk_rename_and_vanish(omni):
    omni.makedirs("step.tmp/deep")
    omni.makedirs("step.tmp/deep", exist_ok=True)
    omni.pipe_file("step.tmp/deep/a", DATA)

    omni.mv("step.tmp", "step")

    assert omni.find("") == ["step/deep/a"]
    assert omni.ls("step", detail=False) == ["step/deep"]
    omni.rm("step", recursive=True)
    assert omni.ls("", detail=False) == []


def test_a_copy_holds_the_same_bytes_in_objects_of_its_own(omni):
    omni.pipe_file("a", DATA)

    omni.cp_file("a", "b")
    omni.rm_file("a")

    assert omni.cat_file("b") == DATA


def test_links_are_followed_and_never_out_of_the_store(omni):
    omni.pipe_file("d/a", b"1")
    omni.files.names.make_link("d/link", "a")
    omni.files.names.make_link("up", "../../../d/a")
    omni.files.names.make_link("loop", "loop")

    assert omni.cat_file("d/link") == b"1"
    assert omni.cat_file("up") == b"1"
    with pytest.raises(OSError, match="links"):
        omni.cat_file("loop")


def test_exclusive_creation_refuses_what_is_there(omni):
    omni.pipe_file("a", b"1")

    with pytest.raises(FileExistsError):
        omni.open("a", "xb")
    with pytest.raises(FileExistsError):
        omni.pipe_file("a", b"2", mode="create")


def test_random_writing_points_to_the_mount(omni):
    with pytest.raises(ValueError, match="need the mount"):
        omni.open("a", "r+b")


def test_the_filesystem_crosses_process_boundaries(omni):
    omni.pipe_file("a", DATA)

    other = pickle.loads(pickle.dumps(omni))

    assert other.cat_file("a") == DATA


def test_a_chained_url_names_path_and_store(tmp_path):
    with fsspec.open(f"omnifs://x/a.txt::file://{tmp_path}", "wb") as out:
        out.write(b"chained")

    assert (tmp_path / "x/a.txt").read_bytes() == b"chained"


@pytest.mark.parametrize("store", ["hdfs://nn:9000/jobs", "hdfs://nn/jobs"])
def test_a_chained_store_is_opened_by_its_own_url_and_client(store, monkeypatch):
    opened = []

    def note(url, options=None):
        opened.append((url, options))
        return MemoryStore()

    monkeypatch.setattr("fusefs.fsspec_filesystem.open_store", note)

    fsspec.core.url_to_fs(f"omnifs://a/b::{store}", skip_instance_cache=True)

    assert opened == [(store, None)]


def test_a_store_of_fsspec_itself_may_lie_below(tmp_path):
    fs = OmniFileSystem(store=f"memory://{uuid.uuid4().hex}", config=SMALL)

    fs.pipe_file("a", DATA)

    assert fs.cat_file("a") == DATA


def test_without_a_store_the_error_says_how_to_give_one():
    with pytest.raises(ConfigError, match="give store=URL"):
        OmniFileSystem(skip_instance_cache=True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"stripin": 1}, "stripin: no such key; did you mean 'striping'"),
        ({"count": 3}, "did you mean 'striping.count'"),
        (
            {"striping": {"unt": 1}},
            "striping.unt: no such key; did you mean 'unit'",
        ),
        ({"cache": 1}, "cache: found 1; give at least"),
    ],
)
def test_a_config_that_breaks_its_model_is_said_in_words_of_ours(tmp_path, config, said):
    with pytest.raises(ConfigError) as caught:
        fsspec.filesystem("omnifs", store=str(tmp_path), config=config)

    assert str(caught.value).startswith("omnifs config: ")
    assert said in str(caught.value)
    assert "pydantic" not in str(caught.value)
