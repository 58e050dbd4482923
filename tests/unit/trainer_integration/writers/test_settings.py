"""The section ``log`` of a training file: both forms, what is refused and where, and what is kept of it."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from omniload.base.errors import ConfigError
from trainer_integration.config import TrainConfig, load_train
from trainer_integration.run import launch_plan
from trainer_integration.writers import opening
from trainer_integration.writers.opening import open_writers
from trainer_integration.writers.settings import LogConfig, WandbConfig, as_log

SMALLEST = "version: 1\nmix: mix.yaml\nsteps: 100\n"


def a_file(folder, text):
    path = folder / "train.yaml"
    path.write_text(SMALLEST + text)
    return path


def log_of(folder, text):
    return load_train(a_file(folder, text))[0].log


def test_a_list_of_names_takes_the_defaults_of_each(tmp_path):
    log = log_of(tmp_path, "log: [wandb, tensorboard]\n")

    assert log.kinds == ("tensorboard", "wandb")
    assert log.wandb == WandbConfig()
    assert log == log_of(tmp_path, "log:\n  tensorboard: {}\n  wandb:\n")


def test_no_section_is_no_tool(tmp_path):
    assert log_of(tmp_path, "").kinds == ()


def test_settings_are_taken_by_name(tmp_path):
    log = log_of(
        tmp_path,
        "log:\n  wandb: {project: moe, mode: online, tags: [a]}\n"
        "  mlflow: {tracking_uri: 'https://ml.example:5000/x', tags: {team: data}}\n",
    )

    assert (log.wandb.project, log.wandb.mode, log.wandb.tags) == ("moe", "online", ("a",))
    assert log.mlflow.tags == {"team": "data"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("log: [tensorboard,\n  wandbb]\n", r"yaml:5: log\.1: writer 'wandbb' is not known"),
        ("log:\n  wandb: {projct: moe}\n", r"yaml:5: log\.wandb\.projct: .*did you mean 'project'"),
        ("log:\n  wandb:\n    mode: on\n", r"yaml:6: log\.wandb\.mode: found 'on'; give 'offline'"),
        ("log:\n  mlflow: {tracking_uri: 'ftp://x'}\n", r"yaml:5: log\.mlflow\.tracking_uri"),
        ('log:\n  wandb: {name: "a\\nb"}\n', r"yaml:5: log\.wandb\.name"),
        ("log: tensorboard\n", r"yaml:4: log: "),
    ],
)
def test_a_fault_names_its_line(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        load_train(a_file(tmp_path, text))


@pytest.mark.parametrize(
    "settings",
    [
        "mlflow: {tracking_uri: 'https://me:hunter2@ml.example'}",
        "wandb: {base_url: 'https://hunter2@w.example'}",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(tmp_path, settings):
    with pytest.raises(
        ConfigError, match=r"train\.yaml:5: .* names a user for .\.?.*example"
    ) as told:
        load_train(a_file(tmp_path, f"log:\n  {settings}\n"))

    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    "uri",
    [
        "http:bob:hunter2@ml.example",
        "http:/bob:hunter2@ml.example",
        "http:///bob:hunter2@ml.example",
        "https:\\\\bob:hunter2@ml.example",
    ],
)
def test_a_url_without_a_host_or_with_backslashes_is_refused_and_not_repeated(tmp_path, uri):
    with pytest.raises(
        ConfigError, match=r"yaml:5: .*mlflow\.tracking_uri: names no host; write https?://HOST"
    ) as told:
        load_train(a_file(tmp_path, f"log:\n  mlflow: {{tracking_uri: '{uri}'}}\n"))

    assert "hunter2" not in str(told.value)


def test_a_database_as_the_place_of_runs_is_told_how_to_reach_it(tmp_path):
    uri = "postgresql://bob:hunter2@db.example/runs"
    with pytest.raises(
        ConfigError, match=r"yaml:5: .*tracking_uri: .*'postgresql'.*mlflow server"
    ) as told:
        load_train(a_file(tmp_path, f"log:\n  mlflow: {{tracking_uri: '{uri}'}}\n"))

    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    "uri", ["databricks", "databricks://profile", "sqlite:///runs.db", "file:///a@b/runs"]
)
def test_places_without_a_host_are_taken(tmp_path, uri):
    log = log_of(tmp_path, f"log:\n  mlflow: {{tracking_uri: '{uri}'}}\n")

    assert log.mlflow.tracking_uri == uri


def test_what_is_kept_of_a_run_reads_back_and_that_of_an_earlier_release_too():
    log = LogConfig.model_validate({"wandb": {"tags": ["a"]}})
    train = TrainConfig(version=1, mix="m", steps=100, log=log)

    assert TrainConfig.model_validate_json(train.model_dump_json()).log == log
    assert TrainConfig(version=1, mix="m", steps=100, log=["mlflow"]).log.kinds == ("mlflow",)


def test_a_tool_that_is_not_installed_is_told_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "find_spec", lambda _: None)

    for text, line in (("log: [wandb]\n", 4), ("log:\n  tensorboard: {}\n  wandb: {}\n", 5)):
        config = a_file(tmp_path, text)
        with pytest.raises(ConfigError, match=rf"train\.yaml:{line}: log\.\w+: the writer .* pip"):
            launch_plan.read_plan(config)


def test_a_program_gives_names_or_settings_and_is_told_what_is_wrong_with_them():
    assert as_log(["wandb"]) == as_log({"wandb": {}}) == as_log(LogConfig.of("wandb"))
    with pytest.raises(ConfigError, match=r"log: wandb\.projct: "):
        as_log({"wandb": {"projct": "moe"}})


@pytest.fixture
def wandb(monkeypatch):
    """A package of that name that keeps what it is asked."""
    asked = {}

    class Run:
        def define_metric(self, *_, **__):
            pass

        def log(self, row):
            asked["row"] = row

        def finish(self):
            pass

    def init(**keywords):
        asked.update(keywords)
        return Run()

    module = ModuleType("wandb")
    module.init, module.run, module.teardown = init, None, lambda: None
    module.Settings = lambda **keywords: keywords
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(sys.modules, "trainer_integration.writers.wandb", raising=False)
    monkeypatch.setattr(opening, "find_spec", lambda name: ModuleSpec(name, None, origin="here"))
    yield asked
    sys.modules.pop("trainer_integration.writers.wandb", None)


def test_what_the_file_says_goes_before_the_tools_variables_and_those_before_defaults(
    tmp_path, monkeypatch, wandb
):
    monkeypatch.setenv("WANDB_PROJECT", "of the variable")
    monkeypatch.setenv("WANDB_NAME", "of the variable")
    settings = {"project": "of the file", "base_url": "https://w.example", "tags": ["a"]}

    with open_writers({"wandb": settings}, Path(tmp_path)) as log:
        log.write(0, {"loss": 1.0})

    assert (wandb["project"], wandb["name"], wandb["mode"]) == (
        "of the file",
        "of the variable",
        "offline",
    )
    assert wandb["settings"]["base_url"] == "https://w.example"
    assert tuple(wandb["tags"]) == ("a",)
    assert wandb["row"] == {"loss": 1.0, "step": 0}
