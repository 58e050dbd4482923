"""The name of the distribution is in one place; a missing part names the command to install; a namesake is refused."""

import re
import tomllib
from pathlib import Path

import pytest

import omniload
from omniload.base import extras
from omniload.base.errors import ConfigError
from omniload.base.extras import (
    DISTRIBUTION,
    EXTRA_OF,
    install_line,
    missing_client,
    missing_extra,
    refuse_namesake,
)
from omniload.source.patterns import listing
from tests.house.modules import ROOT, faults, source_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_name_in_messages_is_that_of_the_distribution():
    assert PROJECT["name"] == DISTRIBUTION


def test_every_extra_that_a_message_names_is_one_of_the_distribution():
    assert set(EXTRA_OF.values()) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("module", sorted(EXTRA_OF))
def test_the_extra_of_a_module_brings_its_distribution(module):
    names = {
        "PIL": "pillow",
        "google": "protobuf",
        "grpc": "grpcio",
        "lance": "pylance",
        "mlflow": "mlflow-skinny",
    }
    wanted = names.get(module, module.replace("_", "-"))

    brought = PROJECT["optional-dependencies"][EXTRA_OF[module]]

    assert wanted in {re.split(r"[<>=\[]", line, maxsplit=1)[0] for line in brought}


def test_no_message_installs_the_other_project():
    """``pip install omniload`` is a stranger's code; only the page of extras may name it."""
    others = (path for path in source_files() if path != Path("omniload/base/extras.py"))

    def lines(path):
        return re.findall(r"install '?omniload\b(?!-)", (ROOT / path).read_text(encoding="utf-8"))

    assert faults(others, lines) == {}


def test_no_page_installs_the_other_project():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]

    found = [
        (page.name, line)
        for page in pages
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.search(r"pip install[^#`\"]*(?<!\./)\bomniload\b(?!-)", line)
    ]

    assert found == []


def test_a_missing_module_is_told_with_the_line_that_installs_it():
    error = missing_extra("the report", ModuleNotFoundError("no", name="jinja2.sandbox"))

    assert isinstance(error, ConfigError)
    assert str(error) == (
        "the report needs the package jinja2, which is not installed; "
        "pip install 'omniload-data[report]'"
    )


def test_a_missing_module_of_ours_stays_a_fault_of_ours():
    fault = ModuleNotFoundError("no", name="omniload.nowhere")

    with pytest.raises(ModuleNotFoundError) as raised:
        missing_extra("the report", fault)

    assert raised.value is fault


def refused_by_fsspec(module):
    """Return fsspec's error if the package of a client is not installed."""
    try:
        try:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        except ImportError as error:
            raise ImportError(f"Install {module} to access it") from error
    except ImportError as error:
        return error


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("s3fs", "; pip install 'omniload-data[s3]'"),
        ("gcsfs", "; pip install 'omniload-data[gcs]'"),
        ("adlfs", ""),
    ],
)
def test_a_missing_client_of_a_store_is_told_with_the_line_that_installs_it(module, line):
    assert missing_client(refused_by_fsspec(module)) == f"Install {module} to access it{line}"
    said = re.escape(f"'x' cannot be opened: Install {module} to access it{line}")
    with pytest.raises(ConfigError, match=f"{said}$"), listing("sources.web.path: 'x'"):
        raise refused_by_fsspec(module)


def test_several_extras_are_one_line():
    assert install_line("ray", "torch") == "pip install 'omniload-data[ray,torch]'"


def test_the_other_project_in_our_folder_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "omniload").mkdir()
    (tmp_path / "omniload-0.21.1.dist-info").mkdir()
    monkeypatch.setattr(omniload, "__file__", str(tmp_path / "omniload" / "__init__.py"))

    with pytest.raises(ConfigError, match=r"omniload 0\.21\.1, another project .* pip uninstall"):
        refuse_namesake()


def test_our_own_record_is_not_taken_for_the_other_project(tmp_path, monkeypatch):
    (tmp_path / "omniload").mkdir()
    (tmp_path / "omniload_data-0.1.0.dist-info").mkdir()
    monkeypatch.setattr(omniload, "__file__", str(tmp_path / "omniload" / "__init__.py"))

    refuse_namesake()

    assert extras.DISTRIBUTION == "omniload-data"
