"""From patterns to files, and guarded reading."""

import errno
import logging
import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.source import files, patterns
from omniload.source.files import reading
from omniload.source.formats.content import digest_of
from omniload.source.formats.opening import spec_of
from omniload.source.patterns import find_files


def written(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def found(folder, *patterns):
    files = find_files(patterns, folder, source="web")
    return [file.path.removeprefix(f"{folder}/") for file in files]


def test_files_come_in_natural_order(tmp_path):
    written(tmp_path, "part-10.txt", "part-9.txt", "part-009.txt", "a2/x.txt", "a10/x.txt")

    assert found(tmp_path, "**/*.txt") == [
        "a2/x.txt",
        "a10/x.txt",
        "part-009.txt",
        "part-9.txt",
        "part-10.txt",
    ]


def test_patterns_keep_their_order_and_a_file_counts_once(tmp_path):
    written(tmp_path, "a.txt", "b.txt", "c.txt")

    assert found(tmp_path, "c.txt", "*.txt") == ["c.txt", "a.txt", "b.txt"]


def test_an_absolute_path_and_a_file_url_name_the_same_file(tmp_path):
    written(tmp_path, "a.txt")

    assert found(tmp_path, f"{tmp_path}/a.txt", f"file://{tmp_path}/a.txt") == ["a.txt"]


def test_brackets_in_the_folder_s_name_are_no_pattern(tmp_path):
    folder = tmp_path / "run[1]"
    written(folder, "a.txt", "b[2].txt")

    assert found(folder, "*.txt") == ["a.txt", "b[2].txt"]
    assert found(folder, "b[2].txt") == ["b[2].txt"]


def test_a_glob_passes_over_folders(tmp_path):
    written(tmp_path, "a/x.txt", "b.txt")

    assert found(tmp_path, "*") == ["b.txt"]


def test_a_pattern_that_matches_nothing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"sources\.web\.path: 'none-\*\.txt' matches no file"):
        found(tmp_path, "none-*.txt")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'gone\.txt' matches no file under .*, relative paths"):
        found(tmp_path, "gone.txt")


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (
            "~/x.txt",
            r"'~/x\.txt' matches no file under .*; ~ stands for no home here: write the folder",
        ),
        (
            "$DATA/x.txt",
            r"under .*; variables are written \${NAME}, in a file of version 2: write it so",
        ),
    ],
)
def test_what_a_shell_would_write_out_is_told_in_a_path_that_is_missing(tmp_path, pattern, said):
    with pytest.raises(ConfigError, match=said):
        found(tmp_path, pattern)


def test_a_folder_that_may_not_be_read_is_told_with_who_may_not(tmp_path, monkeypatch):
    written(tmp_path, "a/x.txt")

    def refuses(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{tmp_path}/a")

    monkeypatch.setattr(os, "scandir", refuses)

    with pytest.raises(
        ConfigError,
        match=rf"Permission denied: '.*/a'; let user {os.geteuid()} read its folders, or",
    ):
        found(tmp_path, "a/*.txt")


def test_a_whole_path_that_is_missing_is_not_told_where_others_start(tmp_path):
    with pytest.raises(ConfigError, match=r"/gone\.txt' matches no file; correct the path$"):
        found(tmp_path, f"{tmp_path}/gone.txt")


def test_a_folder_is_refused_with_a_pattern_to_write(tmp_path):
    written(tmp_path, "a/x.txt")

    with pytest.raises(ConfigError, match=r"it is a folder; write a pattern such as .*a/\*"):
        found(tmp_path, "a")


def test_an_unknown_protocol_is_a_fault_of_the_file(tmp_path):
    with pytest.raises(ConfigError, match="nonesuch://x"):
        found(tmp_path, "nonesuch://x")


def test_files_of_a_store_are_found_by_glob_and_by_name(tmp_path, memory):
    memory.pipe({"/d/b-10.txt": b"1", "/d/b-2.txt": b"22", "/d/sub/c.txt": b"3"})

    assert found(tmp_path, "memory://d/*.txt") == ["/d/b-2.txt", "/d/b-10.txt"]
    assert found(tmp_path, "memory://d/sub/c.txt") == ["/d/sub/c.txt"]


def test_a_store_without_the_file_is_a_fault_of_the_file(tmp_path, memory):
    with pytest.raises(
        ConfigError, match=r"none\.txt' matches no file of its store; correct the URL"
    ):
        found(tmp_path, "memory://d/none.txt")


def test_a_folder_of_a_store_is_refused(tmp_path, memory):
    memory.pipe("/d/sub/c.txt", b"3")

    with pytest.raises(ConfigError, match="it is a folder"):
        found(tmp_path, "memory://d/sub")


def test_files_of_a_store_are_read_and_guarded(tmp_path, memory):
    memory.pipe("/d/a.txt", b"hello")
    (file,) = find_files(["memory://d/a.txt"], tmp_path, source="web")

    with reading(file), file.open() as opened:
        assert opened.read() == b"hello"
    memory.pipe("/d/a.txt", b"hello, changed")

    with pytest.raises(IntegrityError, match=r"/d/a\.txt: changed"):
        file.require_unchanged()


@pytest.fixture
def file(tmp_path):
    written(tmp_path, "a.txt")
    return find_files(["a.txt"], tmp_path, source="web")[0]


def test_a_digest_of_shards_follows_name_and_size_and_not_the_folder(tmp_path):
    for folder, text in (("a", "one"), ("b", "two"), ("c", "three")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(text)
    (tmp_path / "a" / "y.txt").write_text("one")

    digests = [
        digest_of(find_files([path], tmp_path, source="web"))
        for path in ("a/x.txt", "b/x.txt", "c/x.txt", "a/y.txt")
    ]

    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_file_that_changes_while_it_is_read_is_not_trusted(file, tmp_path):
    said = r"changed since the source was opened: 5 bytes written at .* now 5 at 2023-11-14 22:13:20\.000000001 UTC"
    with pytest.raises(IntegrityError, match=said), reading(file):
        os.utime(tmp_path / "a.txt", ns=(0, 1_700_000_000_000_000_001))


def test_a_change_explains_a_failed_decode(file, tmp_path):
    def cut_off():
        (tmp_path / "a.txt").write_text("longer than before")
        raise pa.ArrowInvalid("bad magic")

    with pytest.raises(IntegrityError, match="changed since"), reading(file):
        cut_off()


def test_a_failed_decode_names_file_and_part(file):
    with (
        pytest.raises(IntegrityError, match=r"a\.txt: row group 3: cannot be decoded: bad magic"),
        reading(file, "row group 3"),
    ):
        raise pa.ArrowInvalid("bad magic")


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), TimeoutError("slow"), ConnectionError()]
)
def test_a_file_system_that_does_not_answer_may_be_asked_again(file, error):
    with pytest.raises(UnavailableError, match="try again"), reading(file):
        raise error


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_file_that_cannot_be_looked_at_may_be_asked_for_again(file, monkeypatch, code):
    def stat(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        with (
            pytest.raises(UnavailableError, match=r"a\.txt: cannot be looked at: .*; try again"),
            reading(file),
        ):
            pytest.fail("it was not looked at first")

    with reading(file), file.open() as opened:
        assert opened.read() == b"a.txt"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.EINVAL, "Bad Request"), "keys that have expired: renew them, and try again"),
        (PermissionError("Forbidden"), "Forbidden; get the rights to it, and try again"),
    ],
)
def test_a_look_that_a_store_refuses_says_what_its_answer_without_a_body_means(
    file, monkeypatch, error, remedy
):
    def stat(*_, **__):
        raise error

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(UnavailableError, match=remedy), reading(file):
        pytest.fail("it was not looked at first")


def test_a_file_that_is_gone_is_no_outage(file, tmp_path):
    (tmp_path / "a.txt").unlink()

    with pytest.raises(IntegrityError, match="gone since the source was opened"), reading(file):
        pytest.fail("it was not looked at first")


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (lambda path: path.symlink_to(path.name), "gone since the source was opened; put it back"),
        (Path.mkdir, "changed since the source was opened: it is a folder"),
        (os.mkfifo, "changed since the source was opened: it is a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "since the source was opened: it is a device"),
    ],
    ids=["link to itself", "folder", "pipe", "device"],
)
def test_what_is_no_file_in_the_place_of_one_is_told_at_once(file, tmp_path, put, said):
    """A link to itself was asked again for minutes, all else was a fault of ours."""
    (tmp_path / "a.txt").unlink()
    put(tmp_path / "a.txt")

    with pytest.raises(IntegrityError, match=rf"a\.txt: .*{said}"), reading(file):
        pytest.fail("it was not looked at first")


def test_our_own_errors_pass_through_unchanged(file):
    with pytest.raises(ConfigError, match=r"^mine$"), reading(file):
        raise ConfigError("mine")


SPARK = ("_SUCCESS", "_metadata", ".part-0.jsonl.crc", "part-0.jsonl", "_temporary/0/part-1.jsonl")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("out/*", ["out/part-0.jsonl"]),
        ("out/**/*", ["out/part-0.jsonl"]),
        ("out/**/*.jsonl", ["out/part-0.jsonl"]),
        ("out/_*", ["out/_SUCCESS", "out/_metadata"]),
        ("out/_temporary/*/*.jsonl", ["out/_temporary/0/part-1.jsonl"]),
        ("out/.part-0.jsonl.crc", ["out/.part-0.jsonl.crc"]),
    ],
)
def test_what_writers_mark_as_no_data_is_passed_over_unless_it_is_asked_for(
    tmp_path, pattern, names
):
    folder = tmp_path / ".cache" / "_base[1]"  # names above the pattern are nothing to it
    written(folder, *(f"out/{name}" for name in SPARK))

    assert found(folder, pattern) == names


def test_a_store_s_marked_names_are_passed_over_too(tmp_path, memory):
    memory.pipe({f"/out/{name}": b"1" for name in SPARK})

    assert found(tmp_path, "memory://out/*") == ["/out/part-0.jsonl"]
    assert found(tmp_path, "memory://out/**") == ["/out/part-0.jsonl"]


def test_what_is_passed_over_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("omniload"), "propagate", True)
    written(tmp_path, *SPARK)

    with caplog.at_level("INFO", logger="omniload"):
        found(tmp_path, "*")

    assert "names that start with _ or . are passed over: _SUCCESS, _metadata" in caplog.text


@pytest.mark.parametrize(
    ("kind", "name", "is_known"),
    [
        ("jsonl", "a.jsonl", True),
        ("jsonl", "a.JSON.GZ", True),
        ("jsonl", "a.ndjson.zst", True),
        ("jsonl", "part-00000", True),
        ("jsonl", "shard.00001", True),
        ("jsonl", "x.tmp", False),
        ("jsonl", "a.csv.gz", False),
        ("parquet", "part-0.snappy.parquet", True),
        ("parquet", "a.jsonl", False),
        ("text", "README.md", True),
        ("text", "a.tar", False),
        ("text", "a.txt.gz", False),
    ],
)
def test_a_glob_without_a_suffix_takes_what_its_type_knows(tmp_path, kind, name, is_known):
    written(tmp_path, name)
    names = spec_of(kind).names

    assert [file.path for file in find_files([name], tmp_path, source="web", names=names)]
    if is_known:
        assert find_files(["*"], tmp_path, source="web", names=names)
        return
    with pytest.raises(
        ConfigError, match=r"takes .*, which this type does not read; end the pattern"
    ):
        find_files(["*"], tmp_path, source="web", names=names)
    suffix = Path(name).suffix
    assert find_files([f"*{suffix}"], tmp_path, source="web", names=names)


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a pipe"), (os.mkdir, "a folder")])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, make, kind):
    make(tmp_path / "x")

    with pytest.raises(ConfigError, match=f"it is {kind}"):
        found(tmp_path, "x")


def test_a_device_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="it is a device, which can be read once or has no end"):
        found(tmp_path, "/dev/zero")


class ClientError(Exception):
    """An error as a store's client defines one: no ``OSError``, and a page of text."""


@pytest.mark.parametrize("pattern", ["memory://d/*.txt", "memory://d/a.txt"])
def test_an_error_of_a_store_s_client_is_told_in_one_line(tmp_path, memory, monkeypatch, pattern):
    def fail(*_, **__):
        raise ClientError("no answer from the endpoint\n" + "frame\n" * 128)

    monkeypatch.setattr(type(memory), "glob", fail)
    monkeypatch.setattr(type(memory), "info", fail)

    with pytest.raises(
        UnavailableError, match=r"no answer from the endpoint; try again once it answers$"
    ) as caught:
        found(tmp_path, pattern)
    assert "\n" not in str(caught.value)


def test_a_fault_of_code_is_not_told_as_an_outage(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(type(memory), "info", lambda *_, **__: {}["type"])

    with pytest.raises(KeyError):
        found(tmp_path, "memory://d/a.txt")


def test_an_error_of_a_store_s_client_while_reading_is_an_outage(file):
    with pytest.raises(UnavailableError, match="cannot be read: gone; try again"), reading(file):
        raise ClientError("gone")


def test_what_may_not_be_read_asks_for_the_rights_to_it(file):
    with (
        pytest.raises(UnavailableError, match="get the rights to it, and try again"),
        reading(file),
    ):
        raise PermissionError(13, "Permission denied", file.path)


def test_a_store_that_does_not_answer_is_given_up(tmp_path, memory, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(type(memory), "info", lambda *_, **__: release.wait(60))
    monkeypatch.setattr(patterns, "LISTING_S", 0.05)

    with pytest.raises(UnavailableError, match=r"a listing: no answer within 0\.05 s"):
        found(tmp_path, "memory://d/a.txt")
    release.set()


@pytest.mark.parametrize("pattern", ["x" * 5_000, "a/" * 3_000 + "*", "a.txt/b", "loop", "loop/b"])
def test_a_path_that_cannot_be_is_no_outage_and_told_shortly(tmp_path, pattern):
    written(tmp_path, "a.txt")
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(ConfigError) as caught:
        found(tmp_path, pattern)
    assert len(str(caught.value)) < 600


def test_a_local_listing_that_does_not_end_is_given_up(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(patterns, "matches_of", lambda *_, **__: release.wait(60))
    monkeypatch.setattr(patterns, "LISTING_S", 0.05)

    with pytest.raises(UnavailableError, match=r"a listing: no answer within 0\.05 s"):
        found(tmp_path, "**/*.txt")
    release.set()


def test_a_pipe_behind_a_store_s_client_is_told_as_none(tmp_path):
    os.mkfifo(tmp_path / "x")

    with pytest.raises(ConfigError, match="it is no file, and can be read once"):
        found(tmp_path, f"local://{tmp_path}/x")


def test_what_says_that_it_is_empty_is_not_read(tmp_path, monkeypatch):
    """The kernel's log in ``/proc`` is such a file, and a read of it would wait."""
    (tmp_path / "log").touch()
    (file,) = find_files(["log"], tmp_path, source="web")
    monkeypatch.setattr(files.pa, "OSFile", lambda *_: pytest.fail("it was opened"))

    with reading(file), file.open() as opened:
        assert opened.read() == b""


@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
def test_a_range_is_read_whole_though_the_system_gives_a_part_at_once(file, monkeypatch, at_once):
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: whole(fd, min(size, at_once), at))
    content = Path(file.path).read_bytes()

    found = file.read_ranges([(0, file.size_bytes), (1, 3), (2, 2), (1, 1 << 40)])

    assert found == [content, content[1:3], b"", content[1:]]
