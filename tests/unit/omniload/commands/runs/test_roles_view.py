"""The places of roles in ``omniload mix top``."""

import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from omniload.base.log import log_name
from omniload.commands.runs import roles_view as roles_view_module
from omniload.commands.runs.roles_view import roles_view, status_json
from omniload.machine.scaling.measured import Reading
from omniload.machine.status import PlaneStatus, RoleLine


def a_role(name, host, **figures):
    return RoleLine(
        name=name,
        pid=7,
        state="stands by",
        age_s=0.0,
        task_s=1.0,
        waits_for=(),
        figures=figures,
        rates={},
        memory_bytes=None,
        host=host,
    )


def shown(tmp_path, *hosts, **figures):
    roles = tuple(a_role(f"loader-{number}", host, **figures) for number, host in enumerate(hosts))
    status = PlaneStatus(written_at=time.time(), host="10.0.0.1", pid=1, roles=roles)
    console = Console(width=200)
    with console.capture() as said:
        console.print(roles_view(tmp_path, status))
    return said.get()


@pytest.mark.parametrize(
    ("hosts", "is_told"), [(("10.0.0.1", "10.0.0.2"), True), (("10.0.0.1", "10.0.0.1"), False)]
)
def test_where_each_role_is_is_told_once_there_are_two_hosts(tmp_path, hosts, is_told):
    heading, *rows = (
        [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]
        for line in shown(tmp_path, *hosts).splitlines()
        if line[:1] in "┃│"
    )

    assert heading[:3] == (["role", "on", "does"] if is_told else ["role", "does", "for"])
    assert rows[1][:2] == ["loader-1", hosts[1] if is_told else "stands by"]


def test_processes_are_told_apart_where_roles_are_not_threads_of_one(tmp_path):
    roles = (
        a_role("planner", "10.0.0.1"),
        a_role("loader-0", "10.0.0.1").model_copy(update={"pid": 8}),
    )
    status = PlaneStatus(written_at=time.time(), host="10.0.0.1", pid=1, roles=roles)
    console = Console(width=200)
    with console.capture() as said:
        console.print(roles_view(tmp_path, status))

    heading, *rows = (line.split() for line in said.get().splitlines() if line[:1] in "┃│")
    assert heading[3] == "process"
    assert [row[3] for row in rows] == ["7", "8"]


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_a_status_that_nobody_writes_beside_a_full_disk_says_so(tmp_path, monkeypatch, free):
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(roles_view_module.shutil, "disk_usage", lambda _: usage)
    roles = (a_role("planner", "10.0.0.1"),)
    status = PlaneStatus(written_at=time.time() - 60, host="10.0.0.1", pid=1, roles=roles)
    console = Console(width=400)
    with console.capture() as said:
        console.print(roles_view(tmp_path, status))

    text = " ".join(said.get().split())
    assert "the plane has ended, or is stopped" in text
    assert ("the disk of the run is full, 0 B are free there, or" in text) == (free == 0)


@pytest.mark.parametrize("has_ended", [True, False])
def test_below_a_plane_that_failed_stands_why(tmp_path, has_ended):
    (tmp_path / "logs").mkdir()
    line = "2026-11-27 17:30:23,502 ERROR the data plane stops: a.jsonl: gone"
    (tmp_path / "logs" / log_name("planner")).write_text(f"{line}\n")
    planner = a_role("planner", "10.0.0.1").model_copy(update={"log": "planner.log"})
    status = PlaneStatus(
        written_at=time.time(), host="10.0.0.1", pid=1, roles=(planner,), has_ended=has_ended
    )

    assert status_json(tmp_path, status)["last_lines"] == ({"planner": line} if has_ended else {})


def test_how_many_read_a_source_and_why_no_more_stands_below_the_roles(tmp_path):
    web = Reading(readers=2, share=0.5, core=1.0).figures("web")

    assert "loader-0: web is read by 2, 50% of the time, which is enough" in shown(
        tmp_path, "10.0.0.1", **web
    )
