"""TensorBoard: event files, which ``tensorboard --logdir RUN/tensorboard`` draws."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from typing_extensions import override

from trainer_integration.writers.protocol import MetricWriter
from trainer_integration.writers.settings import TensorBoardConfig

__all__ = ["TensorBoardWriter"]


class TensorBoardWriter(MetricWriter):
    """Writes an event file, one for each launch."""

    def __init__(self, folder: Path, config: TensorBoardConfig) -> None:
        self._file = EventFileWriter(str(folder / config.folder))

    @override
    def write(self, step: int, figures: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._file.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    @override
    def go_back(self, step: int) -> None:
        # At this mark, TensorBoard itself drops the figures that it has read of this step and later ones.
        mark = SessionLog(status=SessionLog.START)
        self._file.add_event(Event(wall_time=time.time(), step=step, session_log=mark))

    @override
    def close(self) -> None:
        self._file.close()
