"""States of Mosaic Streaming become the records that it had handed out, compared with its real batches."""

import json
from collections import Counter
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from omniload.base.errors import ConfigError, StateError
from omniload.importing.fields import Fields, Report
from omniload.importing.llm_foundry import order_settings
from omniload.importing.mosaic_states import MosaicState, Stream, drawn_of, read_mosaic_state

MOSAIC = json.loads((Path(__file__).parent / "mosaic_streaming.json").read_text())
STATE = {
    "epoch": 1,
    "sample_in_epoch": 8,
    "num_canonical_nodes": 2,
    "shuffle_seed": 9176,
    "initial_physical_nodes": 1,
}


def streams_of(shares):
    return [
        Stream(
            source=name,
            shards={f"shard.{i:05}.mds": size for i, size in enumerate(MOSAIC["shards"][name])},
            key=next(iter(share), ""),
            value=next(iter(share.values()), 1.0),
        )
        for name, share in shares.items()
    ]


def drawn(state, shares, **settings):
    """Return the samples that are left out of each source, as Mosaic numbers them, and the report."""
    report = Report()
    dataset = Fields({"shuffle_block_size": 48, **settings}, "dataset", report)
    found = drawn_of(MosaicState.of(state), order_settings(dataset), streams_of(shares), report)
    report.raise_faults("train.yaml")
    numbers = {}
    for name in shares:
        sizes = MOSAIC["shards"][name]
        begins = dict(
            zip(
                (f"shard.{i:05}.mds" for i in range(len(sizes))),
                [0, *accumulate(sizes)],
                strict=False,
            )
        )
        shards = found.get(name, {})
        numbers[name] = sorted(
            begins[shard] + int(record) for shard, records in shards.items() for record in records
        )
    return numbers, "\n".join(report.notes)


def drawn_most(run, name):
    """Return the samples of a source that Mosaic handed out more often than the one it handed out least."""
    times = Counter(sample for epoch in run["seen"] for source, sample in epoch if source == name)
    samples = range(sum(MOSAIC["shards"][name]))
    least = min(times[sample] for sample in samples)
    return [sample for sample in samples if times[sample] > least]


@pytest.mark.parametrize("run", MOSAIC["runs"], ids=lambda run: run["name"])
def test_what_mosaic_handed_out_is_left_out(run):
    found, _ = drawn(run["state"], run["streams"], **run["settings"])

    assert found == {name: drawn_most(run, name) for name in run["streams"]}


def test_the_runs_that_are_compared_with_left_something():
    some = [run for run in MOSAIC["runs"] if drawn_most(run, "web")]

    assert len(some) >= len(MOSAIC["runs"]) - 1  # one ended with its epoch


def test_what_was_taken_for_the_order_is_noted():
    _, notes = drawn(STATE, {"web": {}}, shuffle=True, shuffle_block_size=None)

    assert "epoch 1, 8 of 132 samples drawn" in notes
    assert "shuffled by py1e with shuffle_block_size 2000000" in notes
    assert "8 of 132 records of web are left out of its first epoch" in notes


def test_a_dataset_that_does_not_say_shuffle_is_in_order():
    found, notes = drawn(STATE | {"num_canonical_nodes": 1}, {"web": {}})

    assert found == {"web": list(range(8))}
    assert "not shuffled" in notes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shuffle_algo": "py1b"}, r"dataset\.shuffle_algo: is 'py1b'; of naive, py1br"),
        ({"shuffle_algo": "none"}, r"dataset\.shuffle_algo: is 'none'"),
        ({"shuffle": "yes"}, r"dataset\.shuffle: 'yes' is no bool"),
        ({"batching_method": "per_stream"}, r"batching_method: is 'per_stream': its order is not"),
        ({"sampling_method": "odd"}, r"sampling_method: is 'odd'; balanced and fixed"),
        ({"shuffle_block_size": 2}, r"shuffle_block_size: is 2; it is from 4"),
        ({"epoch_size": "10k"}, r"epoch_size: '10k' is no int"),
        ({"epoch_size": -1}, r"epoch_size: is -1; it is from 1"),
        ({"sampling_granularity": 0}, r"sampling_granularity: is 0; it is from 1"),
    ],
)
def test_settings_of_which_the_order_is_not_known_refuse_the_import(settings, said):
    with pytest.raises(ConfigError, match=said):
        drawn(STATE, {"web": {}}, **settings)


@pytest.mark.parametrize(
    ("change", "shares", "said"),
    [
        ({"sample_in_epoch": 265}, {"web": {}}, "265 samples were drawn of an epoch of 132"),
        ({"num_canonical_nodes": 132}, {"web": {}}, "an epoch has 132 samples, not more than"),
        ({"epoch": 1 << 30}, {"web": {"choose": 10}}, "1073741825 epochs of 10 samples"),
        ({}, {"web": {"repeat": 1e300}}, "more than 2147483648"),
        ({}, {"web": {"proportion": 0}}, "proportions that sum to 0"),
        ({}, {"web": {"proportion": 1e308}, "code": {"proportion": 1e308}}, "that sum to inf"),
    ],
)
def test_states_of_other_data_or_too_much_of_it_are_refused(change, shares, said):
    with pytest.raises(ConfigError, match=said):
        drawn(STATE | change, shares)


class TestOf:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"epoch": -1}, "-1 is not a whole number from 0"),
            ({"epoch": True}, "True is not a whole number"),
            ({"sample_in_epoch": 1 << 40}, "is not a whole number from 0 to 2147483647"),
            ({"num_canonical_nodes": 0}, "0 is not a whole number from 1"),
            ({"shuffle_seed": [[]]}, "a list of 1 is not a whole number"),
            ({"stream": 1}, "'stream', which is not known"),
        ],
    )
    def test_a_number_out_of_range_or_an_unknown_key_is_refused(self, change, said):
        with pytest.raises(StateError, match=said):
            MosaicState.of(STATE | change)

    def test_states_from_before_physical_nodes_were_kept_are_read(self):
        state = {key: value for key, value in STATE.items() if key != "initial_physical_nodes"}

        assert MosaicState.of(state) == MosaicState.of(STATE)


class TestReadMosaicState:
    def test_json_is_read(self, tmp_path):
        (tmp_path / "state.json").write_text(json.dumps(STATE))

        assert read_mosaic_state(tmp_path / "state.json").sample_in_epoch == 8

    @pytest.mark.parametrize("head", [b"\x80\x02}q\x00.", b"PK\x03\x04data.pkl"])
    def test_a_checkpoint_of_torch_is_refused_and_not_loaded(self, tmp_path, head):
        (tmp_path / "ep0.pt").write_bytes(head)

        with pytest.raises(StateError, match=r"ep0\.pt: is a pickle.* never loaded; write its"):
            read_mosaic_state(tmp_path / "ep0.pt")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"[" * 100_000, "is no JSON"),
            (b"\xff\xfe", "is no JSON"),
            (b"[1]", "holds a list of 1, no object"),
            (b"{}", "has no epoch, and holds nothing"),
            (b'{"version": 2, "step": 3}', "and holds 'version', 'step'"),
            (b"1" * 5_000, "is no JSON"),
        ],
    )
    def test_what_is_no_state_is_refused(self, tmp_path, content, said):
        (tmp_path / "state.json").write_bytes(content)

        with pytest.raises(StateError, match=said):
            read_mosaic_state(tmp_path / "state.json")

    def test_a_large_file_is_refused_before_it_is_read(self, tmp_path):
        (tmp_path / "state.json").write_bytes(b" " * ((1 << 20) + 1))

        with pytest.raises(ConfigError, match=r"more than 1(\.0)? MiB"):
            read_mosaic_state(tmp_path / "state.json")


def test_records_are_numbered_within_their_shards():
    report = Report()
    stream = Stream(source="web", shards={"a": 3, "b": 4}, key="", value=1.0)
    state = MosaicState.of(STATE | {"sample_in_epoch": 5, "num_canonical_nodes": 1})

    found = drawn_of(state, order_settings(Fields({}, "dataset", report)), [stream], report)

    assert {name: np.asarray(at).tolist() for name, at in found["web"].items()} == {
        "a": [0, 1, 2],
        "b": [0, 1],
    }
