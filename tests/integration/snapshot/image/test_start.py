"""Commands started in a mounted image: they see its files, write beside them, and leave a trace."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError, StateError
from snapshot.commands.image import command
from snapshot.image.trace.store import TraceStore
from snapshot.image.trace.trace import decode_trace
from snapshot.oci.image import open_store, resolve
from snapshot.startup.events import LOG_VARIABLE
from snapshot.startup.reading import parse_event
from tests.support.snapshot.registries.registry import needs, running_registry

pytestmark = pytest.mark.fuse

SHELL = Path(shutil.which("sh") or "/bin/sh").resolve()
CAT = Path(shutil.which("cat") or "/bin/cat").resolve()


def run(*words):
    return subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True)


def omniload(*words):
    """Run our command in a process of its own, as a user does: signals and exit codes are its subject."""
    main = "from omniload.base.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", main, "image", *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])},
    )


def done(*words):
    """Run our command to its end; return code, output, errors."""
    with omniload(*words) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def copy_with_libraries(program, root):
    for path in [str(program), *re.findall(r"(/\S+) \(0x", run("ldd", program).stdout)]:
        target = root / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path(path).resolve(), target)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A registry with an image that holds a shell, ``cat``, some data, and links that lead out."""
    needs("umoci", "skopeo", "docker-registry")
    if not Path("/dev/fuse").exists() or os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs /dev/fuse and root")
    folder = tmp_path_factory.mktemp("images")
    tree = folder / "tree"
    for program in (SHELL, CAT):
        copy_with_libraries(program, tree)
    (tree / "data").mkdir()
    for number in range(3):
        (tree / f"data/random{number}").write_bytes(os.urandom(2_000_000))
    (tree / "etc").mkdir(exist_ok=True)
    (tree / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nann:x:1000:1000::/:/bin/sh\n")
    (tree / "dev").symlink_to("/data")
    layout = folder / "layout"
    run("umoci", "init", "--layout", layout)
    run("umoci", "new", "--image", f"{layout}:v")
    run("umoci", "insert", "--image", f"{layout}:v", tree, "/")
    words = ("--config.env", "GREETING=hello", "--config.workingdir", "/data")
    run("umoci", "config", "--image", f"{layout}:v", *words)
    with running_registry(folder) as address:
        copy = ("skopeo", "copy", "-q", "--dest-tls-verify=false")
        run(*copy, f"oci:{layout}:v", f"docker://{address}/a/plain:v")
        lazy = f"{address}/a/lazy:v"
        made = CliRunner().invoke(command, ["convert", f"{address}/a/plain:v", lazy])
        assert made.exit_code == 0, made.output
        yield lazy


@pytest.fixture
def cache(tmp_path):
    return ("--option", f"cache={tmp_path / 'cache'}", "--log", tmp_path / "log")


def digest_of(image):
    store, name = open_store(image)
    with_digest = resolve(store, name).digest
    store.close()
    return with_digest


def moved(tmp_path):
    found = re.findall(r"bytes by tier: (\{.*\})", (tmp_path / "log").read_text())
    return json.loads(found[-1].replace("'", '"'))


def test_a_command_is_recorded_and_what_it_touched_comes_first_the_next_time(
    place, cache, tmp_path
):
    trace = tmp_path / "trace"
    words = ("--", SHELL, "-c", f"{CAT} random1 >/dev/null; echo $GREETING; exit 7")

    code, out, err = done("record", place, "-o", trace, *cache, *words)

    assert (code, out) == (7, "hello\n"), err
    recorded = decode_trace(trace.read_bytes(), name="it")
    assert recorded.command == tuple(map(str, words[1:]))
    touched = {touch.path for touch in recorded.touches}
    assert {"data/random1", str(CAT)[1:]} <= touched
    assert "data/random0" not in touched
    code, _, err = done("record", place, "-o", trace, *cache, *words)
    assert code == 7, err
    assert decode_trace(trace.read_bytes(), name="it").runs == 2

    shutil.rmtree(tmp_path / "cache")
    code, out, err = done("prefetch", place, "--trace", trace, *cache[:2], "--json")
    assert code == 0, err
    brought = json.loads(out)
    code, out, _ = done("run", place, "--trace", trace, *cache, *words)
    assert (code, out) == (7, "hello\n")

    assert brought["blocks"] > 3
    assert (brought["here"], brought["failed"], brought["unkept"]) == (0, 0, 0)
    assert moved(tmp_path)["registry"] == 0
    assert moved(tmp_path)["disk"] > 2_000_000


def test_a_start_finds_the_trace_of_the_last_one_by_itself_also_of_another_node(
    place, cache, tmp_path
):
    words = ("--", SHELL, "-c", f"{CAT} random2 >/dev/null")
    command_of = tuple(map(str, words[1:]))
    shared = ("--option", f"traces={tmp_path / 'shared'}")
    code, _, err = done("record", place, *cache, *shared, *words)
    assert code == 0, err
    shutil.rmtree(tmp_path / "cache")

    for _ in range(2):
        code, _, err = done("run", place, *cache, *shared, *words)
        assert code == 0, err

    assert TraceStore(tmp_path / "shared").get(digest_of(place), command_of).runs == 3
    code, out, err = done("prefetch", place, *cache[:2], *shared, *words)
    assert code == 0, err
    assert "0 B moved" in out
    assert "no trace" not in (tmp_path / "log").read_text()


def test_what_a_command_writes_is_gone_and_the_machine_is_not_touched(place, cache, tmp_path):
    script = "echo x >/data/new; echo x >/new; : >/dev/null; read a </proc/self/stat; echo ${a%% *}"
    code, out, err = done("run", place, *cache, "--scratch", tmp_path, "--", SHELL, "-c", script)

    assert (code, out) == (0, "1\n"), err
    assert not Path("/data").exists()
    assert not list(tmp_path.glob("omniload-run-*"))
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    code, _, _ = done("run", place, *cache, "--", SHELL, "-c", "test -e /data/new")
    assert code == 1


def test_variables_and_signals_reach_the_command(place, cache):
    # It waits for a line of standard input, which never comes.
    script = "trap 'echo told; exit 3' TERM; echo $GREETING $MORE; read x; :"
    lines = ("--env", "GREETING=hi", "-e", "MORE=1", "--", SHELL, "-c", script)
    with omniload("run", place, *cache, *lines) as process:
        assert process.stdout.readline() == "hi 1\n"
        process.send_signal(signal.SIGTERM)
        out = process.stdout.read()  # its input stays open: an end of that would end it, too

    assert (process.wait(timeout=60), out) == (3, "told\n")


def test_a_command_killed_by_a_signal_ends_with_128_and_its_number(place, cache):
    # The first is not heard: process 1 is deaf to what it does not handle. The second kills.
    script = "echo up; exec " + str(CAT)
    with omniload("run", place, *cache, "--", SHELL, "-c", script) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGHUP)
        process.wait(60)  # with its input open: at the end of that it would end by itself
        _, said = process.communicate()
    code, _, err = done("run", place, *cache, "--", SHELL, "-c", f"{SHELL} -c 'kill -9 $$'")

    assert process.returncode == 128 + signal.SIGKILL, said
    assert code == 128 + signal.SIGKILL, err


def test_a_window_that_ends_keeps_the_trace_while_the_command_goes_on(place, cache, tmp_path):
    # On a busy machine a window may end before the command has read anything: then there is nothing to keep.
    for window_s in (1, 10, 60):
        trace = tmp_path / f"trace-{window_s}"
        if (early := kept_in_a_window(place, cache, trace, window_s)) is not None:
            break

    assert early is not None
    assert trace.read_bytes() == early
    assert b"data/random2" not in early


def kept_in_a_window(place, cache, trace, window_s):
    """Return the trace of a command that goes on behind its window; nothing where it began behind that."""
    script = f"{CAT} random0 >/dev/null; echo up; read x; {CAT} random2 >/dev/null"
    words = ("--window", f"{window_s}s", *cache, "--", SHELL, "-c", script)
    with omniload("record", place, "-o", trace, *words) as process:
        assert process.stdout.readline() == "up\n"
        until_s = time.monotonic() + 2 * window_s
        while not trace.exists() and time.monotonic() < until_s:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
        early = trace.read_bytes() if trace.exists() else None
        process.communicate("\n", timeout=120)
    assert process.returncode == 0
    return early


def test_the_stage_of_the_image_is_told_with_bytes_by_tier(place, cache, tmp_path, monkeypatch):
    trace = tmp_path / "trace"
    words = ("--", SHELL, "-c", f"{CAT} random1 >/dev/null")
    done("record", place, "-o", trace, *cache, *words)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "events"))

    code, _, err = done("run", place, "--trace", trace, *cache, *words)

    assert code == 0, err
    events = [parse_event(line) for line in (tmp_path / "events").read_text().splitlines()]
    (end,) = (e for e in events if e.event == "end" and e.bytes)
    assert [e.stage for e in events if e.run == end.run] == ["image", "image"]
    assert end.facts["image"] == digest_of(place)
    hot = sum(touch.size_bytes for touch in decode_trace(trace.read_bytes(), name="t").touches)
    assert 0 < end.bytes["registry"] < 1.3 * hot
    assert {tier for tier, size in end.bytes.items() if size} == {"registry"}
    assert hot > 2_000_000
    fetched = end.bytes["registry"]

    assert done("run", place, "--trace", trace, *cache, *words)[0] == 0

    events = [parse_event(line) for line in (tmp_path / "events").read_text().splitlines()]
    again = [e.bytes for e in events if e.event == "end" and sum(e.bytes.values())][1]
    assert again["registry"] == 0 < again["disk"] <= fetched, "what was fetched is here now"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("run", "{image}-none", "--", "sh"), ConfigError.exit_code, "no such image"),
        (("run", "{image}"), ConfigError.exit_code, "names no command"),
        (("record", "{image}", "--window", "soon", "--", "sh"), ConfigError.exit_code, "soon"),
        (("run", "{image}", "--trace", "/none", "--", "sh"), ConfigError.exit_code, "no such file"),
        (("prefetch", "{image}", "--", "none"), ConfigError.exit_code, "no start of 'none'"),
        (("run", "{image}", "--", "/none"), 127, "/none"),
        (
            ("run", "{image}", "--scratch", "/proc", "--", "sh"),
            StateError.exit_code,
            "cannot be made",
        ),
    ],
)
def test_a_start_that_cannot_be_says_why(place, cache, words, code, message):
    found, _, err = done(
        *(w.format(image=place) for w in words[:2]),
        *cache[: 2 if words[0] == "prefetch" else 4],
        *words[2:],
    )

    assert message in err
    assert found == code


def test_a_command_writes_into_a_pipe_that_ends_as_it_would_anywhere(place, cache):
    # Python ignores SIGPIPE; what it becomes must not, or a writer goes on with an error.
    script = "(while echo y; do :; done; echo went on >&2) | (read x; echo $x)"

    code, out, err = done("run", place, *cache, "--", SHELL, "-c", script)

    assert (code, out) == (0, "y\n")
    assert "went on" not in err
    assert "write error" not in err


def test_a_start_with_another_thread_beside_it_is_refused(place, cache):
    gate = threading.Event()
    beside = threading.Thread(target=gate.wait)
    beside.start()
    try:
        found = CliRunner().invoke(command, ["run", str(place), *map(str, cache), "--", SHELL])
    finally:
        gate.set()
        beside.join()

    assert isinstance(found.exception, StateError)
    assert "threads cannot be forked" in str(found.exception)
