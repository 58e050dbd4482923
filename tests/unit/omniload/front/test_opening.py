"""Refusals of ``omniload.open`` before a source is touched."""

import os
import sys

import numpy as np
import pytest

import omniload
from omniload.base.errors import ConfigError, StateError
from omniload.batch.arrays import NumpyArrays
from omniload.front.delivery import BatchForm
from omniload.front.launch import Place
from omniload.front.opening import form_at
from omniload.mix.config import JsonlSource
from omniload.source.formats.opening import shards_of
from tests.support.plane.builders import a_mix

MIX = {
    "version": 1,
    "seed": 1,
    "tokenizer": {"type": "bytes"},
    "sources": {"web": {"type": "text", "path": "*.txt"}},
    "mix": {"stages": [{"from_step": 0, "weights": {"web": 1}}]},
    "pack": {"length": 8},
    "batch": {"tokens": 16, "micro_tokens": 8},
}


@pytest.mark.parametrize("steps", [0, -1, 3.0, "3", True])
def test_steps_that_are_no_number_of_steps_are_refused(steps):
    with pytest.raises(ConfigError, match=r"^steps is .*; give the number of steps"):
        omniload.open(MIX, steps=steps)


@pytest.mark.parametrize("run_dir", ["", 5])
def test_a_folder_of_the_run_that_is_no_path_is_refused(run_dir):
    with pytest.raises(ConfigError, match=r"^run_dir is .*; give the path of a folder"):
        omniload.open(MIX, run_dir=run_dir)


def test_a_folder_of_the_run_whose_name_is_no_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^run_dir is .*caf\\udce9' is not UTF-8; rename"):
        omniload.open(MIX, run_dir=tmp_path / os.fsdecode(b"caf\xe9"))


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "60", None])
def test_a_timeout_that_is_no_time_is_refused(timeout):
    with pytest.raises(ConfigError, match=r"^timeout is .*; give the seconds"):
        omniload.open(MIX, timeout=timeout)


@pytest.mark.parametrize(
    "keywords", [{"arrays": "numpy", "device": "cpu"}, {"arrays": "torch", "device": "gpu"}]
)
def test_a_device_that_cannot_be_used_is_refused(keywords):
    with pytest.raises(ConfigError, match=r"device 'cpu'|device 'gpu'"):
        omniload.open(MIX, **keywords)


def test_costs_that_are_to_be_fitted_without_a_folder_for_times_are_told_of(tmp_path, caplog):
    omniload.open(MIX, rank=0, world_size=2, fit_every=9, arrays="numpy", run_dir=tmp_path)
    assert not caplog.records

    omniload.open(MIX, rank=0, world_size=2, fit_every=9, arrays="numpy")

    (record,) = caplog.records
    assert "give run_dir=" in record.message


def test_a_state_that_is_none_is_refused_before_the_sources_are_looked_for(tmp_path):
    for state in ("state.json", tmp_path / "state.json", [1]):
        with pytest.raises(StateError, match=r"state is .*pass the result of state_dict"):
            omniload.open(MIX, state=state)


def test_steps_may_be_a_number_of_numpy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text of a document", encoding="utf-8")

    with omniload.open(MIX, steps=np.int64(2), arrays="numpy") as loader:
        assert [batch.step for batch in loader] == [0, 1]


@pytest.mark.parametrize("is_asked_first", [False, True], ids=["", "a host asks for the state"])
def test_a_state_that_is_loaded_before_the_first_batch_keeps_what_the_run_recorded(
    tmp_path, monkeypatch, caplog, is_asked_first
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text of a document", encoding="utf-8")

    def steps_recorded():
        (journal,) = tmp_path.glob("run/journal.jsonl*")
        return len(journal.read_text().splitlines()) - 1  # the first line is no step

    with omniload.open(MIX, run_dir="run", steps=6, arrays="numpy") as loader:
        for _ in range(4):
            loader.next_batch()
        state = loader.state_dict()
    assert steps_recorded() == 6

    with omniload.open(MIX, run_dir="run", steps=9, arrays="numpy") as loader:
        if is_asked_first:
            assert loader.state_dict() == {}
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert steps_recorded() == 6
        assert [batch.step for batch in loader] == [4, 5, 6, 7, 8]
    assert steps_recorded() == 9
    assert not caplog.records


def test_a_run_that_is_new_is_open_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="matches no file"):
        omniload.open(MIX, run_dir="run", arrays="numpy")


@pytest.mark.parametrize("path", ["**/*", "*/*.json", "./*/logs/*", "*/[jk]*.{md,jsonl}"])
def test_a_source_that_would_take_the_files_of_its_own_run_is_refused_at_the_first_start(
    tmp_path, monkeypatch, path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text of a document", encoding="utf-8")
    mix = MIX | {"sources": {"web": {"type": "text", "path": path}}}

    with pytest.raises(
        ConfigError, match=r"takes .*/run/.*, which this run writes: .* put run_dir elsewhere"
    ):
        omniload.open(mix, run_dir="run", arrays="numpy")


def test_no_file_of_any_run_is_data_of_a_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text of a document", encoding="utf-8")
    with omniload.open(MIX, run_dir="run", steps=2, arrays="numpy") as loader:
        list(loader)
    held = [file for file in tmp_path.glob("run/**/*") if file.is_file() and file.name[0] != "."]

    assert len(held) >= 6
    for file in held:
        with pytest.raises(ConfigError, match="is no data"):
            shards_of("web", JsonlSource(type="jsonl", path=str(file)), base_dir=tmp_path)


class TwoByTwo:
    """A mesh of two ranks along dp, each with two along tp; ``at`` is one of them."""

    mesh_dim_names = ("dp", "tp")
    mesh = np.arange(4).reshape(2, 2)

    def __init__(self, *at):
        self.at = at

    def size(self, mesh_dim):
        return 2

    def get_coordinate(self):
        return self.at


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize(("at", "leads"), [((0, 0), True), ((0, 1), False), ((1, 0), True)])
def test_a_loader_says_how_many_ranks_there_are_and_whether_it_speaks_for_its_peers(
    tmp_path, at, leads, has_folder
):
    run_dir = tmp_path if has_folder else None
    rank = 2 * at[0] + at[1]

    loader = omniload.open(MIX, mesh=TwoByTwo(*at), rank=rank, world_size=4, run_dir=run_dir)

    assert (loader.num_ranks, loader.leads, loader.run_dir) == (2, leads, run_dir)


@pytest.mark.parametrize(
    ("strategy", "peer", "ranks"),
    [("balanced", 0, ()), ("hybrid", 1, (0, 2, 1, 3))],
)
def test_a_rank_is_handed_images_of_its_own_where_a_strategy_deals_them(strategy, peer, ranks):
    place = Place(dp_rank=0, dp_size=2, peers=(0, 2), ranks=(0, 2, 1, 3))

    mix = a_mix(balance={"strategy": strategy})

    form = form_at(BatchForm(arrays=NumpyArrays()), place, 2, mix)

    assert (form.peer, form.ranks) == (peer, ranks)


def test_a_rank_that_cannot_join_because_ray_is_missing_has_the_line_that_installs_it(
    tmp_path, monkeypatch
):
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.delitem(sys.modules, "omniload.actors.ray.environment", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "meet").mkdir()
    mix = {**MIX, "sources": {"web": {"type": "text", "path": str(tmp_path / "*.txt")}}}

    with (
        omniload.open(
            mix, rank=1, world_size=2, address=str(tmp_path / "meet"), arrays="numpy"
        ) as loader,
        pytest.raises(
            ConfigError, match=r"needs the package ray.*pip install 'omniload-data\[ray\]'"
        ),
    ):
        loader.next_batch()
