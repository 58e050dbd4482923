"""``omniload image prefetch``, from a layout: what it brings, says, and refuses; and who may record."""

import json
import os
import re

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError, StateError, UnavailableError
from snapshot.commands import image_run
from snapshot.commands.image import command
from snapshot.commands.image_run import startup_command
from snapshot.image.mount.daemon import AUTO, mount_settings
from snapshot.image.trace.sharing import pull_trace, push_trace
from snapshot.image.trace.store import TraceStore
from snapshot.image.trace.trace import Touch, encode_trace, trace_of
from snapshot.oci.layout import OciLayout
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_image, zran_friendly
from tests.support.snapshot.startup_builders import a_pair, a_start, write_events, write_nodes

TAR = a_tar(a_member("big", zran_friendly(5_000_000)))
RUN = ("python", "a.py")


@pytest.fixture
def place(tmp_path):
    """An image in a layout, and the trace of a start that touched its first 2 MB."""
    layout = OciLayout.create(tmp_path / "layout")
    layer = a_layer(layout, TAR, "tar")
    digest = an_image(layout, [(layer, TAR)], command=RUN).digest
    trace = trace_of(digest, RUN, [Touch(1, "big", 0, 2_000_000)])
    (tmp_path / "trace").write_bytes(encode_trace(trace))
    return tmp_path, layout, layer, trace


def test_a_command_that_touched_nothing_has_its_exit_code_also_where_its_trace_is_to_be_pushed(
    place, monkeypatch
):
    folder, layout, _, trace = place
    settings = mount_settings(f"oci:{folder / 'layout'}:v", "", (f"cache={folder / 'cache'}",))
    settings = settings.model_copy(update={"record": AUTO, "command": ("/none",)})
    monkeypatch.setattr(image_run, "_started", lambda *_: (settings, 127))

    done = CliRunner().invoke(command, ["record", settings.image, "--push", "--", "/none"])

    assert done.exit_code == 127
    assert "nothing is pushed" in done.stderr
    assert pull_trace(layout, trace.image, ("/none",)) is None


def prefetch(folder, *words):
    given = ["prefetch", f"oci:{folder / 'layout'}:v", "--option", f"cache={folder / 'cache'}"]
    found = CliRunner().invoke(command, [*given, *map(str, words)])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.stdout


def test_the_blocks_of_a_trace_are_brought_once(place):
    folder, *_ = place

    first = json.loads(prefetch(folder, "--trace", folder / "trace", "--json"))
    again = prefetch(folder, "--trace", folder / "trace")

    assert first["blocks"] == 2
    assert first["bytes_of"] == {"registry": 2 << 20}
    assert again == "2 blocks, 2 of them here before, 0 B moved\n"


def test_the_trace_is_found_by_the_command_of_the_image_or_the_one_given(place):
    folder, layout, _, trace = place
    with pytest.raises(ConfigError, match=r"no start of 'python a\.py'"):
        prefetch(folder)

    push_trace(layout, trace)
    assert prefetch(folder).startswith("2 blocks")
    TraceStore(folder / "cache/traces").add(trace)
    assert prefetch(folder, "--", "python", "a.py", "--more").startswith("2 blocks")
    with pytest.raises(ConfigError, match="no start of 'sh'"):
        prefetch(folder, "--", "sh")


def test_blocks_that_are_not_to_be_had_are_an_outage(place):
    folder, _, layer, _ = place
    prefetch(folder, "--trace", folder / "trace")
    for path in (folder / "cache/blocks").glob("??/*"):
        path.unlink()
    (folder / "layout/blobs/sha256" / layer.digest.partition(":")[2]).unlink()

    with pytest.raises(UnavailableError, match="2 of 2 blocks"):
        prefetch(folder, "--trace", folder / "trace")


def test_a_cap_too_low_to_keep_them_is_said(place):
    folder, *_ = place

    with pytest.raises(StateError, match="2 of 2 blocks are not kept"):
        prefetch(folder, "--trace", folder / "trace", "--option", "disk=1KiB")


@pytest.mark.parametrize("verb", ["run", "record"])
def test_who_is_not_root_starts_nothing(monkeypatch, verb):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    found = CliRunner().invoke(command, [verb, "oci:/none:v", "--", "sh"])

    assert isinstance(found.exception, ConfigError)
    assert "run it as root" in str(found.exception)


def told(*arguments):
    result = CliRunner().invoke(
        startup_command, [str(each) for each in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments):
    with pytest.raises(ConfigError) as caught:
        told(*arguments)
    return str(caught.value)


@pytest.fixture
def start(tmp_path):
    return write_nodes(tmp_path / "start", a_start(slow="n2"))


def test_the_table_names_the_straggler(start):
    text = told(start)

    line = next(line for line in text.splitlines() if line.startswith("environment"))
    assert re.split(r"\s{2,}", line.strip()) == [
        "environment", "3", "100.0 s", "150.0 s", "1.50", "50.0 s", "n2", "150.0 s", "store 810 MiB",
    ]  # fmt: skip
    assert "worst straggler n2: 50.0 s over the median in environment" in text
    assert "note:" not in text


def test_what_is_missing_is_noted_under_the_table(tmp_path):
    events = a_pair("image", "a", 0, None) + a_pair("checks", "a", 0, 1, facts={"error": "OSError"})
    events += a_pair("process_group", "a", 1, 2) + a_pair("process_group", "b", 9, 10)
    path = write_events(tmp_path / "n.jsonl", [*events, a_pair("queue", "a", 3, 4)[1]])
    with path.open("a") as file:
        file.write('{"version":1,"jo')

    text = told(path)

    for note in (
        "image has no end on a; it is not in its figures",
        "checks failed on a: OSError",
        "the first step was not reached",
        "clocks are at least 7.00 s apart: a left process_group before b entered it; the critical",
        "1 ends have no begin",
        "1 lines were cut short",
    ):
        assert f"note: {note}" in text


def test_the_difference_of_two_attempts_of_a_job_names_the_stage_that_explains_it(tmp_path):
    cold = a_start(attempt=0)
    warm = a_start(attempt=1, environment_s=10)
    path = write_events(tmp_path / "all.jsonl", cold + warm)

    text = told(path, "--against", path, "--against-attempt", 0)

    assert text.startswith("attempt 1 of 0 (240.0 s), 1 (150.0 s)\n")
    assert "90.0 s less, 0.62 of before. environment explains 100% of it: 100.0 s to 10.0 s" in text
    assert "Both starts took the same time." in told(path, "--against", path)


def test_a_job_or_attempt_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    path = write_events(tmp_path / "all", a_start() + a_start(job="other", attempt=4))

    assert "hold 2 jobs: 'other', 'pretrain'; choose one with --job" in refusal(path)
    assert "no job 'x' in the files; they hold 'other', 'pretrain'" in refusal(path, "--job", "x")
    assert "no attempt 3 in the files" in refusal(path, "--job", "other", "--attempt", "3")
    assert re.search(r"total +3 +240.0 s", told(path, "--job", "other", "--attempt", "4"))
    assert "was OMNILOAD_STARTUP_LOG set" in refusal(write_events(tmp_path / "none", []))


def test_names_from_a_log_are_never_markup(tmp_path):
    bad = "<script>alert(1)</script>[red]&\"'"
    path = write_events(
        tmp_path / "bad", a_pair(bad, bad, 0, 5, job=bad, facts={"error": bad, bad: bad})
    )
    assert bad in told(path)


def test_names_from_a_log_give_a_terminal_no_orders(tmp_path):
    bad = "\x1b[2Jn\u202e1\n"
    path = write_events(tmp_path / "bad", a_pair(bad, bad, 0, None, job=bad))

    text = told(path)

    assert "\x1b" not in text
    assert r"\x1b[2Jn\u202e1\n has no end on \x1b[2Jn\u202e1\n" in text


def test_the_timeline_is_written_for_perfetto(start, tmp_path):
    told(start, "--perfetto", tmp_path / "trace.json")

    document = json.loads((tmp_path / "trace.json").read_text())
    names = {e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    assert names == {"critical path", "login", "n1", "n2", "n3"}
    assert not [left for left in tmp_path.iterdir() if left.name.startswith(".")]


def test_a_timeline_that_cannot_be_written_is_named(start, tmp_path):
    assert "cannot be written" in refusal(start, "--perfetto", tmp_path / "no" / "trace.json")
