"""States of loaders in a checkpoint's folder, one file per rank."""

import errno
import pickle
from pathlib import Path

import pytest
import torch

from omniload.base.errors import StateError
from trainer_integration.hosts.rank_states import has_states, load_states, save_states


def saved(folder, ranks=2):
    for rank in range(ranks):
        save_states(folder, [{"at": rank, "kept": torch.arange(rank)}], rank=rank, world_size=ranks)
    return folder


def test_each_rank_gets_its_own_state(tmp_path):
    folder = saved(tmp_path / "checkpoint")

    for rank in range(2):
        (state,) = load_states(folder, 1, rank=rank, world_size=2)
        assert state["at"] == rank
        assert state["kept"].tolist() == list(range(rank))
    assert sorted(path.suffix for path in folder.iterdir()) == [".pt", ".pt"]


def test_a_folder_of_another_loader_holds_none(tmp_path):
    assert not has_states(tmp_path)
    assert has_states(saved(tmp_path))


def test_a_missing_rank_is_named(tmp_path):
    saved(tmp_path)
    (tmp_path / "omniload_loaders_rank1.pt").unlink()

    with pytest.raises(StateError, match=r"states of 1 rank and none of rank 1"):
        load_states(tmp_path, 1, rank=1, world_size=2)


def test_another_number_of_ranks_is_refused_but_for_a_mix(tmp_path):
    saved(tmp_path)

    with pytest.raises(StateError, match=r"rank 0 of 2, this is rank 0 of 1"):
        load_states(tmp_path, 1, rank=0, world_size=1)
    assert load_states(tmp_path, 1, rank=0, world_size=1, elastic=True)[0]["at"] == 0
    assert load_states(tmp_path, 1, rank=5, world_size=6, elastic=True)[0]["at"] == 0


def test_another_number_of_loaders_is_refused(tmp_path):
    saved(tmp_path)

    with pytest.raises(StateError, match="states of 1 loaders, this run has 2"):
        load_states(tmp_path, 2, rank=0, world_size=2)


class Harmful:
    def __reduce__(self):
        return (pytest.fail, ("code from a checkpoint ran",))


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"no torch file", pickle.dumps(Harmful(), protocol=2)),
        *(b"\x80\x02e.", b"\x80\x02h\x05.", b"\x80\x02X\x05"),
    ],
    ids=["empty", "text", "code", "no-list", "no-memo", "no-length"],
)
def test_a_damaged_file_is_refused_and_nothing_in_it_is_run(content, tmp_path):
    saved(tmp_path)
    (tmp_path / "omniload_loaders_rank0.pt").write_bytes(content)

    with pytest.raises(StateError, match="is damaged"):
        load_states(tmp_path, 1, rank=0, world_size=2)


@pytest.mark.parametrize(
    ("note", "told"),
    [
        ([], "holds a list"),
        ({"version": 2}, "rank state has version 2"),
        ({"version": 1, "world_size": 1, "loaders": 3}, "states of 3 loaders"),
    ],
    ids=["list", "version", "loaders"],
)
def test_a_file_of_another_form_is_refused(note, told, tmp_path):
    torch.save(note, tmp_path / "omniload_loaders_rank0.pt")

    with pytest.raises(StateError, match=told):
        load_states(tmp_path, 1, rank=0, world_size=1)


def test_states_that_cannot_be_put_in_place_leave_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "replace", refuse)

    with pytest.raises(OSError, match="Input/output error"):
        save_states(tmp_path, [{"at": 1}], rank=0, world_size=1)

    assert list(tmp_path.iterdir()) == []
