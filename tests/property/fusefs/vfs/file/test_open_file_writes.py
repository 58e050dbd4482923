"""A changing file compared with bytes: any writes, cuts, syncs and reads, on a store that is checked afterwards."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fusefs.tools.fsck import verify
from fusefs.vfs.file.open_file import OpenFile, SpoolPlace
from tests.support.fusefs.builders import contents, object_paths, some_files

PATTERN = bytes(range(1, 256)) * 400
offsets = st.one_of(st.integers(0, 70_000), st.sampled_from([0, 4096, 8192, 40_960]))
sizes = st.one_of(st.integers(1, 300), st.sampled_from([4096, 9000, 20_000]))
operations = st.one_of(
    st.tuples(st.just("write"), offsets, sizes),
    st.tuples(st.just("extend"), st.just(0), sizes),
    st.tuples(st.just("truncate"), offsets, st.just(0)),
    st.tuples(st.just("read"), offsets, sizes),
    st.tuples(st.just("sync"), st.just(0), st.just(0)),
    st.tuples(st.just("close"), st.just(0), st.just(0)),
)


@settings(max_examples=80, deadline=None)
@given(start=st.integers(0, 60_000), steps=st.lists(operations, max_size=25))
def test_whatever_is_done_to_a_file_it_holds_what_bytes_would_and_leaves_no_object(start, steps):
    with some_files() as files:
        model = bytearray(PATTERN[:start])
        files.write_file("f", bytes(model))
        body = OpenFile(files, SpoolPlace(), "f", files.open("f"))
        for turn, (kind, offset, size) in enumerate(steps):
            data = PATTERN[turn : turn + size]
            if kind in {"write", "extend"}:
                at = len(model) if kind == "extend" else offset
                model.extend(bytes(max(0, at - len(model))))
                model[at : at + size] = data
                body.write(at, data)
            elif kind == "truncate":
                model = model[:offset] + bytes(max(0, offset - len(model)))
                body.truncate(offset)
            elif kind == "read":
                assert body.read(offset, size, 0) == model[offset : offset + size]
            else:
                body.flush(last=kind == "close")
                assert contents(files, "f") == model
            assert body.size_bytes == len(model)
            if kind == "close":
                body.close()
                body = OpenFile(files, SpoolPlace(), "f", files.open("f"))
        body.flush()
        body.close()

        assert contents(files, "f") == model
        assert verify(files, read_data=True, grace_s=0).harmful == []
        manifest = files.manifest("f")
        assert object_paths(files.store) == sorted(manifest.object_paths() if manifest else [])
