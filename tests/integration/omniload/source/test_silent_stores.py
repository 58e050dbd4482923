"""A check of sources in stores that accept connections and never answer, and in those that accept none."""

import socket
import sys
import time

import pytest
import yaml
from click.testing import CliRunner

from omniload.base.errors import UnavailableError
from omniload.commands.check import check
from tests.support.ports import free_port
from tests.support.programs import finished

OMNILOAD = (sys.executable, "-m", "omniload")
MIX = """\
version: 1
seed: 1
tokenizer: {type: bytes}
sources:
  a: {type: jsonl, path: "A/*.jsonl"}
  b: {type: jsonl, path: "A/b/{0..3}.jsonl"}
  c: {type: jsonl, path: c.jsonl}
  d: {type: jsonl, path: nowhere.jsonl}
mix: {stages: [{from_step: 0, weights: {a: 1, b: 1, c: 1, d: 1}}]}
pack: {length: 16}
batch: {tokens: 64, micro_tokens: 64}
"""


@pytest.fixture
def silent_port():
    """A port that accepts every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield server.getsockname()[1]


def checked(folder, url, *options):
    (folder / "c.jsonl").write_text('{"text": "a"}\n' * 40)
    (folder / "mix.yaml").write_text(MIX.replace("A/", f"{url}/"))
    begin_s = time.monotonic()
    arguments = [str(folder / "mix.yaml"), "--cache-dir", str(folder / "cache"), *options]
    result = CliRunner().invoke(check, arguments)
    return result, time.monotonic() - begin_s


@pytest.mark.parametrize("scheme", ["http", "webhdfs", "s3"])
def test_a_store_that_says_nothing_is_told_once_within_its_limit_with_other_faults(
    tmp_path, silent_port, monkeypatch, scheme
):
    url = f"{scheme}://127.0.0.1:{silent_port}/data"
    if scheme == "s3":
        pytest.importorskip("s3fs")
        url = "s3://lake/data"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    store = url.removesuffix("/data")

    result, took_s = checked(tmp_path, url, "--store-timeout", "2s")

    said = str(result.exception)
    assert (
        f"mix.yaml:5: sources.a.path: {store} gave no answer within 2 s, nor for 1 more source; "
        in said
    )
    assert "--store-timeout 5m" in said
    assert said.count("gave no answer") == 1
    # All faults are reported at once, whichever store is silent.
    assert "sources.d" in said
    assert took_s < 30


@pytest.mark.parametrize("kind", ["jsonl", "lance"])
@pytest.mark.parametrize(
    "words",
    [
        ("check",),
        ("plan", "--steps", "9"),
        ("preview",),
        ("stats", "--measure", "0"),
        ("bench", "--steps", "2"),
        ("simulate", "--ranks", "1"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_that_asks_stores_before_a_run_has_one_limit_of_their_silence(
    tmp_path, silent_port, monkeypatch, words, kind
):
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    of_a = {"type": "jsonl", "path": "c.jsonl"}
    of_b = {"type": kind, "path": "s3://lake/data.lance"} | (
        {"text": "t"} if kind == "lance" else {}
    )
    mix = yaml.safe_load(MIX) | {"sources": {"a": of_a, "b": of_b}}
    mix["mix"]["stages"][0]["weights"] = {"a": 1, "b": 1}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(mix))
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n' * 40)
    name, *options = words
    cache = ("--cache-dir", str(tmp_path / "cache"))

    done = finished(
        [*OMNILOAD, "mix", name, "mix.yaml", *options, *cache, "--store-timeout", "500ms"],
        limit_s=60,
        cwd=tmp_path,
    )

    assert done.returncode == 3, done.stderr
    assert "sources.b.path: s3://lake gave no answer within 0.5 s; " in done.stderr


def test_of_a_silent_store_alone_the_command_says_that_it_may_be_tried_again(tmp_path, silent_port):
    url = f"http://127.0.0.1:{silent_port}"
    (tmp_path / "nowhere.jsonl").write_text('{"text": "a"}\n' * 40)

    result, _ = checked(tmp_path, url, "--store-timeout", "500ms")

    assert isinstance(result.exception, UnavailableError)
    assert result.exception.exit_code == 3


@pytest.mark.slow
@pytest.mark.parametrize("listens", [True, False])
def test_a_namenode_that_is_gone_is_told_before_its_client_gives_up(
    tmp_path, silent_port, hdfs, listens
):
    """Its own client tries again for minutes, even if a port refuses."""
    assert hdfs.url
    url = f"hdfs://127.0.0.1:{silent_port if listens else free_port()}"
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n' * 40)
    (tmp_path / "nowhere.jsonl").write_text('{"text": "a"}\n' * 40)
    (tmp_path / "mix.yaml").write_text(MIX.replace("A/", f"{url}/"))

    # A process of its own, because the client keeps trying in a thread that cannot be ended.
    done = finished(
        [sys.executable, "-m", "omniload", "mix", "check", "mix.yaml", "--store-timeout", "2s"],
        limit_s=60,
        cwd=tmp_path,
    )

    assert done.returncode == 3
    assert f"sources.a.path: {url} gave no answer within 2 s, nor for 1 more source" in done.stderr


def test_a_port_that_refuses_is_an_answer_and_told_as_one(tmp_path):
    (tmp_path / "nowhere.jsonl").write_text('{"text": "a"}\n' * 40)
    url = f"http://127.0.0.1:{free_port()}"

    result, took_s = checked(tmp_path, url, "--store-timeout", "60s")

    assert "gave no answer" not in str(result.exception)
    assert "cannot be listed" in str(result.exception)
    assert isinstance(result.exception, UnavailableError)
    assert took_s < 30
