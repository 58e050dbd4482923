"""What the environment benchmark runs, and how it tells what it measured."""

import statistics

import pytest

pytest.importorskip("boto3")
from benchmarks.startup.environment import NAMES, Bench, Samples, contenders, far_table, tables_of


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(Bench, "_uv", lambda _: "/tools/uv")
    return Bench(tmp_path)


def samples(*seconds, moved=()):
    return Samples([*seconds], [each / 2 for each in seconds], [*moved])


def test_every_name_has_a_contender_and_every_contender_a_name(bench):
    assert sorted(contenders(bench)) == sorted(NAMES)


def test_like_is_compared_with_like(bench):
    runs = {name: words for name, (_, words) in contenders(bench).items()}

    assert "--compile-bytecode" in runs["uv, warm, byte code"]
    assert "--compile-bytecode" not in runs["uv, warm"]
    assert "BARE=1" in runs["linked, no byte code"]
    assert "BARE=1" not in runs["linked"]
    assert "--no-byte-code" in bench.ours("save", bare=True)
    assert "--no-byte-code" not in bench.ours("save")
    assert "--no-byte-code" not in bench.ours("restore", "--auto", "--form", "link", bare=True)


def test_our_command_has_its_byte_code_and_the_environment_of_pip_its_own(bench):
    restore, save = bench.ours("restore", "--auto"), bench.ours("save")

    assert any(word.startswith("PYTHONPYCACHEPREFIX=") for word in restore)
    assert not any(word.startswith("PYTHONPYCACHEPREFIX=") for word in save)
    assert restore[restore.index("--") :] == ["--", *bench.pip()]


def test_forms_have_a_node_cache_of_their_own_and_both_snapshots_share_it(bench):
    def cache(*words, **how):
        (found,) = (w for w in bench.ours("restore", *words, **how) if "OMNILOAD_ENV_CACHE" in w)
        return found

    assert cache("--form", "mount") != cache("--form", "link")
    assert cache("--form", "link", bare=True) == cache("--form", "link")


def test_what_is_emptied_is_put_aside_and_not_removed(bench):
    for _ in range(2):
        (bench.folder / "cache").mkdir()
        (bench.folder / "cache" / "file").write_text("1")
        bench.empty("cache")
    bench.empty("cache")

    assert not (bench.folder / "cache").exists()
    aside = list((bench.folder / "aside").iterdir())
    assert [path.name.partition("-")[0] for path in aside] == ["cache"] * 2
    assert all((path / "file").exists() for path in aside)


def test_a_run_that_fails_is_told_with_what_it_said(bench):
    with pytest.raises(RuntimeError, match=r"ended with 3: oh"):
        Samples().take(["sh", "-c", "echo oh >&2; exit 3"], {})


def test_tables_give_medians_and_ratios_to_uv_and_to_native():
    restores = {"uv, warm": samples(1.0, 3.0, 2.0), "mounted": samples(0.5, 0.7, 0.6)}
    imports = {"native": samples(2.0), "mounted": samples(2.1)}

    first, second = tables_of(restores, imports)

    assert first.rows[0] == ("uv, warm", "2.00", "1.00", "1.00", "1.00", "1.00")
    assert first.rows[1] == ("mounted", "0.60", "0.50", "0.30", "0.30", "0.30")
    assert second.rows[1][4] == "1.05"


def test_the_slow_link_is_told_with_the_bytes_that_passed_it():
    moved = [122.4, 121.6, 122.0]
    measured = {
        "uv, cold, far": samples(6.0, moved=moved),
        "fetched, far": samples(3.0, moved=[100.2]),
    }

    table = far_table(measured, 25.0)

    assert [row[-1] for row in table.rows] == [f"{statistics.median(moved):.0f}", "100"]
    assert table.rows[1][4] == "0.50"
    assert "25 MB/s" in table.caption
    assert len(table.columns) == len(table.rows[0])
