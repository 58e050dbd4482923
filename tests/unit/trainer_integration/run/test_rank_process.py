"""A rank's process as the launcher sees it: strange lines, observers that fail, exits that always arrive."""

import os
import signal
import sys
import threading
from dataclasses import dataclass

import psutil
import pytest

from omniload.base import log as log_module
from omniload.base.errors import ConfigError
from tests.support.trainer.run_lines import a_memory, a_step, an_event
from trainer_integration.run.rank_process import (
    ASK_TO_END,
    Attempt,
    RankProcess,
    pss_by_role,
    python_of_ranks,
)

_LONG_S = 60


class Heard:
    """Takes the lines and the exit of a process."""

    def __init__(self, refuse=False):
        self.lines, self.codes, self.ended = [], [], threading.Event()
        self._refuse = refuse

    def line(self, line):
        self.lines.append(line)
        if self._refuse:
            raise RuntimeError("an observer that fails")

    def exit(self, code):
        self.codes.append(code)
        self.ended.set()


def run(folder, program, specification="", heard=None):
    """Run a Python program as a rank to its end."""
    heard = heard or Heard()
    log = folder / "logs" / "rank-0-attempt-0.log"
    process = RankProcess((sys.executable, "-c", program), specification, log)
    process.listen(heard.line, heard.exit)
    assert heard.ended.wait(_LONG_S)
    process.join(_LONG_S)
    return process, heard, log


def a_program(*texts, code=0):
    """Return a program that writes ``texts`` to standard output and exits."""
    return f"import sys\nsys.stdout.buffer.write({b''.join(texts)!r})\nsys.exit({code})"


def text_of(line):
    return line.model_dump_json().encode() + b"\n"


def test_lines_arrive_in_their_order_and_then_the_exit(tmp_path):
    lines = [a_step(0), an_event("checkpoint", "step-00000001", step=1), a_step(1)]

    _, heard, _ = run(tmp_path, a_program(*map(text_of, lines)))

    assert heard.lines == lines
    assert heard.codes == [0]


@pytest.mark.parametrize(
    "stray", [b"NCCL version 2\n", b"\xff\xfe\x00\n", b"{}\n", b"3\n", b"\n", b"[" * 9999 + b"\n"]
)
def test_a_stray_line_goes_to_the_log_and_stops_nothing(tmp_path, stray):
    _, heard, log = run(tmp_path, a_program(text_of(a_step(0)), stray, text_of(a_step(1))))

    assert heard.lines == [a_step(0), a_step(1)]
    assert heard.codes == [0]
    said = stray.decode(errors="backslashreplace").replace("\0", "\\x00")
    assert log.read_text() == said


def test_what_a_rank_says_and_stray_lines_share_the_log(tmp_path):
    program = "import sys\nprint('said', file=sys.stderr, flush=True)\nprint('stray', flush=True)"

    _, _, log = run(tmp_path, program)

    assert sorted(log.read_text().split()) == ["said", "stray"]


def test_a_line_that_only_the_launcher_writes_is_not_taken(tmp_path):
    _, heard, _ = run(tmp_path, a_program(text_of(a_memory(1.0, rank_0=5))))

    assert heard.lines == []


def test_an_observer_that_fails_neither_stops_the_lines_nor_hides_the_exit(tmp_path):
    lines = [a_step(0), a_step(1)]

    _, heard, _ = run(tmp_path, a_program(*map(text_of, lines), code=3), heard=Heard(refuse=True))

    assert heard.lines == lines
    assert heard.codes == [3]


def test_the_specification_is_what_the_process_reads(tmp_path):
    program = "import sys\nsys.stderr.write(sys.stdin.read().upper())"

    _, _, log = run(tmp_path, program, "specification")

    assert log.read_text() == "SPECIFICATION\n"


def test_a_process_that_reads_nothing_is_reported_by_its_exit(tmp_path):
    _, heard, _ = run(tmp_path, "import os\nos._exit(7)", "x" * (1 << 20))

    assert heard.codes == [7]


def test_a_log_is_never_overwritten(tmp_path):
    run(tmp_path, "pass")

    with pytest.raises(FileExistsError):
        run(tmp_path, "pass")


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("pass", "code 0"),
        ("import sys\nprint('first\\nlast ', file=sys.stderr)\nsys.exit(4)", "code 4: last"),
        ("import sys\nsys.exit(4)", "code 4: it wrote nothing"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
        ("import os\nos.kill(os.getpid(), 40)", "signal 40"),
    ],
)
def test_the_cause_of_an_exit_is_told(tmp_path, program, cause):
    process, heard, _ = run(tmp_path, program)

    assert process.cause(heard.codes[0]) == cause


def test_a_long_log_is_read_from_its_end(tmp_path):
    program = "import sys\nsys.stderr.write('x' * 1_000_000 + '\\nthe cause')\nsys.exit(1)"

    process, heard, _ = run(tmp_path, program)

    assert process.cause(heard.codes[0]) == "code 1: the cause"


def test_a_process_that_was_killed_is_known_from_one_that_died(tmp_path):
    heard = Heard()
    process = RankProcess(
        (
            sys.executable,
            "-c",
            "import sys\nsys.stdin.read()\nprint('{}')\nimport signal\nsignal.pause()",
        ),
        "",
        tmp_path / "rank.log",
    )
    process.listen(heard.line, heard.exit)

    ended_by_itself = process.wait(0.0)
    process.kill()
    process.join(_LONG_S)

    assert not ended_by_itself
    assert process.killed
    assert heard.codes == [-9]


def test_a_process_that_ended_by_itself_was_not_killed(tmp_path):
    process, _, _ = run(tmp_path, "pass")

    process.kill()

    assert process.wait(0.0)
    assert not process.killed


def test_a_process_is_asked_to_end_and_ends_in_its_own_way(tmp_path):
    heard = Heard()
    program = (
        "import signal, sys\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(ASK_TO_END)}])\n"
        f"sys.stdout.buffer.write({text_of(a_step(0))!r})\n"
        "sys.stdout.flush()\n"
        f"signal.sigwait([{int(ASK_TO_END)}])\n"
        "sys.exit(6)"
    )
    process = RankProcess((sys.executable, "-c", program), "", tmp_path / "rank.log")
    # Its first line says that it listens.
    process.listen(lambda _line: process.ask_to_end(), heard.exit)

    assert heard.ended.wait(_LONG_S)
    process.join(_LONG_S)
    assert heard.codes == [6]
    assert not process.killed


def test_what_a_rank_says_is_kept_in_bounds_and_without_secrets(tmp_path, monkeypatch):
    assert log_module._LARGEST_FILE_BYTES == 4 << 20
    monkeypatch.setattr(log_module, "_LARGEST_FILE_BYTES", 128 << 10)
    said = "for i in range(100): print('s3://K:SECRETSECRET@b', i, 'x' * 4000, file=sys.stderr)"

    process, _, log = run(tmp_path, f"import sys\n{said}\nsys.exit(3)")

    kept = sorted(log.parent.iterdir())
    assert [path.name for path in kept] == [log.name, f"{log.name}.1"]
    assert sum(path.stat().st_size for path in kept) <= 256 << 10
    assert process.cause(3).startswith("code 3: s3://***@b 99 xxx")


def test_one_that_is_stopped_says_so_until_it_goes_on(tmp_path):
    heard = Heard()
    process = RankProcess(
        (sys.executable, "-c", "import signal; signal.pause()"), "", tmp_path / "rank.log"
    )
    assert not process.is_stopped()

    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert process.is_stopped()

    process.kill()
    process.listen(heard.line, heard.exit)
    assert heard.ended.wait(_LONG_S)
    assert not process.is_stopped(), "it has ended"


@dataclass
class Rank:
    pid: int
    stopped: bool = False
    killed: bool = False

    def is_stopped(self):
        return self.stopped

    def kill(self):
        self.killed = True


class Plane:
    ended = ""

    def ended_service(self):
        return self.ended


def test_a_rank_that_is_stopped_is_told_once_with_what_to_do_and_again_when_it_is_stopped_anew():
    attempt = Attempt(0, ranks={0: Rank(71), 1: Rank(72)})
    assert not list(attempt.newly_stopped())

    attempt.ranks[1].stopped = True
    (said,) = attempt.newly_stopped()
    assert "rank 1 (process 72) is stopped" in said
    assert "kill -CONT 72" in said
    assert "kill -9 72" in said
    assert not list(attempt.newly_stopped())

    attempt.ranks[1].stopped = False
    assert not list(attempt.newly_stopped())
    attempt.ranks[1].stopped = True
    assert list(attempt.newly_stopped()) == [said]


def test_ranks_end_once_a_server_of_their_ray_has_ended():
    plane = Plane()
    attempt = Attempt(0, plane=plane, ranks={0: Rank(71), 1: Rank(72)})
    assert attempt.end_without_ray() == ""
    assert not any(rank.killed for rank in attempt.ranks.values())

    plane.ended = "raylet ended with -9"
    said = "Ray's raylet ended with -9, and the data plane with it"
    assert attempt.without_ray() == said
    assert not any(rank.killed for rank in attempt.ranks.values())
    assert attempt.end_without_ray() == said
    assert all(rank.killed for rank in attempt.ranks.values())
    assert attempt.end_without_ray() == "", "it is told once"


def test_what_the_launcher_ends_itself_is_not_told_as_lost():
    plane = Plane()
    attempt = Attempt(0, plane=plane, ranks={0: Rank(71)}, is_ending=True)

    plane.ended = "raylet ended with -9"

    assert attempt.end_without_ray() == ""
    assert not attempt.ranks[0].killed


def test_ranks_without_a_plane_of_actors_are_left_alone():
    assert Attempt(0, ranks={0: Rank(71)}).end_without_ray() == ""


def test_processes_go_by_their_roles_and_those_that_ended_take_no_memory():
    attempt = Attempt(0, ranks={0: Rank(psutil.Process().pid)}, roles={"planner": 1 << 30})
    assert attempt.pids == {"rank 0": psutil.Process().pid, "planner": 1 << 30}
    sizes = pss_by_role(attempt.pids)
    assert sizes["rank 0"] > 0
    assert "planner" not in sizes


def test_ranks_have_the_python_that_is_named_or_the_launchers_own():
    assert python_of_ranks({}) == sys.executable
    assert python_of_ranks({"PYTHON_EXEC": "sh"}).endswith("/sh")
    with pytest.raises(ConfigError, match=r"PYTHON_EXEC is '/none', .*; name a Python, or unset"):
        python_of_ranks({"PYTHON_EXEC": "/none"})
