"""Checkpoints on a striped namespace: what is written, what is refused, what each damage becomes."""

import json
import struct
import subprocess
import sys

import orjson
import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from fusefs.config import Striping
from fusefs.stores.memory import MemoryStore
from fusefs.stores.retry import RetryingStore
from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError
from tests.support.fusefs.builders import contents, object_paths, some_files
from tests.support.fusefs.faulty_store import FaultyStore, Outage
from tests.support.trainer.striped_checkpoints import load_boxes, save_boxes
from trainer_integration.checkpoint.file_digests import sealed_json, unsealed_json
from trainer_integration.checkpoint.striped.index import (
    ITEM_BYTES,
    ChunkToSave,
    Index,
    lay_out,
    shard_name,
)
from trainer_integration.checkpoint.striped.place import open_striped, read_index
from trainer_integration.checkpoint.striped.tensors import DTYPES, dtype_name, units_of
from trainer_integration.checkpoint.striped.writer import StripedWriter, load_striped, save_striped

SHARD = "shard-00001-of-00001.safetensors"


@pytest.fixture
def files():
    with some_files() as built:
        yield built


def tensors():
    return {
        "matrix": torch.arange(12_000, dtype=torch.float32).reshape(100, 120),
        "turned": torch.arange(600).reshape(20, 30).t(),
        "half": torch.tensor(3.5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
    }


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}


def assert_loads(files, folder="c"):
    target = zeros()
    load_striped(target, files, folder)
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors().items())


def rewrite_index(files, change):
    index = unsealed_json(contents(files, "c/index.json"), name="index")
    change(index)
    files.write_file("c/index.json", sealed_json(index))


def test_tensors_of_every_kind_come_back(files):
    save_striped(tensors(), files, "c")

    assert_loads(files)


def test_a_checkpoint_may_lie_in_the_root(files):
    save_striped(tensors(), files, "")

    assert_loads(files, "")


def test_loading_converts_types_and_fills_memory_of_any_layout(files):
    save_striped(tensors(), files, "c")
    target = {
        "matrix": torch.zeros(100, 120, dtype=torch.float64),
        "turned": torch.zeros(20, 30, dtype=torch.int64).t(),
        "half": torch.tensor(0.0),
    }

    load_striped(target, files, "c")

    assert torch.equal(target["matrix"], tensors()["matrix"].double())
    assert torch.equal(target["turned"], tensors()["turned"])
    assert target["half"].item() == 3.5


def test_boxes_that_are_not_read_straight_go_through_little_memory(files, monkeypatch):
    monkeypatch.setattr("trainer_integration.checkpoint.striped.reader._STAGING_BYTES", 4096)
    save_striped(tensors(), files, "c")
    target = {"matrix": torch.zeros(100, 120, dtype=torch.float64)}

    load_striped(target, files, "c")

    assert torch.equal(target["matrix"], tensors()["matrix"].double())


def test_a_shard_is_a_striped_safetensors_file_that_torchs_own_reader_loads(files, tmp_path):
    save_striped(tensors(), files, "c")
    assert files.manifest(f"c/{SHARD}").segments[0].layout.stripe_count == 3
    (tmp_path / SHARD).write_bytes(contents(files, f"c/{SHARD}"))

    with safe_open(tmp_path / SHARD, framework="pt") as opened:
        assert torch.equal(opened.get_tensor("matrix"), tensors()["matrix"])
    target = zeros()
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp_load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors().items())


def test_nothing_in_the_store_is_pickle(files):
    save_striped(tensors(), files, "c")

    index = contents(files, "c/index.json")
    head = contents(files, f"c/{SHARD}")[8:4096]

    assert orjson.loads(index)["version"] == 1
    assert orjson.loads(head)["__metadata__"]["format"] == "pt"
    assert b"\x80\x02" not in index + head


def test_what_is_no_tensor_is_refused_by_name_before_anything_is_written(files):
    with pytest.raises(ConfigError, match=r"'step' is no tensor.*JSON"):
        save_striped({"step": 3, **tensors()}, files, "c")

    assert object_paths(files.store) == []
    with pytest.raises(StateError, match=r"no index\.json"):
        load_striped(zeros(), files, "c")


def test_a_type_that_safetensors_does_not_know_is_refused():
    with pytest.raises(ConfigError, match=r"'x' has dtype torch\.complex64.*convert"):
        dtype_name(torch.complex64, tensor="x")


def test_the_names_of_types_have_the_sizes_torch_gives_them():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES


def test_a_launcher_looks_into_a_checkpoint_without_torch():
    code = "import sys, trainer_integration.checkpoint.place; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_json_is_committed_with_the_tensors(files):
    save_striped(tensors(), files, "c", about={"step": 3, "loader": {"version": 1}})

    about = {"step": 3, "loader": {"version": 1}}
    assert load_striped(zeros(), files, "c") == read_index(files, "c").about == about


def test_a_checkpoint_is_never_overwritten(files):
    save_striped(tensors(), files, "c")

    with pytest.raises(StateError, match="c holds a checkpoint; load it, or save into another"):
        save_striped({}, files, "c")

    assert_loads(files)


def test_shards_that_an_interrupted_save_left_go_with_the_next_save(files):
    files.write_file("c/shard-00007-of-00009.safetensors", bytes(9000))
    files.write_file("c/notes.txt", b"mine")

    save_striped(tensors(), files, "c")

    names = [info.name for info in files.listing("c")]
    assert names == ["index.json", "notes.txt", SHARD]
    assert_loads(files)


def test_a_tensor_that_was_not_saved_or_has_another_size_is_named(files):
    save_striped(tensors(), files, "c")

    with pytest.raises(StateError, match="other"):
        load_striped({"other": torch.zeros(1)}, files, "c")
    with pytest.raises(StateError, match=r"100.*half|half.*100|matrix"):
        load_striped({"matrix": torch.zeros(2)}, files, "c")


def test_a_missing_shard_is_named_with_what_it_held(files):
    save_striped(tensors(), files, "c")
    files.names.remove(f"c/{SHARD}")

    with pytest.raises(IntegrityError, match=rf"c: {SHARD} is missing; it holds 5 tensors"):
        load_striped(zeros(), files, "c")


def test_a_missing_object_is_named_with_its_shard(files):
    save_striped(tensors(), files, "c")
    victim = files.manifest(f"c/{SHARD}").object_paths()[1]
    files.store.remove(victim)

    with pytest.raises(IntegrityError, match=f"{SHARD}.*{victim}.*missing"):
        load_striped(zeros(), files, "c")


def test_a_shard_of_another_size_is_refused(files):
    save_striped(tensors(), files, "c")
    files.write_file(f"c/{SHARD}", bytes(10_000))

    with pytest.raises(IntegrityError, match=f"{SHARD} has 10000 bytes"):
        load_striped(zeros(), files, "c")


def test_an_index_whose_digest_does_not_fit_is_refused(files):
    save_striped(tensors(), files, "c")
    data = bytearray(contents(files, "c/index.json"))
    data[data.index(b'"at": ') + 6] ^= 1
    files.write_file("c/index.json", bytes(data))

    with pytest.raises(IntegrityError, match=r"c/index\.json carries digest"):
        load_striped(zeros(), files, "c")


def test_an_index_of_another_release_is_refused_with_both_versions(files):
    save_striped(tensors(), files, "c")
    rewrite_index(files, lambda index: index.update(version=2))

    with pytest.raises(StateError, match="version 2, this code reads 1"):
        load_striped(zeros(), files, "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["tensors"]["half"].update(dtype="F7"), "dtype 'F7'"),
        (lambda i: i["tensors"]["half"]["chunks"][0].update(at=1 << 40), "'half' lies at"),
        (lambda i: i["tensors"]["half"]["chunks"][0].update(file="../x"), "breaks the format"),
        (lambda i: i["files"].clear(), "which is not listed"),
        (lambda i: i["tensors"]["flags"].update(chunks=[]), "'flags' hold 0 elements, it has 3"),
        (lambda i: i.update(more=1), "breaks the format"),
    ],
)
def test_an_index_that_contradicts_itself_or_leaves_its_folder_is_refused(files, change, message):
    save_striped(tensors(), files, "c")
    rewrite_index(files, change)

    with pytest.raises(IntegrityError, match=message):
        load_striped(zeros(), files, "c")


@pytest.mark.parametrize("call", [("create", 2), ("publish", 1), ("publish", 2)])
def test_a_store_that_fails_in_mid_save_leaves_nothing_that_loads(call):
    store = FaultyStore(MemoryStore(), {call: Outage})
    with some_files(store) as files:
        with pytest.raises(UnavailableError, match="scripted outage"):
            save_striped(tensors(), files, "c")

        store.assert_all_faults_fired()
        with pytest.raises(StateError, match=r"no index\.json"):
            load_striped(zeros(), files, "c")
        save_striped(tensors(), files, "c")
        assert_loads(files)


def test_units_within_a_part_are_views_of_it_and_only_seams_are_copied():
    part = bytearray(range(40))

    units = list(units_of([b"abc", memoryview(part), b"xyz"], 8))

    assert bytes(units[0]) == b"abc" + bytes(range(5))
    assert all(unit.obj is part for unit in units[1:5])
    assert bytes(units[5]) == bytes(range(37, 40)) + b"xyz"


def test_boxes_of_a_file_that_lie_side_by_side_are_read_by_runs_of_units():
    with some_files(
        RetryingStore(MemoryStore()), striping=Striping(unit=4096, count=2), longest_read=1 << 20
    ) as files:
        whole = torch.arange(64 * 1024, dtype=torch.float32).reshape(64, 1024)
        halves = [{("w", (0, 0)): whole[:32]}, {("w", (32, 0)): whole[32:]}]
        save_boxes(files, "c", halves, {"w": whole.size()})
        files.store.calls.clear()
        opening = 3  # of the index, and of the manifest of each of two shards

        target = torch.zeros(64, 1024)
        load_boxes(files, "c", [{("w", (0, 0)): target}])

        assert torch.equal(target, whole)
        # Two shards of two objects each, whatever the number of units.
        assert files.store.calls["read"] <= 4 + 2 * opening


def test_several_boxes_of_a_tensor_on_one_rank_have_names_of_their_own(files):
    whole = torch.arange(40_000)
    boxes = {("w", (at,)): whole[at : at + 10_000] for at in range(0, 40_000, 10_000)}
    save_boxes(files, "c", [boxes], {"w": whole.size()})

    target = torch.zeros_like(whole)
    load_boxes(files, "c", [{("w", (0,)): target}])

    assert torch.equal(target, whole)
    (length,) = {chunk.file for chunk in read_index(files, "c").tensors["w"].chunks}
    assert length == SHARD


def test_a_tensor_that_several_ranks_saved_is_loaded_from_one_of_them(files):
    whole = torch.arange(3000)
    save_boxes(files, "c", [{("w", (0,)): whole}, {("w", (0,)): whole}], {"w": whole.size()})

    target = torch.zeros_like(whole)
    load_boxes(files, "c", [{("w", (0,)): target}])

    assert torch.equal(target, whole)
    assert len(read_index(files, "c").tensors["w"].chunks) == 1


def test_the_header_fills_pages_and_names_every_chunk():
    chunks = [ChunkToSave(tensor="w", dtype="F32", offsets=(at, 0), sizes=(2, 3)) for at in (0, 4)]

    head, starts = lay_out(chunks)

    entries = json.loads(head[8:])
    assert len(head) % 4096 == 0
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    assert starts == (len(head), len(head) + 24)
    assert entries["w@4,0"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 48]}
    custom = json.loads(entries["__metadata__"]["DCP_SHARDING_INFO"])
    assert custom == {"w": {"saved_offsets": [0, 0]}, "w@4,0": {"saved_offsets": [4, 0]}}


def test_a_shards_name_is_its_rank_of_all():
    assert shard_name(3, 12) == "shard-00003-of-00012.safetensors"


def test_an_index_survives_its_own_bytes(files):
    save_striped(tensors(), files, "c")
    index = read_index(files, "c")

    assert Index.decoded(index.encoded(), name="again") == index
    assert index.tensors["matrix"].sizes == (100, 120)


def test_a_checkpoint_of_version_1_is_read(files):
    """Written down by hand: whatever this code becomes, these bytes are read."""
    chunk = {"offsets": [0], "sizes": [3], "file": SHARD, "at": 8}
    index = {
        "version": 1,
        "files": {SHARD: {"size_bytes": 20}},
        "tensors": {"w": {"dtype": "F32", "sizes": [3], "chunks": [chunk]}},
        "about": {"step": 7},
    }
    files.write_file("c/index.json", sealed_json(index))
    files.write_file(f"c/{SHARD}", bytes(8) + struct.pack("<3f", 1.5, -2, 3))

    target = {"w": torch.zeros(3)}
    load_striped(target, files, "c")

    assert target["w"].tolist() == [1.5, -2, 3]
    assert read_index(files, "c").about == {"step": 7}


def test_a_place_is_opened_by_url_with_its_folder_or_as_a_root(tmp_path):
    small = {"striping": {"unit": 4096, "count": 2}}
    files, folder = open_striped(f"omnifs://runs/a::file://{tmp_path}", small)
    save_striped(tensors(), files, folder)

    root, nothing = open_striped(f"file://{tmp_path}", small)

    assert (folder, nothing) == ("runs/a", "")
    assert_loads(root, "runs/a")
    shard = root.manifest(f"runs/a/{SHARD}")
    assert shard.segments[0].layout.stripe_count == 2


def test_dcp_may_name_another_folder_and_is_told_what_is_no_path(files):
    writer = StripedWriter(files, "first")

    writer.reset("second")
    writer.set_up_storage_writer(True)

    assert files.stat("second").kind == "directory"
    assert StripedWriter.validate_checkpoint_id("a/b")
    assert not StripedWriter.validate_checkpoint_id("../b")


def test_a_place_that_names_no_store_is_refused():
    with pytest.raises(ConfigError, match=r"omnifs://FOLDER::STORE"):
        open_striped("omnifs://ckpt")
