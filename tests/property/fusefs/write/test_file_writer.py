"""Files compared with bytes: data written in any parts reads back in any ranges."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fusefs.format.attributes import Attributes
from fusefs.format.manifest_header import MAGIC
from fusefs.tree.file_attributes import set_attributes
from tests.support.fusefs.builders import contents, object_paths, tiny_files

chunks = st.lists(st.binary(max_size=40), max_size=12)
layouts = {"unit": st.integers(4, 12), "count": st.integers(1, 5)}


@settings(max_examples=60, deadline=None)
@given(parts=chunks, draw=st.data(), **layouts)
def test_a_file_written_in_any_parts_reads_back_by_any_range(parts, draw, unit, count):
    data = b"".join(parts)
    with tiny_files(unit=unit, count=count) as files:
        writer = files.writers.file("f")
        for part in parts:
            writer.write(part)
        assert writer.size_bytes == len(data)
        files.publish("f", writer.finish())

        assert files.stat("f").size_bytes == len(data)
        with files.open("f") as file:
            for _ in range(5):
                start = draw.draw(st.integers(0, len(data) + 3))
                size = draw.draw(st.integers(0, len(data) + 3))
                assert file.reader.read(start, size) == data[start : start + size]
                again = file.reader.try_read(start, size)
                assert again is not None
                assert again == data[start : start + size]


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.binary(max_size=30), st.booleans()), max_size=10), **layouts)
def test_after_every_sync_the_published_file_holds_all_written_so_far_and_nothing_is_left_over(
    steps, unit, count
):
    with tiny_files(unit=unit, count=count) as files:
        writer, data = files.writers.file("f"), b""
        for part, sync in steps:
            writer.write(part)
            data += part
            if sync:
                files.publish("f", writer.sync())
                assert contents(files, "f") == data
        files.publish("f", writer.finish())

        assert contents(files, "f") == data
        manifest = files.manifest("f")
        named = manifest.object_paths() if manifest is not None else []
        assert object_paths(files.store) == sorted(named)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.binary(max_size=30), max_size=8), **layouts)
def test_appending_in_turns_is_writing_in_one_go(parts, unit, count):
    with tiny_files(unit=unit, count=count) as files:
        files.write_file("f", b"")
        for part in parts:
            with files.open("f") as file:
                writer = files.writers.appending("f", file.manifest, file.reader)
            writer.write(part)
            files.publish("f", writer.finish())

        assert contents(files, "f") == b"".join(parts)
        manifest = files.manifest("f")
        if manifest is not None:
            short = [s for s in manifest.segments[:-1] if s.size_bytes < unit]
            assert short == []


@settings(max_examples=30, deadline=None)
@given(
    data=st.binary(max_size=200),
    mode=st.integers(0, 0o7777),
    mtime_ns=st.integers(0, 2**60),
    **layouts,
)
def test_attributes_come_and_go_without_touching_the_bytes(data, mode, mtime_ns, unit, count):
    with tiny_files(unit=unit, count=count, plain_limit=64) as files:
        files.write_file("f", data)

        set_attributes(files, "f", Attributes(mode=mode))
        set_attributes(files, "f", Attributes(mtime_ns=mtime_ns, xattrs={"user.a": b"\0b"}))

        info = files.stat("f")
        assert (info.mode, info.mtime_ns, info.size_bytes) == (mode, mtime_ns, len(data))
        assert files.manifest("f").xattrs == {"user.a": b"\0b"}
        assert contents(files, "f") == data


@given(st.binary(max_size=20))
def test_a_users_file_that_looks_like_a_manifest_is_kept_as_data(rest):
    with tiny_files(unit=64) as files:
        files.write_file("f", MAGIC + rest)

        assert contents(files, "f") == MAGIC + rest
