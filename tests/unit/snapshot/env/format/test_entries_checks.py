"""What a hostile snapshot would do is refused, each with a message that names it."""

import pytest

from omniload.base.errors import IntegrityError
from snapshot.env.format.entries import Entry, Kind, Limits, check_entries, check_link, check_path
from tests.support.snapshot.env_builders import TARGETS, a_file, a_folder, a_link

ROOTS = (a_folder(""), a_folder("", 1))


def check(*entries, limits=None):
    check_entries([*ROOTS, *entries], TARGETS, limits)


def test_what_an_installation_makes_is_accepted():
    check(
        a_file("tool", mode=0o755),
        a_folder("pkg", 1),
        a_file("pkg/x.py", 1),
        a_link("pkg/l", "x.py", 1),
        a_link("tool2", "../lib/pkg/x.py"),
        a_link("absolute", "/env/lib/pkg/x.py"),
        Entry(1, "old.py", Kind.DELETED),
    )


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../x",
        "a/../x",
        "a/./x",
        "a//x",
        "a/",
        "",
        ".",
        "..",
        "x\0y",
        "n" * 256,
        "/".join(["d" * 200] * 21),
        ".omniload-env",
        ".omniload-env/stage/0",
        "a/.omniload-env",
    ],
)
def test_a_path_that_could_leave_its_target_is_refused(path):
    with pytest.raises(IntegrityError):
        check_path(path)


@pytest.mark.parametrize("path", ["a", "a/b", "..a", "a..", "...", "ä/ö", "na\udcffme", "-rf", " "])
def test_an_odd_but_plain_path_is_accepted(path):
    check_path(path)


@pytest.mark.parametrize(
    "link",
    [
        "/etc/passwd",
        "../../etc/passwd",
        "..",
        "../..",
        "x/../../../etc",
        "x/..",
        "",
        "a\0b",
        "/",
        "/env",
        "/env/libx",
        "/env/lib/../../etc",
        "l" * 5000,
    ],
)
def test_a_link_that_leads_out_or_could_is_refused(link):
    with pytest.raises(IntegrityError):
        check_link(a_link("l", link), TARGETS)


@pytest.mark.parametrize(
    "link", ["x", "./x", "d/x", "../lib/x", "../bin", ".", "/env/lib", "/env/bin/x"]
)
def test_a_link_to_a_place_in_a_target_is_accepted(link):
    check_link(a_link("l", link), TARGETS)


def test_a_file_below_a_link_is_refused():
    with pytest.raises(IntegrityError, match="above 'l/x' is no directory"):
        check(a_link("l", "."), a_file("l/x"))


def test_a_file_below_a_file_is_refused():
    with pytest.raises(IntegrityError, match="above 'f/x' is no directory"):
        check(a_file("f"), a_file("f/x"))


def test_a_file_below_nothing_is_refused():
    with pytest.raises(IntegrityError, match="above 'd/x' is no directory"):
        check(a_file("d/x"))


@pytest.mark.parametrize(
    ("one", "other"), [("Name", "name"), ("straße", "STRASSE"), ("e\u0301", "\u00e9")]
)
def test_paths_that_differ_by_case_only_are_refused_unless_allowed(one, other):
    with pytest.raises(IntegrityError, match="differ by case only"):
        check(a_file(one), a_file(other))

    check(a_file(one), a_file(other), limits=Limits(case_pairs=True))


def test_the_same_path_in_two_targets_is_no_pair():
    check(a_file("x"), a_file("X", 1))


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1777, 0o100644])
def test_modes_beyond_the_plain_ones_are_refused(mode):
    with pytest.raises(IntegrityError, match="only 777 is allowed"):
        check(a_file("x", mode=mode))


def test_another_kind_of_entry_is_refused():
    with pytest.raises(IntegrityError, match="of kind 9"):
        check(Entry(0, "x", 9))


def test_a_target_that_is_not_there_is_refused():
    with pytest.raises(IntegrityError, match="target 2 of 2"):
        check(a_file("x", target=2))


@pytest.mark.parametrize("changes", [{"size_bytes": -1}, {"digest": b""}, {"digest": b"x" * 20}])
def test_a_file_without_a_size_or_digest_is_refused(changes):
    with pytest.raises(IntegrityError, match="no size or no SHA-256"):
        check(a_file("x", **changes))


def test_more_bytes_than_allowed_are_refused():
    with pytest.raises(IntegrityError, match="files of 6 bytes, more than 5"):
        check(a_file("x"), a_file("y"), limits=Limits(raw_bytes=5))


def test_more_entries_than_allowed_are_refused():
    with pytest.raises(IntegrityError, match="3 entries, more than 2"):
        check(a_file("x"), limits=Limits(entries=2))


def test_a_target_itself_may_only_be_a_directory():
    with pytest.raises(IntegrityError):
        check_entries([a_file("")], TARGETS)


@pytest.mark.parametrize(
    ("kind", "links"),
    [(Kind.DIRECTORY, ""), (Kind.FILE, ""), (Kind.LINK, "x"), (Kind.DELETED, "")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_kind_of_entry_needs_a_plain_path(kind, links):
    digest = b"d" * 32 if kind is Kind.FILE else b""

    with pytest.raises(IntegrityError, match=r"has the component '\.\.'"):
        check(Entry(1, "a/../b", kind, digest=digest, link=links))


@pytest.mark.parametrize("above", ["absent", "deleted", "link", "file"])
def test_only_a_directory_of_the_snapshot_may_hold_an_entry(above):
    over = {
        "absent": (),
        "deleted": (Entry(1, "d", Kind.DELETED),),
        "link": (a_link("d", "x", 1),),
        "file": (a_file("d", 1),),
    }[above]

    with pytest.raises(IntegrityError, match="above 'd/f' is no directory"):
        check(*over, a_file("d/f", 1))
    with pytest.raises(IntegrityError, match="above 'd/e/f' is no directory"):
        check(*over, a_file("d/e/f", 1))


def test_a_root_that_is_missing_is_refused():
    with pytest.raises(IntegrityError, match="above 'x' is no directory"):
        check_entries([a_file("x")], TARGETS)


def test_a_limit_counts_twins_as_often_as_they_are_written():
    twins = [a_file(f"f{number}", size_bytes=10) for number in range(10)]

    check(*twins, limits=Limits(raw_bytes=100))
    with pytest.raises(IntegrityError, match="files of 100 bytes, more than 99"):
        check(*twins, limits=Limits(raw_bytes=99))


def test_the_names_of_a_restore_are_kept_from_snapshots_in_every_target():
    for target in (0, 1):
        with pytest.raises(IntegrityError, match="records of a restore"):
            check(a_folder(".omniload-env", target))


def test_an_empty_snapshot_is_accepted():
    check_entries([], TARGETS)
