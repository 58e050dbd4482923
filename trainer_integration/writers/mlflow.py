"""MLflow: files below RUN/mlruns, or the server that the file or ``MLFLOW_TRACKING_URI`` names."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

# MLflow reads these when it is imported. Without the first, its release 3 refuses the file store; without the second,
# it reports its use to its makers.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric
from typing_extensions import override

from trainer_integration.writers.protocol import MetricWriter
from trainer_integration.writers.record import read_record
from trainer_integration.writers.settings import MlflowConfig

__all__ = ["MlflowWriter"]

_EXPERIMENT = "omniload"
# MLflow refuses a figure with another character in its name.
_NOT_IN_NAMES = re.compile(r"[^\w\-./ :]")


class MlflowWriter(MetricWriter):
    """Writes one run, which later launches continue; MLflow keeps both values of a step that was trained twice."""

    def __init__(self, folder: Path, config: MlflowConfig) -> None:
        files = (folder / "mlruns").resolve().as_uri()
        place = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or files
        self._client = MlflowClient(tracking_uri=place)
        record = read_record(folder)
        if record.mlflow is None:
            default = os.environ.get("MLFLOW_RUN_NAME") or folder.resolve().name
            number = self._new_run(config, config.name or default)
            record = record.model_copy(update={"mlflow": number})
            record.write(folder)
        assert record.mlflow is not None
        self._run_id = record.mlflow
        # The previous launch may have ended it.
        self._client.update_run(self._run_id, status="RUNNING", name=config.name)
        for name, value in config.tags.items():
            self._client.set_tag(self._run_id, name, value)

    def _new_run(self, config: MlflowConfig, name: str) -> str:
        default = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        wanted = config.experiment or default
        found = self._client.get_experiment_by_name(wanted)
        number = self._client.create_experiment(wanted) if found is None else found.experiment_id
        run_id: str = self._client.create_run(number, run_name=name).info.run_id
        return run_id

    @override
    def write(self, step: int, figures: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        named = {_NOT_IN_NAMES.sub("_", name): value for name, value in figures.items()}
        # Stamped with the time of writing, because of two values of a step, MLflow's pages show the later one.
        metrics = [Metric(name, value, now_ms, step) for name, value in named.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    @override
    def go_back(self, step: int) -> None:
        """Do nothing, because the value with the later time belongs to the work that stayed."""

    @override
    def close(self) -> None:
        self._client.set_terminated(self._run_id)
