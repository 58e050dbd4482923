"""The process of a role, for a shell."""

import time

import pytest
from click.testing import CliRunner

from omniload.commands.runs import top as module
from omniload.machine.status import PlaneStatus, RoleLine

ROLES = {"loader-0+12": 7, "loader-0+2": 6, "planner": 5, "rank dp=0": 4}


def asked(monkeypatch, role, **changes):
    lines = [
        RoleLine(
            name=name,
            pid=pid,
            state="",
            age_s=0,
            task_s=0,
            waits_for=(),
            figures={},
            rates={},
            memory_bytes=None,
        )
        for name, pid in ROLES.items()
    ]
    status = PlaneStatus(written_at=time.time(), host="h", pid=1, roles=lines, **changes)
    monkeypatch.setattr(module, "read_status", lambda _: status)
    return CliRunner().invoke(module.top, ["run", "--pid", role])


@pytest.mark.parametrize(
    ("role", "pid"),
    [("planner", 5), ("rank dp=0", 4), ("loader-0+12", 7), ("loader-0", 6)],
)
def test_it_is_that_of_the_life_that_began_first_of_those_left(monkeypatch, role, pid):
    assert asked(monkeypatch, role).output == f"{pid}\n"


def test_a_role_that_is_not_there_is_told_with_those_that_are(monkeypatch):
    missing, ended = asked(monkeypatch, "loader-1"), asked(monkeypatch, "planner", has_ended=True)

    assert str(missing.exception) == (
        "run: it has no role 'loader-1'; its roles are loader-0+12, loader-0+2, planner, rank dp=0"
    )
    assert str(ended.exception).startswith("run: its plane has ended; its roles are loader-0+12")
