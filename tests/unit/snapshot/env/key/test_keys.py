"""A changed input gives another key, and the documents say which."""

import os
from dataclasses import replace

import pytest

from omniload.base.errors import ConfigError, StateError
from snapshot.env.format.entries import Target
from snapshot.env.key.keys import (
    Installation,
    base_of,
    differences,
    document_of,
    installed_in,
    key_of,
)
from tests.support.snapshot.env_builders import TARGETS, an_interpreter

BASE = base_of("sha256:image", ["pip==23"])


def a_document(tmp_path, *, interpreter=None, targets=TARGETS, base=BASE, **changes):
    (tmp_path / "requirements.txt").write_text(changes.pop("requirements", "numpy==2\n"))
    fields = {
        "command": ("pip", "install", "-r", "requirements.txt"),
        "folder": str(tmp_path),
        "environment": {"CUDA_HOME": "/usr/cuda"},
        "files": (),
        "variables": (),
    }
    installation = Installation(**{**fields, **changes})
    return document_of(interpreter or an_interpreter("/env"), targets, base, installation)


def test_the_same_inputs_give_the_same_key(tmp_path):
    assert key_of(a_document(tmp_path)) == key_of(a_document(tmp_path))
    assert len(key_of(a_document(tmp_path))) == 64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("implementation", "PyPy"),
        ("version", "3.11.8"),
        ("cache_tag", "cpython-312"),
        ("soabi", "other"),
        ("abiflags", "t"),
        ("platform", "linux-aarch64"),
        ("machine", "aarch64"),
        ("libc", "glibc 2.28"),
    ],
)
def test_another_interpreter_gives_another_key_and_is_named(tmp_path, name, value):
    plain = a_document(tmp_path)
    other = a_document(tmp_path, interpreter=replace(an_interpreter("/env"), **{name: value}))

    assert key_of(plain) != key_of(other)
    assert [each.place for each in differences(plain, other)] == [f"interpreter.{name}"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"interpreter": an_interpreter("/elsewhere")}, "prefix"),
        ({"targets": (*TARGETS, Target("x", "/x"))}, "targets"),
        ({"base": base_of("sha256:other", ["pip==23"])}, "base.image"),
        ({"base": base_of("sha256:image", ["pip==24"])}, "base.installed"),
        ({"command": ("pip3", "install", "-r", "requirements.txt")}, "command"),
        ({"requirements": "numpy==3\n"}, "requests.requirements[numpy==2]"),
        (
            {"environment": {"CUDA_HOME": "/usr/cuda", "PIP_PRE": "1"}},
            "requests.options[PIP_PRE=1]",
        ),
        ({"files": ("requirements.txt",)}, "files.requirements.txt"),
        ({"variables": ("CUDA_HOME",)}, "variables.CUDA_HOME"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_input_gives_another_key_and_is_named(tmp_path, change, place):
    plain = a_document(tmp_path)
    other = a_document(tmp_path, **change)

    assert key_of(plain) != key_of(other)
    assert place in [each.place for each in differences(plain, other)]


def test_the_value_of_a_declared_variable_decides_and_is_not_kept(tmp_path):
    one = a_document(tmp_path, variables=("TOKEN",), environment={"TOKEN": "hush"})
    other = a_document(tmp_path, variables=("TOKEN",), environment={"TOKEN": "hush!"})
    unset = a_document(tmp_path, variables=("TOKEN",), environment={})

    assert len({key_of(one), key_of(other), key_of(unset)}) == 3
    assert "hush" not in str(one)


def test_the_content_of_a_declared_file_decides(tmp_path):
    (tmp_path / "x.cfg").write_text("1")
    one = key_of(a_document(tmp_path, files=("x.cfg",)))
    (tmp_path / "x.cfg").write_text("2")

    assert key_of(a_document(tmp_path, files=("x.cfg",))) != one


def test_a_variable_nobody_declared_does_not_matter(tmp_path):
    one = a_document(tmp_path, environment={"HOME": "/a"})

    assert key_of(one) == key_of(a_document(tmp_path, environment={"HOME": "/b"}))


def test_credentials_in_the_command_are_not_kept(tmp_path):
    words = ("pip", "install", "--index-url", "https://me:hush@host/simple", "x")

    assert "hush" not in str(a_document(tmp_path, command=words))


def test_no_command_is_a_clear_fault(tmp_path):
    with pytest.raises(ConfigError, match="no command given"):
        a_document(tmp_path, command=())


def test_a_document_of_another_version_has_no_key():
    with pytest.raises(StateError, match="version 9"):
        key_of({"version": 9})


def test_equal_documents_have_no_difference(tmp_path):
    assert differences(a_document(tmp_path), a_document(tmp_path)) == []


def test_a_difference_shows_both_sides(tmp_path):
    found = differences(
        a_document(tmp_path), a_document(tmp_path, requirements="numpy==2\nscipy\n")
    )

    assert [tuple(each) for each in found] == [("requests.requirements[scipy]", None, "scipy")]


def test_what_is_installed_is_read_from_the_names_of_its_records(tmp_path):
    for name in ("NumPy-2.4.6.dist-info", "old_thing-1.0.egg-info", "numpy", "x.dist-info"):
        (tmp_path / name).mkdir()

    assert installed_in([Target("t", str(tmp_path)), Target("n", str(tmp_path / "no"))]) == (
        "numpy==2.4.6",
        "old-thing==1.0",
    )


def test_the_base_does_not_depend_on_order():
    assert base_of("", ["a==1", "b==2"]) == base_of("", ["b==2", "a==1"])
    assert base_of("", ["a==1"]) != base_of("", ["a==2"])


def test_an_added_part_and_a_missing_part_are_both_told():
    left, right = {"version": 1, "a": {"x": 1}}, {"version": 1, "b": {"y": 2}}

    assert [tuple(each) for each in differences(left, right)] == [
        ("a.x", "1", None),
        ("b.y", None, "2"),
    ]


def test_an_empty_list_differs_from_one_with_a_member():
    left = {"requests": {"options": []}}
    right = {"requests": {"options": ["--pre"]}}

    assert [each.place for each in differences(left, right)] == [
        "requests.options",
        "requests.options[--pre]",
    ]


def test_a_key_does_not_depend_on_the_order_of_the_document():
    assert key_of({"version": 1, "a": 1, "b": 2}) == key_of({"b": 2, "a": 1, "version": 1})


def test_an_input_is_a_file_or_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    for name, kind in {"pipe": "a pipe", "/dev/zero": "a device"}.items():
        with pytest.raises(ConfigError, match=f"an input that is {kind}; name a file or a folder"):
            a_document(tmp_path, files=(name,))
