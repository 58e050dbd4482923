"""``omniload mix stats``: a view of the data before training."""

import gzip
import io
import random
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from omniload.actors.local.plane import LocalPlane
from omniload.base.errors import ConfigError, IntegrityError
from omniload.commands import stats
from omniload.source.distinct.drawn_before import write_drawn
from tests.support.drawn import a_drawn_mix, png_of, ramp
from tests.support.plane.builders import a_mix
from tests.support.plane.corpora import write_texts
from tests.support.plane.edits.mix_commands import json_of, run_mix


@pytest.fixture
def texts():
    rng = random.Random(3)
    return {
        name: ["".join(rng.choices("abcdef ", k=rng.randint(1, 200))) for _ in range(count)]
        for name, count in (("web", 700), ("code", 90))
    }


@pytest.fixture
def mix_path(tmp_path, texts, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts["web"] += texts["web"][:30] + texts["code"][:5]
    for name, documents in texts.items():
        write_texts(tmp_path / f"{name}.jsonl", documents)
    source = {"type": "jsonl", "on_error": {"policy": "skip", "limit": 10}}
    mix = {
        "version": 1,
        "seed": 1,
        "tokenizer": {"type": "bytes"},
        "sources": {name: {**source, "path": f"{name}.jsonl"} for name in texts},
        "mix": {"stages": [{"from_step": 0, "weights": {"web": 3, "code": 1}}]},
        "pack": {"length": 256},
        "batch": {"tokens": 2048, "micro_tokens": 512},
    }
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(mix), encoding="utf-8")
    return path


def test_records_that_cannot_be_decoded_give_an_epoch_no_tokens(mix_path, texts):
    bad = "{}\n" * 9 + (mix_path.parent / "code.jsonl").read_text()
    (mix_path.parent / "code.jsonl").write_text(bad)

    code = json_of("stats", mix_path, "--all", "--measure", 0)["sources"][0]

    assert (code["records"], code["bad"]) == (99, 9)
    assert code["epoch_tokens"] == sum(len(text) + 1 for text in texts["code"])


def test_the_tokens_of_an_epoch_of_a_split_are_an_estimate_though_every_document_is_looked_at(
    mix_path,
):
    assert "about" not in run_mix("stats", mix_path, "--all", "--measure", 0).stdout
    mix_path.write_text(mix_path.read_text() + "splits: {held: 0.2}\n")

    assert "about" in run_mix("stats", mix_path, "--all", "--measure", 0).stdout


def test_every_document_is_counted(mix_path, texts):
    found = json_of("stats", mix_path, "--all", "--steps", 100, "--measure", 0.01)

    code, web = found["sources"]
    for source, documents in ((code, texts["code"]), (web, texts["web"])):
        lengths = [len(text) + 1 for text in documents]
        assert (source["records"], source["looked_at"]) == (len(documents), len(documents))
        assert source["epoch_tokens"] == sum(lengths)
        assert source["length"]["longest"] == max(lengths)
        assert sum(source["length"]["by_doubling"]) == len(documents)
        share = 3 / 4 if source is web else 1 / 4
        assert source["epochs"] == pytest.approx(100 * 2048 * share / sum(lengths))
        assert source["steps_per_epoch"] == -(-sum(lengths) // int(2048 * share))
    repeated = len(texts["web"]) - len(set(texts["web"]))
    assert (web["repeated"], code["repeated"]) == (repeated, 0)
    assert found["pairs"] == [["code", "web", len({*texts["code"]} & {*texts["web"]})]]
    assert found["measured"]["tokens_per_s"] > 0


def test_the_first_epoch_is_without_the_records_that_were_drawn_before(mix_path, texts):
    write_drawn(mix_path.with_name("drawn.arrow"), [("web.jsonl", np.arange(365))])  # of 735
    whole = json_of("stats", mix_path, "--all", "--measure", 0.01)
    mix = yaml.safe_load(mix_path.read_text())
    mix["sources"]["web"]["drawn_before"] = "drawn.arrow"
    mix_path.write_text(yaml.safe_dump(mix), encoding="utf-8")

    rest = json_of("stats", mix_path, "--all", "--measure", 0.01)

    (code, web), (code_before, web_before) = rest["sources"], whole["sources"]
    part = 1 - 365 / len(texts["web"])
    assert web["steps_per_epoch"] == pytest.approx(web_before["steps_per_epoch"] * part, abs=1)
    assert code["steps_per_epoch"] == code_before["steps_per_epoch"]
    assert web["epoch_tokens"] == web_before["epoch_tokens"]
    tokens = code["epoch_tokens"] + part * web["epoch_tokens"]
    assert rest["steps"] == pytest.approx(tokens / 2048, abs=1)


def test_a_column_that_no_batch_brings_is_read_by_nobody_who_measures(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The nulls come after the first records, in which a check looks at every column.
    scores = [1.0] * 200 + [None] * 40
    table = pa.table({"ids": [[1, 2, 3]] * 240, "score": scores})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=120)
    source = {
        "type": "parquet",
        "path": "a.parquet",
        "tokens": "ids",
        "columns": {"scores": "score"},
    }
    bad = {}
    for brought in ([], ["scores"]):
        mix = a_mix(sources={"web": source | {"on_error": {"policy": "skip", "limit": 50}}})
        content = mix.model_dump(mode="json")
        content["batch"]["columns"] = brought
        (tmp_path / "mix.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")

        (looked,) = json_of("stats", tmp_path / "mix.yaml", "--all", "--measure", 0)["sources"]
        (planned,) = json_of("plan", tmp_path / "mix.yaml", "--steps", 2)["sources"]
        bad[bool(brought)] = looked["bad"], planned["bad_records"] > 0

    assert bad == {False: (0, False), True: (40, True)}


def test_equal_captions_of_different_images_are_different_documents(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mix = a_drawn_mix(tmp_path, sources=["captions"])
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(mix.model_dump(mode="json")), encoding="utf-8")
    # Two with one text, and one of them again: images of one size have the same placeholder tokens.
    images = [png_of(pixels) for pixels in (ramp(8, 8), 255 - ramp(8, 8), ramp(8, 8))]
    for shard in tmp_path.glob("captions-*.tar"):
        shard.unlink()
    with tarfile.open(tmp_path / "captions-0.tar", "w") as archive:
        for number, image in enumerate(images):
            for name, data in (("json", b'{"text": "a square"}'), ("png", image)):
                member = tarfile.TarInfo(f"{number}.{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))

    (found,) = json_of("stats", path, "--all", "--measure", 0)["sources"]

    assert (found["looked_at"], found["repeated"]) == (3, 1)


def test_tokens_a_second_are_measured_from_the_first_batch_on_however_long_opening_takes(
    mix_path, monkeypatch
):
    class Clock:
        """A clock by which a batch takes a tenth of a second, and opening takes longer than the whole measurement."""

        now_s = 0.0

        def perf_counter(self):
            self.now_s += 0.1
            return self.now_s

    class Late(LocalPlane):
        def __init__(self, spec):
            clock.now_s += 0.7
            super().__init__(spec)

    clock = Clock()
    monkeypatch.setattr(stats, "time", clock)
    monkeypatch.setattr(stats, "LocalPlane", Late)

    found = json_of("stats", mix_path, "--measure", 0.6)["measured"]

    # At least two batches are taken, with one step between them, however little time is left.
    assert found["steps"] > 1


def test_an_epoch_is_of_the_split_that_is_drawn(mix_path):
    whole = json_of("stats", mix_path, "--all", "--steps", 100, "--measure", 0)["sources"]
    mix_path.write_text(mix_path.read_text() + "splits: {eval: 0.75}\n")

    left = json_of("stats", mix_path, "--all", "--steps", 100, "--measure", 0)["sources"]

    for all_of_it, trained_on in zip(whole, left, strict=True):
        assert trained_on["records"] == all_of_it["records"]
        assert trained_on["epoch_tokens"] == pytest.approx(all_of_it["epoch_tokens"] / 4, abs=1)
        assert trained_on["epochs"] == pytest.approx(all_of_it["epochs"] * 4)


def test_a_stage_that_waits_for_epochs_counts_from_where_it_is_expected(mix_path):
    said = yaml.safe_load(mix_path.read_text())
    stages = [
        {"weights": {"web": 3, "code": 1}},
        {"from_epochs": {"web": 1}, "weights": {"web": 1, "code": 3}},
    ]
    mix_path.write_text(yaml.safe_dump({**said, "version": 2, "mix": {"stages": stages}}))

    code, web = json_of("stats", mix_path, "--all", "--steps", 200, "--measure", 0)["sources"]

    first = -(-web["epoch_tokens"] // 1536)
    assert web["epochs"] * web["epoch_tokens"] == pytest.approx(first * 1536 + (200 - first) * 512)
    assert code["epochs"] * code["epoch_tokens"] > 200 * 512 * 1.5


def test_a_sample_says_how_many_documents_it_is_of(mix_path, texts):
    found = json_of("stats", mix_path, "--sample", 100, "--measure", 0)
    shown = run_mix("stats", mix_path, "--sample", 100, "--measure", 0).stdout

    code, web = found["sources"]
    assert (code["looked_at"], web["looked_at"]) == (len(texts["code"]), 100)
    true = sum(len(text) + 1 for text in texts["web"])
    assert web["epoch_tokens"] == pytest.approx(true, rel=0.2)
    assert found["measured"] is None
    assert "--all looks at every one" in shown
    assert "web and code" not in shown


def test_what_cannot_be_decoded_is_counted_and_a_file_that_is_gone_is_named_with_its_line(
    mix_path, tmp_path, texts
):
    write_texts(tmp_path / "code.jsonl", [*texts["code"], None, None])
    bad = json_of("stats", mix_path, "--all", "--measure", 0)["sources"][0]

    (tmp_path / "code.jsonl").unlink()
    gone = run_mix("stats", mix_path)

    assert (bad["records"], bad["bad"]) == (len(texts["code"]) + 2, 2)
    assert isinstance(gone.exception, ConfigError)
    assert f"{mix_path}:" in str(gone.exception)


def test_a_bad_record_is_told_once_however_often_the_run_that_is_measured_goes_past_it(
    mix_path, tmp_path, texts, caplog
):
    write_texts(tmp_path / "code.jsonl", [*texts["code"], None])

    json_of("stats", mix_path, "--measure", 0.2)

    told = [line for line in caplog.messages if line.startswith(("source code", "sources.code"))]
    assert len({*told}) == 1


def test_a_shard_that_is_cut_short_is_named(mix_path, tmp_path, texts):
    """Damage in the middle of a compressed shard is reported with the shard, not shown as fewer documents."""
    packed = gzip.compress((tmp_path / "code.jsonl").read_bytes())
    (tmp_path / "code.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    mix_path.write_text(mix_path.read_text().replace("code.jsonl", "code.jsonl.gz"))

    result = run_mix("stats", mix_path, "--all", "--measure", 0)

    assert isinstance(result.exception, IntegrityError)
    assert "code.jsonl.gz" in str(result.exception)


@pytest.mark.parametrize(
    ("is_sorted", "shuffle", "warned"),
    [
        (True, {}, True),
        (True, {"method": "none"}, True),
        (False, {}, False),
        (True, {"method": "units"}, False),
    ],
)
def test_files_that_look_sorted_are_told(mix_path, tmp_path, is_sorted, shuffle, warned):
    lengths = [10 + i * 7919 % 3000 for i in range(3000)]
    write_texts(
        tmp_path / "web.jsonl", ["x" * n for n in (sorted(lengths) if is_sorted else lengths)]
    )
    mix = yaml.safe_load(mix_path.read_text())
    mix["sources"]["web"] |= {"unit": 65536, "shuffle": shuffle}
    mix_path.write_text(yaml.safe_dump(mix))

    found = json_of("stats", mix_path, "--measure", 0)

    told = [said for said in found["warnings"] if "look sorted" in said]
    assert [said.startswith("sources.web: ") for said in told] == [True] * warned


@pytest.mark.parametrize("cut", [{}, {"pack": {"cut": "never"}}])
def test_documents_that_would_end_the_run_are_counted_and_the_rate_is_measured(
    mix_path, texts, cut
):
    mix = yaml.safe_load(mix_path.read_text())
    mix["pack"]["length"] = 128
    mix["sources"]["web"] |= {"overlong": "refuse", **cut}
    mix_path.write_text(yaml.safe_dump(mix), encoding="utf-8")

    found = json_of("stats", mix_path, "--all", "--steps", 100, "--measure", 0.01)

    count = sum(len(text) + 1 > 128 for text in texts["web"])
    said = (
        f"{count} of 735 documents of web are longer than pack.length 128, and overlong is refuse: "
    )
    assert found["warnings"][0].startswith(said)
    assert not any("documents of code are longer" in warning for warning in found["warnings"])
    assert found["measured"]["steps"] > 0


def test_documents_that_are_left_out_as_no_row_takes_them_are_counted(mix_path, texts):
    mix = yaml.safe_load(mix_path.read_text())
    mix["pack"]["length"] = 128
    mix["sources"]["web"] |= {"overlong": "drop"}
    mix_path.write_text(yaml.safe_dump(mix), encoding="utf-8")

    found = json_of("stats", mix_path, "--all", "--steps", 100, "--measure", 0)

    count = sum(len(text) + 1 > 128 for text in texts["web"])
    assert count
    assert found["warnings"][0].startswith(
        f"{count} of 735 documents of web are longer than pack.length 128, and overlong is drop: they are left out; "
    )
    assert not any("documents of code are longer" in warning for warning in found["warnings"])


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_padding_is_the_same_as_mix_plan_says_of_it(mix_path, overlong):
    write_texts(mix_path.with_name("code.jsonl"), (["x" * 20] + ["y" * 299] * 3) * 8)
    mix = yaml.safe_load(mix_path.read_text())
    del mix["sources"]["web"]
    mix["sources"]["code"]["pack"] = {"rows": "alone"}
    mix["mix"] = {"stages": [{"weights": {"code": 1}}], "stop": "each_once"}
    mix["pack"]["overlong"] = overlong
    mix_path.write_text(yaml.safe_dump(mix | {"version": 2}))

    planned = json_of("plan", mix_path)["rehearsed"]["waste"]
    (said,) = json_of("stats", mix_path, "--all", "--measure", 0)["warnings"][-1:]

    assert f"code lies alone in its rows, of which about {planned:.0%} is padding" in said
