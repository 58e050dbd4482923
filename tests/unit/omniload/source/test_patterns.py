"""Folders, braces, and files that lie next to others."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.mix.config import JsonlSource, ParquetSource
from omniload.mix.sources import SOURCE_TYPES, NumpySource
from omniload.source.files import beside, local_file
from omniload.source.formats.opening import open_format, spec_of
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.patterns import FileNames, find_files, listing
from omniload.source.spec import SourceSpec

LINES = FileNames(suffixes=frozenset({".jsonl"}), compressed=True)
LISTED = FileNames(suffixes=frozenset({".x"}), manifest="list.json")


def written(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def found(folder, *patterns, names=LINES):
    files = find_files(patterns, folder, source="web", names=names)
    return [file.path.removeprefix(f"{folder}/") for file in files]


HELD = (
    *("d/b-10.jsonl", "d/b-2.jsonl", "d/sub/c.jsonl.gz", "d/_SUCCESS", "d/x.tmp"),
    *("d/.b-2.jsonl.crc", "d/_temporary/0/b-3.jsonl", "d/README.md"),
)
TAKEN = ["d/b-2.jsonl", "d/b-10.jsonl", "d/sub/c.jsonl.gz"]


@pytest.mark.parametrize("name", ["d", "d/"])
def test_of_a_folder_the_files_of_the_type_are_taken(tmp_path, name):
    written(tmp_path, *HELD)

    assert found(tmp_path, name) == TAKEN


def test_of_a_folder_of_a_store_the_files_of_the_type_are_taken(tmp_path, memory):
    memory.pipe({f"/{name}": b"1" for name in HELD})

    assert found(tmp_path, "memory://d") == [f"/{name}" for name in TAKEN]


def test_a_path_of_a_store_is_asked_for_once_and_never_fetched(tmp_path, memory, monkeypatch):
    """Over HTTP ``isdir`` fetches the whole file to look for links in it."""
    memory.pipe("/d/a.jsonl", b"1")
    asked = []
    info = type(memory).info
    monkeypatch.setattr(
        type(memory), "info", lambda self, path, **o: asked.append(path) or info(self, path, **o)
    )
    monkeypatch.setattr(type(memory), "isdir", lambda *_: pytest.fail("it was fetched"))

    assert found(tmp_path, "memory://d/a.jsonl") == ["/d/a.jsonl"]
    assert asked == ["/d/a.jsonl"]


@pytest.mark.parametrize("name", ["d/c.v1", "d/c.v1.bin", "d"])
@pytest.mark.parametrize("url", ["", "memory://"])
def test_a_suffix_may_be_left_out_where_the_format_says_so(tmp_path, memory, name, url):
    written(tmp_path, "d/c.v1.bin", "d/c.v1.idx")
    memory.pipe({"/d/c.v1.bin": b"1", "/d/c.v1.idx": b"1"})
    names = FileNames(suffixes=frozenset({".bin"}), implied=".bin")

    (path,) = found(tmp_path, url + name, names=names)
    assert path.endswith("d/c.v1.bin")


def test_a_folder_without_a_file_of_the_type_says_what_it_holds(tmp_path):
    written(tmp_path, "d/a.csv", "d/_SUCCESS")

    with pytest.raises(
        ConfigError, match=r"without a file of this type \(\.jsonl\); it holds _SUCCESS, a\.csv"
    ):
        found(tmp_path, "d")


def test_what_a_folder_leaves_out_is_told_but_for_marked_files(tmp_path, caplog):
    written(tmp_path, "d/a.jsonl", "d/notes.md", "d/_SUCCESS", "d/.a.jsonl.crc")

    with caplog.at_level("INFO"):
        assert found(tmp_path, "d") == ["d/a.jsonl"]

    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "of this folder not taken: notes.md"
    ]


@pytest.mark.parametrize("to", ["elsewhere.jsonl", "gone.jsonl"])
@pytest.mark.parametrize("name", ["d", "d/*.jsonl", "d/**/*.jsonl", "d/gone.jsonl"])
def test_a_link_that_leads_to_nothing_or_itself_is_refused_and_not_left_out(tmp_path, name, to):
    written(tmp_path, *HELD)
    (tmp_path / "d/gone.jsonl").symlink_to(to)

    with pytest.raises(ConfigError, match=rf"d/gone.jsonl is a link to '{to}', which is not there"):
        found(tmp_path, name)


def test_links_to_folders_are_told_where_a_folder_does_not_follow_them(tmp_path, caplog):
    written(tmp_path, *HELD, "other/e.jsonl")
    (tmp_path / "d/out").symlink_to(tmp_path / "other")
    (tmp_path / "only").mkdir()
    (tmp_path / "only/in").symlink_to(tmp_path / "other")

    assert found(tmp_path, "d") == TAKEN
    assert "links to folders are not followed, and what lies behind out is not read" in caplog.text
    assert "d/out/e.jsonl" in found(tmp_path, "d/**/*.jsonl")
    with pytest.raises(ConfigError, match=r"it holds in: .* links to folders are not followed"):
        found(tmp_path, "only")


def test_a_list_of_shards_stands_for_its_folder(tmp_path):
    written(tmp_path, "d/a.x", "d/list.json", "d/deep/list.json")

    assert found(tmp_path, "d", names=LISTED) == ["d/list.json"]


def test_a_folder_of_several_data_sets_names_them(tmp_path):
    written(tmp_path, "d/train/list.json", "d/test/list.json")

    with pytest.raises(ConfigError, match=r"holds 2 data sets.*: test, train; name those"):
        found(tmp_path, "d", names=LISTED)


def test_braces_name_every_file_and_a_missing_one_is_told(tmp_path, memory):
    written(tmp_path, "a-08.jsonl", "a-09.jsonl", "a-10.jsonl", "odd-{1,2}.jsonl")
    memory.pipe({"/d/a-0.jsonl": b"1", "/d/a-1.jsonl": b"1"})

    assert found(tmp_path, "a-{08..10}.jsonl") == ["a-08.jsonl", "a-09.jsonl", "a-10.jsonl"]
    assert found(tmp_path, "memory://d/a-{0..1}.jsonl") == ["/d/a-0.jsonl", "/d/a-1.jsonl"]
    assert found(tmp_path, "odd-{1,2}.jsonl") == ["odd-{1,2}.jsonl"]
    with pytest.raises(ConfigError, match=r"'a-11\.jsonl' matches no file"):
        found(tmp_path, "a-{08..11}.jsonl")
    with pytest.raises(ConfigError, match=r"sources\.web\.path: .* more than 200,000 names"):
        found(tmp_path, "a-{0..99999999}.jsonl")


@pytest.mark.parametrize(
    "name", ["../a", "/etc/passwd", "a/../../b", "", "a\\b", "a\nb", "./a", "x" * 2_000, "a\0b"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    written(tmp_path, "list.json")

    with pytest.raises(IntegrityError, match=r"list\.json: names the file .*stays in the folder"):
        beside(local_file(str(tmp_path / "list.json")), name)


def test_a_file_that_is_named_and_not_there_is_told(tmp_path):
    written(tmp_path, "list.json", "sub/a")
    listing = local_file(str(tmp_path / "list.json"))

    assert beside(listing, "sub/a").path == f"{tmp_path}/sub/a"
    with pytest.raises(IntegrityError, match=r"names gone, which is not there"):
        beside(listing, "gone")
    with pytest.raises(IntegrityError, match=r"names sub, which is not there"):
        beside(listing, "sub")


def test_a_change_of_a_file_beside_is_a_change(tmp_path):
    written(tmp_path, "a.x", "a.idx")
    builds = []

    def indexed():
        file = local_file(str(tmp_path / "a.x"))
        (shard,) = (type(file)(**{**fields(file), "beside": (local_file(f"{tmp_path}/a.idx"),)}),)

        def build(each):
            builds.append(each.path)
            one = np.ones(1, np.int64)
            return FileUnits(rows=one, starts=one - 1, stops=one, content="c")

        cache = IndexCache(folder=tmp_path / "cache", source="web")
        index_of([shard], build, kind="k", cache=cache)
        return shard

    shard = indexed()
    indexed()
    assert len(builds) == 1, "the index was kept"
    (tmp_path / "a.idx").write_text("longer than before")

    with pytest.raises(IntegrityError, match=r"a\.idx: changed since"):
        shard.require_unchanged()
    indexed()
    assert len(builds) == 2


def fields(file):
    return {name: getattr(file, name) for name in type(file).__slots__}


@pytest.mark.parametrize("kind", SOURCE_TYPES)
def test_every_type_has_a_module_that_says_what_it_reads(kind):
    spec = spec_of(kind)

    assert spec.what
    assert spec.names.suffixes or spec.names.manifest or spec.names.never


def test_a_file_of_another_format_says_which(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.jsonl")
    config = JsonlSource(type="jsonl", path="a.jsonl")

    with pytest.raises(
        ConfigError, match=r"sources\.web: .*a\.jsonl is a Parquet file; set type: parquet"
    ):
        open_format(SourceSpec("web", config, base_dir=tmp_path))


def test_a_file_that_begins_as_no_other_is_told_by_its_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    config = ParquetSource(type="parquet", path="a.jsonl", text="text")

    with pytest.raises(
        ConfigError,
        match=r"a\.jsonl is not a Parquet file, but has the name of a file of type jsonl",
    ):
        open_format(SourceSpec("web", config, base_dir=tmp_path))


def test_a_flat_file_of_a_stated_dtype_may_be_called_anything(tmp_path):
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "ids.txt")
    config = NumpySource(type="numpy", path="ids.txt", dtype="uint16", row_tokens=4)

    opened = open_format(SourceSpec("web", config, base_dir=tmp_path))

    assert opened.format.units().rows_U.sum() == 2


def test_a_broken_file_is_not_told_to_be_of_another_format(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"\0" * 100)
    config = ParquetSource(type="parquet", path="a.parquet", text="text")

    with pytest.raises(IntegrityError, match=r"a\.parquet: footer: cannot be decoded"):
        open_format(SourceSpec("web", config, base_dir=tmp_path))


def test_a_host_in_brackets_is_refused_for_what_it_would_be_read_as():
    with pytest.raises(ConfigError, match=r"names its host as '\[::1'.*give the host by name"):
        find_files(["http://[::1"], Path(), source="web")


@pytest.mark.parametrize(
    "url",
    [
        "http://u:pass-of-a-host@[::1/x.jsonl",
        "https://u:pass-of-a-host@[::2/x.jsonl?token=sign-of-a-query",
    ],
)
def test_parts_of_a_url_that_messages_quote_hold_no_secret(tmp_path, url):
    with pytest.raises(ConfigError, match="names its host as") as refused:
        found(tmp_path, url)

    assert "pass-of-a-host" not in str(refused.value)
    assert "sign-of-a-query" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "s3://KEY:SECRET-WORD@bucket/x*.jsonl",
            "Parameter validation failed: Invalid bucket name",
        ),
        ("s3://bucket/x*.jsonl", "Unable to locate credentials"),
    ],
)
def test_what_a_client_of_s3_refuses_is_not_to_be_tried_again(tmp_path, monkeypatch, url, said):
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))

    with pytest.raises(ConfigError, match=said) as refused:
        found(tmp_path, url)

    assert "SECRET-WORD" not in str(refused.value)


@pytest.mark.parametrize(
    ("asked_s", "told"),
    [
        (13.4, "; it was asked for 13 s; try again once it answers"),
        (0.2, "; try again once it answers"),
    ],
)
def test_a_store_that_refuses_is_told_with_how_long_it_was_asked(monkeypatch, asked_s, told):
    times = iter([100.0, 100.0 + asked_s])
    # The module's own clock alone: threads of other tests go by the one of all.
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("omniload.source.patterns.time", clock)

    with (
        pytest.raises(UnavailableError) as error,
        listing("sources.web.path: 's3://bucket/*.jsonl'"),
    ):
        raise ConnectionRefusedError("Could not connect to the endpoint")

    assert str(error.value).startswith("sources.web.path: 's3://bucket/*.jsonl' cannot be listed: ")
    assert str(error.value).endswith(f"Could not connect to the endpoint{told}")
