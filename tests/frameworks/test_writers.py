"""Figures are read back by the tools themselves: TensorBoard's event reader, W&B's offline file, MLflow's client."""

import math
import struct
import warnings

import pytest

from trainer_integration import open_writers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from wandb.proto import wandb_internal_pb2

LOSSES = {0: 4.0, 1: 3.0, 2: 2.0}
AGAIN = {1: 2.5, 2: 1.5, 3: 1.0}
"""After a checkpoint before step 1."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two launches, the second of which trained two steps again."""
    folder = tmp_path_factory.mktemp("run")
    kinds = ["tensorboard", "wandb", "mlflow"]
    for losses, first in ((LOSSES, 0), (AGAIN, 1)):
        with open_writers(kinds, folder, from_step=first) as log:
            for step, loss in losses.items():
                log.write(step, {"loss": loss, "share/web": 0.25, "odd name (é)": math.nan})
    return folder


def test_tensorboard_reads_the_steps_as_they_were_trained_last(run):
    reader = EventAccumulator(str(run / "tensorboard"))
    reader.Reload()

    found = [(event.step, event.value) for event in reader.Scalars("loss")]

    assert found == [(0, 4.0), (1, 2.5), (2, 1.5), (3, 1.0)]
    assert "share/web" in reader.Tags()["scalars"]


def test_wandb_keeps_an_offline_run_for_each_launch_under_one_number(run):
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))

    found = [rows_of(path) for path in files]

    assert [[(row["step"], row["loss"]) for row in rows] for rows in found] == [
        list(LOSSES.items()),
        list(AGAIN.items()),
    ]
    assert len({path.stem for path in files}) == 1
    assert not list(run.glob("wandb/*/files/requirements.txt"))


def rows_of(path):
    """Return the history of an offline run."""
    rows = []
    for record in map(parsed, records_in(path.read_bytes())):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            rows.append({name: float(items[name]) for name in ("step", "loss")})
    return rows


def parsed(data):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    return record


def records_in(held):
    """Yield the records of LevelDB's log format, in which W&B writes: blocks of 32 KiB, 7 bytes before each piece."""
    assert held[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(held):
        if (left := 32_768 - at % 32_768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", held, at + 4)
        whole += held[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # the whole of a record, or the last of it
            yield whole
            whole = b""


def test_mlflow_has_one_run_with_every_value(run):
    client = MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "omniload"]
    (found,) = client.search_runs([experiment.experiment_id])

    history = client.get_metric_history(found.info.run_id, "loss")

    assert sorted((metric.step, metric.value) for metric in history) == sorted(
        [*LOSSES.items(), *AGAIN.items()]
    )
    assert found.info.status == "FINISHED"
    assert found.data.metrics["share/web"] == 0.25


def test_names_and_tags_of_the_settings_are_those_that_the_tools_show(tmp_path):
    settings = {
        "wandb": {"project": "moe", "name": "warm", "group": "night", "tags": ["a", "b"]},
        "mlflow": {
            "experiment": "moe",
            "name": "warm",
            "tags": {"team": "data"},
            "tracking_uri": (tmp_path / "kept").as_uri(),
        },
        "tensorboard": {"folder": "events"},
    }
    with open_writers(settings, tmp_path / "run") as log:
        log.write(0, {"loss": 4.0})

    client = MlflowClient(tracking_uri=(tmp_path / "kept").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("moe").experiment_id])
    assert (run.info.run_name, run.data.tags["team"]) == ("warm", "data")
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    (header,) = [r.run for r in map(parsed, records_in(file.read_bytes())) if r.HasField("run")]
    assert (header.project, header.display_name, header.run_group) == ("moe", "warm", "night")
    assert list(header.tags) == ["a", "b"]
    assert list((tmp_path / "run/events").iterdir())
