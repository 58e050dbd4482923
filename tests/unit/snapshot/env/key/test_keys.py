"""A changed input gives another key, and the documents say which."""

import os

import pytest

from omniload.base.errors import ConfigError, StateError
from snapshot.env.format.digests import digest_of
from snapshot.env.format.entries import Target
from snapshot.env.key.interpreter import base_of, installed_in
from snapshot.env.key.keys import (
    Installation,
    document_of,
    key_of,
    requests_of,
    without_credentials,
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


def differing(left, right):
    return {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}


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
    other = a_document(tmp_path, interpreter=an_interpreter("/env", **{name: value}))

    assert key_of(plain) != key_of(other)
    assert differing(plain, other) == {"interpreter"}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"interpreter": an_interpreter("/elsewhere")}, "prefix"),
        ({"targets": (*TARGETS, Target("x", "/x"))}, "targets"),
        ({"base": base_of("sha256:other", ["pip==23"])}, "base"),
        ({"base": base_of("sha256:image", ["pip==24"])}, "base"),
        ({"command": ("pip3", "install", "-r", "requirements.txt")}, "command"),
        ({"requirements": "numpy==3\n"}, "requests"),
        ({"environment": {"CUDA_HOME": "/usr/cuda", "PIP_PRE": "1"}}, "requests"),
        ({"files": ("requirements.txt",)}, "files"),
        ({"variables": ("CUDA_HOME",)}, "variables"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_input_gives_another_key_and_is_named(tmp_path, change, place):
    plain = a_document(tmp_path)
    other = a_document(tmp_path, **change)

    assert key_of(plain) != key_of(other)
    assert differing(plain, other) == {place}


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


def test_a_key_does_not_depend_on_the_order_of_the_document():
    assert key_of({"version": 1, "a": 1, "b": 2}) == key_of({"b": 2, "a": 1, "version": 1})


def test_an_input_is_a_file_or_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    for name, kind in {"pipe": "a pipe", "/dev/zero": "a device"}.items():
        with pytest.raises(ConfigError, match=f"an input that is {kind}; name a file or a folder"):
            a_document(tmp_path, files=(name,))


def asked(folder, command, **environment):
    return requests_of(command.split(), str(folder), environment)


def test_order_blanks_and_comments_of_a_file_do_not_matter(tmp_path):
    (tmp_path / "a.txt").write_text("numpy==2\n# why\npandas  >= 3  # and this\n\n")
    (tmp_path / "b.txt").write_text("pandas >= 3\nnumpy==2\n")

    one = asked(tmp_path, "pip install -r a.txt")
    other = asked(tmp_path, "pip install -r b.txt")

    assert one == other
    assert one.requirements == {"numpy==2", "pandas >= 3"}


def test_a_line_may_go_on_and_carry_hashes(tmp_path):
    (tmp_path / "r.txt").write_text("numpy==2 \\\n  --hash=sha256:b \\\n  --hash=sha256:a\nscipy\n")

    assert asked(tmp_path, "pip install -r r.txt").requirements == {
        "numpy==2 --hash=sha256:b --hash=sha256:a",
        "scipy",
    }


def test_files_named_by_files_are_read_where_these_lie(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "r.txt").write_text("-r sub/more.txt\n--constraint=sub/c.txt\n")
    (tmp_path / "sub" / "more.txt").write_text("scipy\n-c c.txt\n")
    (tmp_path / "sub" / "c.txt").write_text("numpy<3\n")

    found = asked(tmp_path, "pip install -r r.txt")

    assert found.requirements == {"scipy"}
    assert found.constraints == {"numpy<3"}


def test_files_that_name_each_other_end(tmp_path):
    (tmp_path / "a.txt").write_text("-r b.txt\nx\n")
    (tmp_path / "b.txt").write_text("-r a.txt\ny\n")

    assert asked(tmp_path, "pip install -r a.txt").requirements == {"x", "y"}


@pytest.mark.parametrize(
    "command",
    [
        "pip install -c c.txt x",
        "pip3 install --constraint c.txt x",
        "python -m pip install --constraint=c.txt x",
        "uv pip install --constraints c.txt x",
        "/env/bin/pip install x -c c.txt",
    ],
)
def test_an_installer_is_known_by_its_words(tmp_path, command):
    (tmp_path / "c.txt").write_text("y==1\n")

    found = asked(tmp_path, command)

    assert (found.requirements, found.constraints) == (set(), {"y==1"})


def test_options_in_a_file_count_without_credentials(tmp_path):
    (tmp_path / "r.txt").write_text("--index-url https://me:word@i/simple\n--pre\nx\n")

    found = asked(tmp_path, "pip install -r r.txt")

    assert found.options == {"--index-url https://i/simple", "--pre"}


def test_variables_that_steer_the_choice_count_and_others_do_not(tmp_path):
    found = asked(
        tmp_path,
        "pip install x",
        PIP_EXTRA_INDEX_URL="https://me:word@i/simple",
        PIP_CACHE_DIR="/somewhere",
        HOME="/root",
    )

    assert found.options == {"PIP_EXTRA_INDEX_URL=https://i/simple"}


def test_a_constraint_file_may_come_from_a_variable(tmp_path):
    (tmp_path / "c.txt").write_text("numpy<3\n")

    one = asked(tmp_path, "pip install x", PIP_CONSTRAINT="c.txt")
    (tmp_path / "c.txt").write_text("numpy<4\n")
    other = asked(tmp_path, "pip install x", PIP_CONSTRAINT="c.txt")

    assert (one.constraints, other.constraints) == ({"numpy<3"}, {"numpy<4"})


def test_variables_in_a_file_are_filled_in(tmp_path):
    (tmp_path / "r.txt").write_text("x==${VERSION}\n")

    assert asked(tmp_path, "pip install -r r.txt", VERSION="7").requirements == {"x==7"}


def test_a_local_source_counts_by_content_and_not_by_time(tmp_path):
    source = tmp_path / "project"
    source.mkdir()
    (source / "setup.py").write_text("one")
    first = asked(tmp_path, "pip install -e ./project[extra]").sources
    (source / "setup.py").touch()
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "x.pyc").write_text("noise")
    (source / "project.egg-info").mkdir()
    (source / "project.egg-info" / "PKG-INFO").write_text("noise")
    again = asked(tmp_path, "pip install -e ./project[extra]").sources
    (source / "setup.py").write_text("two")
    changed = asked(tmp_path, "pip install -e ./project[extra]").sources

    assert list(first) == ["-e ./project[extra]"]
    assert first == again != changed


@pytest.mark.parametrize(
    "line",
    [
        "./x-1-py3-none-any.whl",
        "x @ file://{folder}/x-1-py3-none-any.whl",
        "-e ./x-1-py3-none-any.whl",
    ],
)
def test_a_local_file_counts_by_content(tmp_path, line):
    wheel = tmp_path / "x-1-py3-none-any.whl"
    wheel.write_bytes(b"one")
    (tmp_path / "r.txt").write_text(line.format(folder=tmp_path))
    before = asked(tmp_path, "pip install -r r.txt").sources
    wheel.write_bytes(b"two")
    after = asked(tmp_path, "pip install -r r.txt").sources

    assert list(before) == list(after)
    assert len(before) == 1
    assert before != after


def test_a_repository_of_source_counts_as_it_is_written(tmp_path):
    (tmp_path / "r.txt").write_text("git+https://me:word@host/x.git@abc123")

    found = asked(tmp_path, "pip install -r r.txt")

    assert found.requirements == {"git+https://host/x.git@abc123"}


def test_uv_sync_counts_the_lock_file(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / "uv.lock").write_text("one")
    before = asked(tmp_path, "uv sync").sources
    (tmp_path / "uv.lock").write_text("two")

    assert set(before) == {"pyproject.toml", "uv.lock"}
    assert asked(tmp_path, "uv sync").sources["uv.lock"] != before["uv.lock"]


def test_a_script_counts_by_content(tmp_path):
    (tmp_path / "setup.sh").write_text("pip install x")
    before = asked(tmp_path, "bash setup.sh --fast").sources
    (tmp_path / "setup.sh").write_text("pip install y")

    assert list(before) == ["setup.sh"]
    assert asked(tmp_path, "bash setup.sh --fast").sources != before


@pytest.mark.parametrize("word", ["x" * 5000, "a\0b", ""])
def test_an_argument_that_cannot_be_a_path_is_none(tmp_path, word):
    assert requests_of(["python", "-c", word], str(tmp_path), {}).sources == {}


def test_a_file_that_is_missing_is_a_clear_fault(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.txt: no such file; .* a requirement file"):
        asked(tmp_path, "pip install -r no.txt")


def test_a_pipe_is_left_to_the_command_that_installs(tmp_path):
    os.mkfifo(tmp_path / "r.txt")

    with pytest.raises(ConfigError, match=r"r\.txt: is a pipe; .* a requirement file"):
        asked(tmp_path, "pip install -r r.txt")


def test_a_missing_source_in_a_file_is_a_fault_of_its_line(tmp_path):
    (tmp_path / "r.txt").write_text("numpy\n\n./nothing.whl\n")

    with pytest.raises(ConfigError, match=r"r\.txt:3: .*cannot be read"):
        asked(tmp_path, "pip install -r r.txt")


@pytest.mark.parametrize("words", ["-t out", "--target=./out", "-f ./out", "--find-links ./out"])
def test_a_folder_that_is_written_or_only_looked_in_is_no_input(tmp_path, words):
    (tmp_path / "out").mkdir()

    assert asked(tmp_path, f"pip install {words} x").sources == {}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:word@host/x", "https://host/x"),
        ("--index-url=https://me@host:8080/x", "--index-url=https://host:8080/x"),
        ("--index-url=plain", "--index-url=plain"),
        ("-ihttps://me:word@host/x", "-ihttps://***@host/x"),
        ("x@https://me:word@host/x.whl", "x@https://***@host/x.whl"),
        ("pip install -i https://me:word@host/x y", "pip install -i https://***@host/x y"),
        (
            "https://host/x.whl?X-Signature=word#sha256=1",
            "https://host/x.whl?X-Signature=***#sha256=1",
        ),
        ("numpy==2", "numpy==2"),
    ],
)
def test_credentials_do_not_enter_a_key(text, shown):
    assert without_credentials(text) == shown


def test_a_tree_counts_names_execute_bits_links_and_contents(tmp_path):
    seen = set()
    (tmp_path / "a").write_text("1")
    seen.add(digest_of(tmp_path))
    (tmp_path / "a").chmod(0o755)
    seen.add(digest_of(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    seen.add(digest_of(tmp_path))
    (tmp_path / "l").symlink_to("b")
    seen.add(digest_of(tmp_path))
    (tmp_path / "b").write_text("2")
    seen.add(digest_of(tmp_path))

    assert len(seen) == 5


@pytest.mark.parametrize(
    "words", ["-rr.txt", "-Ur r.txt", "-Urr.txt", "-qr r.txt", "--requirement=r.txt"]
)
def test_a_file_is_read_however_its_option_is_written(tmp_path, words):
    (tmp_path / "r.txt").write_text("numpy==2\n-cc.txt\n-r=more.txt\n")
    (tmp_path / "c.txt").write_text("numpy<3\n")
    (tmp_path / "more.txt").write_text("scipy\n")

    found = asked(tmp_path, f"pip install {words}")

    assert found.requirements == {"numpy==2", "scipy"}
    assert found.constraints == {"numpy<3"}


@pytest.mark.parametrize("text", ["\ufeffnumpy==2\n", "numpy==2\r\n"])
def test_a_file_of_another_system_is_read_as_well(tmp_path, text):
    (tmp_path / "r.txt").write_text(text, encoding="utf-8", newline="")

    assert asked(tmp_path, "pip install -r r.txt").requirements == {"numpy==2"}


@pytest.mark.parametrize(
    "line",
    [
        "./pkg",
        "-e ./pkg",
        "./pkg[extra]",
        "./pkg ; python_version > '3'",
        "./pkg --config-settings=a=b",
        "pkg @ file://{folder}/pkg ; python_version > '3'",
        "file:./pkg",
    ],
)
def test_a_path_in_a_file_starts_where_the_command_runs(tmp_path, line):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "r.txt").write_text(line.format(folder=tmp_path))
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "setup.py").write_text("one")
    before = asked(tmp_path, "pip install -r sub/r.txt")
    (tmp_path / "pkg" / "setup.py").write_text("two")
    after = asked(tmp_path, "pip install -r sub/r.txt")

    assert before.sources.keys() == after.sources.keys()
    assert before.sources != after.sources
    assert before.requirements == set()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("./pkg", "-e ./pkg"),
        ("./pkg", "./pkg[extra]"),
        ("./pkg --config-settings=a=b", "./pkg --config-settings=a=c"),
        ("numpy==2 --config-settings=a=b", "numpy==2 --config-settings=a=c"),
        ("numpy==2 --global-option=a", "numpy==2"),
        ("git+https://h/x.git@1", "-e git+https://h/x.git@1"),
        ("./pkg ; python_version > '3'", "./pkg ; python_version < '3'"),
        ("numpy==2", "numpy==2 --hash=sha256:a"),
    ],
)
def test_what_is_installed_in_another_way_is_another_request(tmp_path, one, other):
    (tmp_path / "pkg").mkdir()
    found = []
    for line in (one, other):
        (tmp_path / "r.txt").write_text(line)
        found.append(asked(tmp_path, "pip install -r r.txt").document())

    assert found[0] != found[1]


def test_a_file_that_an_option_names_counts_by_content_and_one_that_is_written_does_not(tmp_path):
    (tmp_path / "over.txt").write_text("one")
    (tmp_path / "log").write_text("written by the last run")
    command = "uv pip install --overrides over.txt --log log x"
    before = asked(tmp_path, command)
    (tmp_path / "over.txt").write_text("two")

    assert list(before.sources) == ["over.txt"]
    assert asked(tmp_path, command).sources != before.sources


def test_constraints_of_builds_are_read_as_constraints(tmp_path):
    (tmp_path / "b.txt").write_text("setuptools<80\n")

    for words in ("--build-constraint b.txt x", "-b b.txt x"):
        assert asked(tmp_path, f"uv pip install {words}").constraints == {"setuptools<80"}


def test_pip_is_found_behind_words_that_come_before_it(tmp_path):
    (tmp_path / "r.txt").write_text("-r more.txt\n")
    (tmp_path / "more.txt").write_text("numpy\n")

    found = asked(tmp_path, "env A=1 B=2 nice -n 5 python -m pip install -r r.txt")

    assert found.requirements == {"numpy"}


@pytest.mark.parametrize(
    ("command", "lock"),
    [
        ("poetry install", "poetry.lock"),
        ("pipenv install --deploy", "Pipfile.lock"),
        ("python -m pdm sync", "pdm.lock"),
    ],
)
def test_the_lock_file_of_a_project_counts(tmp_path, command, lock):
    (tmp_path / lock).write_text("one")
    before = asked(tmp_path, command)
    (tmp_path / lock).write_text("two")

    assert list(before.sources) == [lock]
    assert asked(tmp_path, command).sources != before.sources


def test_an_execute_bit_counts_whoever_asks(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "a").chmod(0o645)  # for others only
    before = digest_of(tmp_path)
    (tmp_path / "a").chmod(0o644)

    assert digest_of(tmp_path) != before


def test_a_folder_that_cannot_be_read_is_told_and_not_passed_over(tmp_path, monkeypatch):
    def scandir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", scandir)

    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        digest_of(tmp_path)
