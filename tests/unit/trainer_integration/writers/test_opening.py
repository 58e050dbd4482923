"""Writers behind one queue: what each is told, and what becomes of one that fails, is slow or is missing."""

import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from omniload.base.errors import ConfigError, StateError
from trainer_integration.run.run_log import RunLog, StepLine, figures_of
from trainer_integration.writers import opening
from trainer_integration.writers.opening import Writers, open_writers
from trainer_integration.writers.record import RECORD_NAME, read_record

LIMIT_S = 60


class Told:
    """A writer that keeps what it is told."""

    def __init__(self, fails_at=None):
        self.calls, self.fails_at = [], fails_at

    def write(self, step, figures):
        if step == self.fails_at:
            raise OSError("No space left on device")
        self.calls.append((step, dict(figures)))

    def go_back(self, step):
        self.calls.append(("back", step))

    def close(self):
        self.calls.append("closed")


def a_step(step, **changes):
    given = {
        "attempt": 0,
        "step": step,
        "loss": 2.5,
        "balance_loss": 0.0,
        "grad_norm": 1.0,
        "lr": 0.1,
        "tokens": 100,
        "seconds": 0.5,
        "wait_s": (0.1, 0.3),
        "compute_s": (0.2, 0.2),
        "imbalance": 1.0,
        "bound": 1.0,
        "tokens_by_source": {"web": 75, "code": 25},
        "digest": None,
    }
    return StepLine(**given | changes)


def test_steps_come_in_order_and_before_the_end():
    told = Told()
    with Writers({"told": lambda: told}) as writers:
        for step in range(3):
            writers.write(step, {"loss": float(step)})

    assert told.calls == [(0, {"loss": 0}), (1, {"loss": 1}), (2, {"loss": 2}), "closed"]


def test_a_step_that_is_trained_again_takes_the_place_of_those_behind_it():
    told = Told()
    with Writers({"told": lambda: told}) as writers:
        for step in (0, 1, 2, 1, 2):
            writers.write(step, {})

    assert told.calls == [(0, {}), (1, {}), (2, {}), ("back", 1), (1, {}), (2, {}), "closed"]


@pytest.mark.parametrize(("from_step", "expected"), [(0, []), (7, [("back", 7)])])
def test_a_run_that_is_resumed_takes_the_place_of_what_earlier_launches_wrote(from_step, expected):
    told = Told()
    with Writers({"told": lambda: told}, from_step) as writers:
        writers.write(from_step, {})
        writers.write(from_step + 1, {})

    assert told.calls[:-3] == expected


def test_a_writer_that_fails_is_left_out_and_the_others_go_on(caplog):
    broken, told = Told(fails_at=1), Told()
    with Writers({"broken": lambda: broken, "told": lambda: told}) as writers:
        for step in range(3):
            writers.write(step, {})

    assert [call[0] for call in told.calls[:-1]] == [0, 1, 2]
    assert broken.calls == [(0, {})]
    assert "broken fails at step 1 and is left out" in caplog.text
    assert "No space left" in caplog.text


def test_a_writer_that_cannot_be_opened_is_left_out_and_the_others_go_on(caplog):
    def unreached():
        raise ConnectionError("Max retries exceeded")

    told = Told()
    with Writers({"unreached": unreached, "told": lambda: told}) as writers:
        writers.write(0, {})

    assert told.calls == [(0, {}), "closed"]
    assert "unreached cannot be opened and is left out" in caplog.text
    assert "Max retries exceeded" in caplog.text


def test_nobody_waits_for_a_writer_that_is_slow_to_open_and_it_misses_nothing():
    goes_on, told = threading.Event(), Told()

    def slow_to_open():
        assert goes_on.wait(LIMIT_S)
        return told

    with Writers({"slow": slow_to_open}) as writers:
        writers.write(0, {})
        assert told.calls == []
        goes_on.set()

    assert told.calls == [(0, {}), "closed"]


@pytest.fixture
def tool(monkeypatch):
    """A module of a tool that is installed and refuses to be opened."""

    class Refusing:
        def __init__(self, _folder, _config):
            raise RuntimeError("api_key not configured")

    module = ModuleType("trainer_integration.writers.wandb")
    module.WandbWriter = Refusing
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(opening, "find_spec", lambda name: ModuleSpec(name, None, origin="here"))
    return module


def test_a_tool_that_refuses_to_be_opened_ends_no_run(tmp_path, tool, caplog):
    with open_writers(["wandb"], tmp_path) as writers:
        writers.write(0, {})

    assert "wandb cannot be opened and is left out" in caplog.text
    assert "api_key not configured" in caplog.text


def test_a_tool_that_cannot_be_imported_ends_no_run(tmp_path, tool, monkeypatch, caplog):
    def broken(_name):
        raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setattr(opening, "import_module", broken)
    with open_writers(["wandb"], tmp_path) as writers:
        writers.write(0, {})

    assert "Descriptors cannot be created directly" in caplog.text


def test_numbers_of_another_release_are_refused_before_anything_is_opened(tmp_path, tool):
    (tmp_path / RECORD_NAME).write_text('{"version": 99}')

    with pytest.raises(StateError, match=r"writers\.json: is not of this release"):
        open_writers(["wandb"], tmp_path)


def test_nobody_waits_for_a_slow_writer_and_what_it_misses_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(opening, "_MOST_WAITING", 2)
    goes_on = threading.Event()

    class Slow(Told):
        def write(self, step, figures):
            assert goes_on.wait(LIMIT_S)
            super().write(step, figures)

    slow = Slow()
    writers = Writers({"slow": lambda: slow})
    for step in range(50):
        writers.write(step, {})
    goes_on.set()
    writers.close()

    assert 2 <= len(slow.calls) - 1 <= 4
    assert caplog.text.count("are lost until it catches up") == 1


def test_closing_waits_no_longer_than_its_limit(monkeypatch, caplog):
    monkeypatch.setattr(opening, "_CLOSE_S", 0.05)
    goes_on = threading.Event()

    class Stuck(Told):
        def write(self, step, figures):
            assert goes_on.wait(LIMIT_S)

    writers = Writers({"stuck": Stuck})
    writers.write(0, {})
    writers.close()
    goes_on.set()

    assert "stuck did not end within 0 s" in caplog.text


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(opening, "find_spec", lambda _: None)

    with pytest.raises(ConfigError, match=rf"{kind}, .* pip install 'omniload-data\[{kind}\]'"):
        open_writers([kind], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_a_tool_is_not_its_package(tmp_path, monkeypatch):
    """W&B leaves a folder ``wandb`` where a run was started: Python takes it for a package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    if opening.find_spec("wandb").origin is not None:
        pytest.skip("wandb is installed here")

    with pytest.raises(ConfigError, match="needs the package wandb"):
        open_writers(["wandb"], tmp_path)


def test_an_unknown_writer_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"'wandbb' is not known; choose among \['tensorboard'"):
        open_writers(["wandbb"], tmp_path)


def test_a_run_keeps_its_number_and_a_damaged_record_is_refused(tmp_path):
    number = read_record(tmp_path).wandb

    assert read_record(tmp_path).wandb == number
    (tmp_path / RECORD_NAME).write_text('{"version": 1, "wandb": "../../x"}')
    with pytest.raises(StateError, match=r"writers\.json: is not of this release"):
        read_record(tmp_path)


def test_the_log_of_a_run_passes_on_the_figures_of_every_step(tmp_path):
    told = Told()
    with Writers({"told": lambda: told}) as writers, RunLog(tmp_path, writers=writers) as log:
        log.write(a_step(3))

    assert told.calls[0] == (3, figures_of(a_step(3)))


def test_figures_are_numbers_by_name_and_leave_out_what_was_not_logged():
    figures = figures_of(a_step(3, z_loss=0.5))

    assert figures["tokens_per_s"] == 200
    assert figures["wait_s"] == 0.3
    assert (figures["share/web"], figures["share/code"]) == (0.75, 0.25)
    assert figures["z_loss"] == 0.5
    assert "drop_rate" not in figures
    assert figures_of(a_step(0, seconds=0.0, tokens_by_source={}))["tokens_per_s"] == 0
