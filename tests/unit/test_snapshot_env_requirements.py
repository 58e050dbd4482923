"""Equal requests are equal, whatever their spelling; different ones differ."""

import pytest

from omniload.base.errors import ConfigError
from snapshot.env.requirements import normalised, requests_of, without_credentials
from snapshot.env.sources import digest_of


def asked(folder, command, **environment):
    return requests_of(command.split(), str(folder), environment)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("Torch", "torch"),
        ("zope.Interface", "zope-interface"),
        ("a_b-c", "a-b-c"),
        ("torch [B,a] >=2 ,<3", "torch[a,b]<3,>=2"),
        ("torch==2.1 ; python_version >= '3.9'", 'torch==2.1; python_version >= "3.9"'),
        ("x @ https://user:secret@host/x.whl", "x@ https://host/x.whl"),
        ("x==1 --hash=sha256:b --hash=sha256:a", "x==1 --hash=sha256:a --hash=sha256:b"),
    ],
)
def test_a_requirement_has_one_form(text, normal):
    assert normalised(text).replace(" @ ", "@ ") == normal


def test_what_is_no_requirement_is_refused():
    with pytest.raises(ConfigError, match="is no requirement"):
        normalised("==1.0")


def test_order_blanks_case_and_comments_of_a_file_do_not_matter(tmp_path):
    (tmp_path / "a.txt").write_text("numpy==2\n# why\nPandas >= 3  # and this\n\n")
    (tmp_path / "b.txt").write_text("pandas>=3\nNumPy ==2\n")

    one = asked(tmp_path, "pip install -r a.txt")
    other = asked(tmp_path, "pip install -r b.txt")

    assert one == other
    assert one.requirements == {"numpy==2", "pandas>=3"}


def test_a_line_may_go_on_and_carry_hashes(tmp_path):
    (tmp_path / "r.txt").write_text("numpy==2 \\\n  --hash=sha256:b \\\n  --hash=sha256:a\nscipy\n")

    assert asked(tmp_path, "pip install -r r.txt").requirements == {
        "numpy==2 --hash=sha256:a --hash=sha256:b",
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
    (tmp_path / "c.txt").write_text("Y==1\n")

    found = asked(tmp_path, command)

    assert (found.requirements, found.constraints) == ({"x"}, {"y==1"})


def test_the_value_of_an_option_is_no_requirement(tmp_path):
    found = asked(tmp_path, "pip install --index-url https://i/s -t out --no-binary :all: x")

    assert found.requirements == {"x"}


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

    assert list(first) == ["./project[extra]"]
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
    found = asked(tmp_path, "pip install git+https://me:word@host/x.git@abc123")

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
    with pytest.raises(ConfigError, match=r"no\.txt: a requirement file that cannot be read"):
        asked(tmp_path, "pip install -r no.txt")


def test_a_fault_in_a_file_carries_its_line(tmp_path):
    (tmp_path / "r.txt").write_text("numpy\n\n==3\n")

    with pytest.raises(ConfigError, match=r"r\.txt:3: '==3' is no requirement"):
        asked(tmp_path, "pip install -r r.txt")


def test_a_missing_source_is_a_clear_fault(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        asked(tmp_path, "pip install ./nothing.whl")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:word@host/x", "https://host/x"),
        ("--index-url=https://me@host:8080/x", "--index-url=https://host:8080/x"),
        ("--index-url=plain", "--index-url=plain"),
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
