"""Refusals and doubts of a check, each with its line."""

import gzip
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, processors

from omniload.base.errors import ConfigError, UnavailableError
from omniload.base.settings.registry import registered
from omniload.commands import opening
from omniload.commands.bench import bench
from omniload.commands.check import check
from omniload.commands.faults import said_of_dropped
from omniload.commands.plan import plan
from omniload.plan.forecast import forecast
from omniload.plan.forecast.forecast import warnings_of_a_step
from omniload.plan.forecast.sizes import SourceSizes
from omniload.source.kept_findings import FoundSource
from omniload.source.parsing import compressed
from omniload.source.token_cache.cache import TokenCache
from tests.support.chats import CHATML, conversations, write_model
from tests.support.drawn import png_of, ramp
from tests.support.plane.builders import a_mix
from tests.support.plane.sources.tagged import install

DRAWN = png_of(ramp(8, 8), "JPEG")


MIX = """\
version: 1
seed: 1
tokenizer: {type: bytes}
sources:
  web:
    type: jsonl
    path: web.jsonl
    SOURCE
mix: {stages: [{from_step: 0, weights: {web: 1}}]}
pack: {length: 16PACK}
batch: {tokens: 64, micro_tokens: 64}
"""
TEXT = "word " * 6


def checked(
    folder, *, source="text: text", pack="", rest="", records=100, tokenizer="{type: bytes}"
):
    """Check a mix of one source of some records, or of texts; return its exit code and the lines it shows."""
    texts = [TEXT] * records if isinstance(records, int) else records
    lines = (json.dumps({"text": text, "lang": "en"}) for text in texts)
    (folder / "web.jsonl").write_text("\n".join(lines) + "\n")
    file = folder / "mix.yaml"
    mix = MIX.replace("SOURCE", source).replace("PACK", pack)
    file.write_text(mix.replace("{type: bytes}", tokenizer) + rest)
    shown = CliRunner().invoke(check, [str(file), "--cache-dir", str(folder / "cache")])
    said = str(shown.exception) if isinstance(shown.exception, ConfigError) else shown.output
    return shown.exit_code, [line.replace(f"{file}:", "mix.yaml:") for line in said.splitlines()]


REFUSED = {
    "where that nothing meets": (
        {"source": "where: {lang: fr}"},
        "mix.yaml:8: sources.web.where: none of its 100 records meets its conditions; correct them, or",
    ),
    "filter that nothing passes": (
        {"source": "transforms: [{type: filter, min_tokens: 1000}]", "records": 60},
        "mix.yaml:8: sources.web.transforms: none of its 60 records gives a token; correct them, or",
    ),
    "rows that nothing fits": (
        {"pack": ", overlong: drop", "records": 60},
        "mix.yaml:5: sources.web: none of its 60 records fits pack.length 16, and longer ones are dropped;",
    ),
    "filter that nothing passes behind its first records": (
        {"source": "transforms: [{type: filter, min_tokens: 1000}]", "records": 4096},
        "mix.yaml:8: sources.web.transforms: none of its 4,096 records gives a sample: none of its first 64",
    ),
    "rows that nothing fits behind its first records": (
        {"pack": ", overlong: drop"},
        "mix.yaml:5: sources.web: none of its 100 records gives a sample: none of its first 64 records fits",
    ),
    "where that nothing meets behind its first records": (
        {"source": "where: {lang: fr}", "records": [TEXT * 60] * 1000},
        "mix.yaml:8: sources.web.where: none of its 1,000 records gives a sample: none of its first ",
    ),
    "split that none of a few records is of": (
        {"rest": "splits: {eval: 1.0e-300}\nsplit: eval\n"},
        "mix.yaml:5: sources.web: none of its 100 records gives a sample that fits pack.length 16; change",
    ),
    "filter that no sequence passes": (
        {"source": "transforms: [{type: concat, tokens: 16}, {type: filter, min_tokens: 17}]"},
        "mix.yaml:5: sources.web: none of its 100 records gives a sample that fits pack.length 16; change",
    ),
    "journal of no known store": (
        {"rest": "runtime: {journal: 'nonesuch://x'}\n"},
        "mix.yaml:12: runtime.journal: store 'nonesuch://x': Protocol not known: nonesuch",
    ),
    "journal without a bucket": (
        {"rest": "runtime: {journal: 's3://'}\n"},
        "mix.yaml:12: runtime.journal: found 's3://', which names no bucket; give one, as s3://BUCKET/",
    ),
    "journal in a file": (
        {"rest": "runtime: {journal: 'file:///dev/null/x'}\n"},
        "mix.yaml:12: runtime.journal: /dev/null is no folder; name another place",
    ),
    "address of nothing": (
        {"rest": "runtime: {address: x}\n"},
        "mix.yaml:12: runtime.address: found 'x'; give the head of a Ray that runs, as HOST:PORT, or auto",
    ),
    "strategy that nobody has": (
        {"rest": "balance: {strategy: hybri}\n"},
        "mix.yaml:12: balance.strategy: no installed distributions register 'hybri' under the entry points",
    ),
    "no address to listen on": (
        {"rest": "runtime: {bind: 300.1.1.1}\n"},
        "mix.yaml:12: runtime.bind: found '300.1.1.1', neither an interface (eth0), a network",
    ),
}
DOUBTED = {
    "filter that records further on pass": (
        {
            "source": "transforms: [{type: filter, min_tokens: 40}]",
            "records": [TEXT] * 99 + ["word " * 9],
        },
        "mix.yaml:8: sources.web.transforms: none of its first 64 records of 100 gives a token; correct them,",
    ),
    "rows that records further on fit": (
        {"pack": ", overlong: drop", "records": [TEXT] * 99 + ["word"]},
        "mix.yaml:5: sources.web: none of its first 64 records of 100 fits pack.length 16, and longer ones",
    ),
    "where that nothing meets yet": (
        {"source": "where: {lang: fr}", "records": 40_000},
        "mix.yaml:8: sources.web.where: none of its first ",
    ),
    "filter that nothing passes yet": (
        {"source": "transforms: [{type: filter, min_tokens: 1000}]", "records": 4097},
        "mix.yaml:8: sources.web.transforms: none of its first 64 records of 4,097 gives a token; correct",
    ),
    "rows that nothing fits yet": (
        {"pack": ", overlong: drop", "records": 4097},
        "mix.yaml:5: sources.web: none of its first 64 records of 4,097 fits pack.length 16, and longer",
    ),
    "documents that rows refuse": (
        {"pack": ", overlong: refuse"},
        "mix.yaml:5: sources.web: 64 of its first 64 records are longer than pack.length 16, and overlong",
    ),
    "split of less than a record": (
        {"rest": "splits: {eval: 1.0e-300}\nsplit: eval\n", "records": 5000},
        "mix.yaml:5: sources.web: split 'eval' takes 1e-300 of its 5,000 records, less than one",
    ),
    "split that nothing is held out for": (
        {"rest": "splits: {eval: 0.2, test: 0.001}\n"},
        "mix.yaml:12: splits.test: 0.001 of 100 records is less than one, and most likely none",
    ),
    "interface that is not there": (
        {"rest": "runtime: {bind: nope0}\n"},
        "mix.yaml:12: runtime.bind is 'nope0', which is no interface of ",
    ),
    "address that is not here": (
        {"rest": "runtime: {metrics_bind: 203.0.113.7}\n"},
        "mix.yaml:12: runtime.metrics_bind is '203.0.113.7', and ",
    ),
    "folder of blocks that is not there": (
        {"rest": "loader: {spill: none}\n"},
        "mix.yaml:12: loader.spill: ",
    ),
}


def test_a_mix_that_gives_samples_is_valid_without_a_doubt(tmp_path):
    code, lines = checked(tmp_path, source="where: {lang: en}")

    assert code == 0
    said = "a step is 4 rows of 16 tokens over 1 data-parallel rank, with 1 microbatch of 4 rows"
    assert lines[-1] == f"mix.yaml: valid; {said}"


@pytest.mark.parametrize("option", ["--all-faults", "--json"])
def test_a_file_with_very_many_faults_says_how_to_see_every_one_with_its_line(tmp_path, option):
    checked(tmp_path)
    file = tmp_path / "mix.yaml"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, *(f"key{i}: 1" for i in range(300))]) + "\n")

    few, every = (
        str(CliRunner().invoke(check, [str(file), *options]).exception).splitlines()
        for options in ([], [option])
    )

    assert len(few) == 51
    assert few[-1] == f"and 250 more faults; omniload mix check --all-faults {file} says every one"
    assert every[:50] == few[:50]
    assert [line.split(": ")[:2] for line in every] == [
        [f"{file}:{len(lines) + 1 + i}", f"key{i}"] for i in range(300)
    ]


def test_json_of_a_mix_in_a_folder_whose_name_is_not_utf8_is_json_and_names_it(tmp_path):
    folder = tmp_path / "a\udcff"
    folder.mkdir()
    checked(folder)

    shown = CliRunner().invoke(check, [str(folder / "mix.yaml"), "--json"])

    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["file"] == f"{tmp_path}/a\\udcff/mix.yaml"


@pytest.mark.parametrize(("verb", "options"), [(plan, ["--steps", "2"]), (bench, [])])
def test_every_verb_that_opens_sources_refuses_them_with_their_line(tmp_path, verb, options):
    _, lines = checked(tmp_path, source="text: none")
    file = tmp_path / "mix.yaml"

    refused = CliRunner().invoke(
        verb, [str(file), "--cache-dir", str(tmp_path / "cache"), *options]
    )

    assert str(refused.exception).replace(f"{file}:", "mix.yaml:").splitlines() == lines
    assert lines[0].startswith("mix.yaml:5: sources.web: ")


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_give_nothing_is_refused_with_its_line(tmp_path, name):
    given, said = REFUSED[name]

    code, lines = checked(tmp_path, **given)

    assert code != 0
    assert [line for line in lines if line.startswith(said)] == lines


@pytest.mark.parametrize("name", DOUBTED)
def test_what_may_give_nothing_is_a_warning_with_its_line(tmp_path, name):
    given, said = DOUBTED[name]

    code, lines = checked(tmp_path, **given)
    _, again = checked(tmp_path, **given)  # the findings about the source are kept

    assert code == 0
    (warning,) = (line for line in lines if "warning" in line)
    assert warning.startswith(f"warning: {said}")
    # A small source is read to its end, and nothing is left to guess.
    assert warning.endswith("unless those further on are enough") == ("further on" in name)
    assert again == lines


def test_a_folder_in_which_no_tokens_can_be_kept_is_a_warning(tmp_path, monkeypatch):
    rest = "loader: {token_cache: {path: kept/tokens}}\n"
    _, before = checked(tmp_path, rest=rest)
    # The folder that the run would make it in: for the superuser every folder can be written.
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != tmp_path)

    code, lines = checked(tmp_path, rest=rest)

    said = f"warning: mix.yaml:12: loader.token_cache: {tmp_path} cannot be written by user {os.geteuid()}; "
    assert code == 0
    assert [line.startswith(said) for line in lines if "warning" in line] == [True]
    assert not [line for line in before if "warning" in line]


def test_a_file_in_the_place_of_a_folder_of_shards_is_named(tmp_path):
    _, lines = checked(tmp_path, rest="loader: {shard_cache: {path: mix.yaml, limit: 1GB}}\n")

    assert f"{tmp_path}/mix.yaml is no folder; name another path" in lines[-1]


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (
            "jpg",
            "sources.web: images [jpg] leave out .1.jpeg of sample 'p': add jpeg, unless it is",
        ),
        ("jpg, jpeg", ""),
    ],
)
def test_members_that_look_like_images_and_are_not_named_are_a_warning(tmp_path, images, said):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("p.0.jpg", DRAWN), ("p.1.jpeg", DRAWN), ("p.txt", b"text " * 9)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    patches = "{type: images, patch: 4, max_patches: 36, placeholder: 7}"
    source = f"images: [{images}]\n    transforms: [{patches}]"
    file = tmp_path / "mix.yaml"
    archive = MIX.replace("web.jsonl", "a.tar").replace("jsonl\n", "webdataset\n")
    file.write_text(archive.replace("SOURCE", source).replace("16PACK", "64"))

    shown = CliRunner().invoke(check, [str(file)])

    assert shown.exit_code == 0, shown.output
    warnings = [line for line in shown.output.splitlines() if "images [" in line]
    assert len(warnings) == bool(said)
    assert not said or said in warnings[0]


@pytest.mark.parametrize(("most", "refused"), [(1 << 20, True), (1, False)])
def test_images_that_are_broken_are_told_by_a_check_or_that_none_was_looked_at(
    tmp_path, monkeypatch, most, refused
):
    monkeypatch.setattr(opening, "_IMAGES_BYTES", most)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (
            *(("p.0.jpg", DRAWN), ("p.txt", b"text " * 9)),
            *(("q.0.jpg", DRAWN[: len(DRAWN) // 3]), ("q.txt", b"text " * 9)),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    patches = "{type: images, patch: 4, max_patches: 36, placeholder: 7}"
    source = f"images: [jpg]\n    transforms: [{patches}]"
    file = tmp_path / "mix.yaml"
    archive = MIX.replace("web.jsonl", "a.tar").replace("jsonl\n", "webdataset\n")
    file.write_text(archive.replace("SOURCE", source).replace("16PACK", "64"))

    shown = CliRunner().invoke(check, [str(file)])

    said = " ".join((shown.output + str(shown.exception)).split())
    assert bool(shown.exit_code) == refused
    assert ("a.tar: record 1, counted from 0: " in said) == refused
    assert ("no image of it was looked at" in said) != refused


@pytest.mark.parametrize(("largest", "said"), [(257, 1), (256, 0)])
def test_token_ids_that_the_tokenizer_does_not_have_are_a_warning(tmp_path, largest, said):
    np.save(tmp_path / "a.npy", np.array([5, largest, 0] * 40, np.uint16))
    source = "end_of_document: 0"
    file = tmp_path / "mix.yaml"
    file.write_text(
        MIX.replace("web.jsonl", "a.npy")
        .replace("jsonl\n", "numpy\n")
        .replace("SOURCE", source)
        .replace("PACK", "")
    )

    shown = CliRunner().invoke(check, [str(file), "--cache-dir", str(tmp_path / "cache")])

    assert shown.exit_code == 0, shown.output
    assert (
        shown.output.count("sources.web: the first records have token id 257, and the tok") == said
    )


SEES = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<pad>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
PATCHES = "{type: images, patch: 4, max_patches: 36, placeholder: 7}"
SEEN = f"transforms: [{{type: chat, template: t.jinja, loss: all, image: <pad>}}, {PATCHES}]"
NOT_SEEN = "transforms: [{type: chat, template: t.jinja, loss: all}]"
PICTURES = "images: pictures\n    "
CONVERSATIONS = {
    "read": (PICTURES + SEEN, ""),
    "another column": (
        f"images: shots\n    {SEEN}",
        "mix.yaml:5: sources.web: FOLDER/a.parquet: has no single column 'shots' for images; it has text, pictures",
    ),
    "no column": (
        SEEN,
        "mix.yaml:5: sources.web: FOLDER/a.parquet: record 0, counted from 0: its messages have 1 place for images",
    ),
    "another marker": (
        PICTURES + SEEN.replace("<pad>", "<shot>"),
        "mix.yaml:5: sources.web: FOLDER/t.jinja: image is '<shot>', but for an image and a text the template writes",
    ),
    "no transform of images": (
        PICTURES + NOT_SEEN,
        "mix.yaml:9: sources.web.images: images is ['pictures'] and no transform makes patches of them",
    ),
    "no marker": (
        PICTURES + SEEN.replace(", image: <pad>", ""),
        "mix.yaml:10: sources.web.transforms.0: transforms[0]: chat is followed by images but has no image",
    ),
    "nothing of images": (
        NOT_SEEN,
        "warning: mix.yaml:5: sources.web: the first conversations have images among their messages, which are not",
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("form", ["parts", "text"])
def test_images_of_conversations_that_are_not_read_or_not_found_are_told(tmp_path, name, form):
    source, said = CONVERSATIONS[name]
    (tmp_path / "t.jinja").write_text(SEES)
    parts = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    content = parts if form == "parts" else "<image>what is it?"
    messages = [[{"role": "user", "content": content}]] * 60
    pictures = pa.array([[DRAWN]] * 60, pa.list_(pa.binary()))
    pq.write_table(pa.table({"text": messages, "pictures": pictures}), tmp_path / "a.parquet")
    file = tmp_path / "mix.yaml"
    table = MIX.replace("web.jsonl", "a.parquet").replace("jsonl\n", "parquet\n")
    file.write_text(table.replace("SOURCE", f"text: text\n    {source}").replace("16PACK", "64"))

    shown = CliRunner().invoke(check, [str(file), "--cache-dir", str(tmp_path / "cache")])

    lines = (shown.output + str(shown.exception or "")).replace(f"{file}:", "mix.yaml:")
    lines = lines.replace(str(tmp_path), "FOLDER").splitlines()
    told = [
        line for line in lines if line.startswith(("mix.yaml:", "warning")) and "valid" not in line
    ]
    assert bool(shown.exit_code) == said.startswith("mix.yaml:"), lines
    assert len(told) == bool(said), lines
    assert all(line.startswith(said) for line in told), lines


@pytest.mark.parametrize(
    ("pack", "source", "records", "said"),
    [
        (", overlong: drop", "text: text", [TEXT] * 3 + ["word"] * 97, "3 of the first 64 records"),
        (", overlong: drop", "text: text", ["word"] * 100, "none of the first 64 records"),
        ("", "overlong: drop", [TEXT] * 2 + ["word"] * 5, "2 of the first 7 records"),
        (", overlong: drop", "overlong: split", 100, None),
        ("", "text: text", 100, None),
    ],
    ids=["some", "none", "of the source", "source that splits", "split"],
)
def test_how_many_of_the_first_records_are_dropped_is_said(tmp_path, pack, source, records, said):
    code, lines = checked(tmp_path, pack=pack, source=source, records=records)

    text = "".join(lines)
    assert code == 0, text
    assert "warning" not in text
    assert ("overlong: drop leaves out" in text) == bool(said)
    if said:
        begin = "overlong: drop leaves out what is longer than pack.length 16: "
        assert f"{begin}{said} of web; omniload mix stats {tmp_path}/mix.yaml looks at more" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            gzip.compress(b'{"text": "a"}'),
            "is compressed by gzip; give the file a name that ends in .gz",
        ),
        (b'[\n{"text": "a"}\n]\n', "write a line for each object: jq -c '.[]' FILE"),
        ('{"text": "a"}\n'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    ],
    ids=["gzip", "list", "UTF-16"],
)
def test_what_mends_a_whole_file_is_told_without_what_mends_a_record(tmp_path, content, said):
    checked(tmp_path)
    (tmp_path / "web.jsonl").write_bytes(content)

    shown = CliRunner().invoke(check, [str(tmp_path / "mix.yaml")])

    assert str(shown.exception).endswith(said)


def test_a_source_that_reads_what_another_reads_in_the_same_way_is_told(tmp_path):
    checked(tmp_path)
    file = tmp_path / "mix.yaml"
    web, path = "{type: jsonl, path: web.jsonl}", "{type: jsonl, path: ./web.jsonl}"
    text = MIX.partition("  web:")[0] + f"  web: {web}\n  copy: {web}\n  other: {path}\n"
    rest = "mix: {" + MIX.partition("\nmix: {")[2].replace("PACK", "")
    file.write_text(text + rest.replace("{web: 1}", "{web: 1, copy: 1, other: 1}"))

    shown = CliRunner().invoke(check, [str(file), "--cache-dir", str(tmp_path / "cache")])

    told = [line for line in shown.output.splitlines() if line.startswith("warning: ")]
    assert shown.exit_code == 0, shown.output
    assert told[0].startswith(
        f"warning: {file}:5: sources.web: reads the files of sources.copy in the same way, and each of their records"
    )
    assert not any("sources.other" in line for line in told)


def test_of_several_sources_those_of_which_most_is_dropped_are_named(tmp_path):
    found = [
        FoundSource(
            name=name,
            format="jsonl",
            shards=1,
            looked=1,
            units=1,
            records=100,
            size_bytes=1,
            tokens_per_record=1.0,
            firsts=firsts,
            longer=longer,
        )
        for name, firsts, longer in (
            *(("a", 64, 1), ("b", 10, 0), ("c", 64, 9), ("d", 64, 2), ("e", 64, 64)),
        )
    ]
    sources = {each.name: {"type": "text", "path": "x"} for each in found}
    mix = a_mix(
        sources=sources, tokenizer={"type": "bytes"}, pack={"length": 16, "overlong": "drop"}
    )

    said, unknown = (
        said_of_dropped(mix, each, Path("mix.yaml"))
        for each in (found, [replace(each, firsts=0, longer=0) for each in found])
    )

    begin = "overlong: drop leaves out what is longer than pack.length 16: "
    assert said == (
        f"{begin}76 of the first 266 records of 5 sources (e 64, c 9, d 2 and 1 more); omniload mix stats mix.yaml "
        "looks at more"
    )
    assert (
        unknown
        == f"{begin}how many of 5 sources is not known; omniload mix stats mix.yaml looks at more"
    )


def test_what_was_found_does_not_stand_for_rows_of_another_length(tmp_path):
    code, _ = checked(tmp_path, records=60)
    refused, lines = checked(tmp_path, pack=", overlong: drop", records=60)

    assert (code, refused != 0) == (0, True)
    assert "fits pack.length 16" in lines[0]


def test_a_step_of_epochs_without_end_is_told_in_a_few_digits():
    mix = a_mix(sources=["web"])
    sizes = SourceSizes(samples_S=np.ones(1), tokens_per_sample_S=np.full(1, 1e-300))

    (warning,) = warnings_of_a_step(mix, sizes)

    assert "goes through web over 1,000,000.0 times" in warning
    assert len(warning) < 200


@pytest.mark.parametrize("level", ["token", "sample"])
def test_a_step_of_many_stages_is_told_by_the_weights_of_its_own_stage(level, monkeypatch):
    every = [
        {"from_step": i, "weights": {"web": 1, "code": 3 if i == 50 else 1}} for i in range(100)
    ]
    mix = a_mix(mix={"stages": every, "level": level})
    sizes = SourceSizes(samples_S=np.array([1e6, 4.0]), tokens_per_sample_S=np.array([24.0, 8.0]))
    asked, weights = [], forecast.weights_at
    monkeypatch.setattr(
        forecast, "weights_at", lambda *given: asked.append(given) or weights(*given)
    )

    found = warnings_of_a_step(mix, sizes)

    # Of 128 tokens web has half. With half of the samples it has a quarter of the tokens, its 32 tokens, and no more.
    assert [text.partition("times")[0] for text in found] == (
        ["a single step goes through web 2.0 "] if level == "token" else []
    )
    assert len(asked) == 100


@pytest.mark.parametrize(
    ("tokenizer", "source", "said"),
    [
        (
            "{type: bpe, path: .}",
            "transforms: [{type: concat, tokens: 16}]",
            "mix.yaml:3: tokenizer.end_of_document is not set, and concat joins texts of sources.web with nothing",
        ),
        (
            '{type: bpe, path: ., end_of_document: "<eos>"}',
            "transforms: [{type: concat, tokens: 16}]",
            "",
        ),
        (
            '{type: bpe, path: ., begin_of_document: "<bos>"}',
            "transforms: [{type: concat, tokens: 16}]",
            "",
        ),
        ("{type: bpe, path: .}", "transforms: [{type: concat, tokens: 16, documents: apart}]", ""),
        ("{type: bpe, path: .}", "text: text", ""),
        ("{type: bytes}", "transforms: [{type: concat, tokens: 16}]", ""),
    ],
)
def test_texts_that_are_joined_without_an_end_between_are_a_warning(
    tmp_path, tokenizer, source, said
):
    write_model(tmp_path, CHATML)

    code, lines = checked(tmp_path, source=source, tokenizer=tokenizer)

    warnings = [line for line in lines if line.startswith("warning: ")]
    assert code == 0, lines
    assert len(warnings) == bool(said)
    assert all(line.startswith(f"warning: {said}") for line in warnings)


def test_a_cost_that_reads_a_tag_which_no_source_has_is_a_warning_with_its_line(
    tmp_path, monkeypatch
):
    install(tmp_path, monkeypatch)
    cost = registered("omniload.costs", "dear_german", ()).function
    monkeypatch.setattr(cost, "of", ("lengths", "tags.domian"))

    code, lines = checked(tmp_path, rest="balance: {cost: dear_german}\n")

    (warning,) = [line for line in lines if line.startswith("warning: ")]
    assert code == 0, lines
    assert "balance.cost 'dear_german' reads 'tags.domian', which is empty" in warning
    assert warning.startswith("warning: mix.yaml:")


ANSWERED = "{type: completion, prompt: prompt}"


@pytest.mark.parametrize(
    ("said", "source", "is_told"),
    [
        ("", "text: text", True),
        ('begin_of_document: "<bos>", ', "text: text", False),
        ("", "text: messages\n    transforms: [{type: chat}]", False),
        ("", f"text: text\n    transforms: [{ANSWERED}]", False),
        ("", f"text: text\n    transforms: [{{form: text, {ANSWERED[1:]}]", True),
    ],
)
def test_texts_that_begin_with_nothing_where_transformers_begins_them_are_a_warning(
    tmp_path, said, source, is_told
):
    write_model(tmp_path, CHATML)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [("<bos>", library.token_to_id("<bos>"))]
    library.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=ids)
    library.save(str(tmp_path / "tokenizer.json"))
    texts = [TEXT] * 20
    beside = {"messages": [*conversations(1)[0]], "prompt": "Why?"}
    lines = ({"text": text} | beside for text in texts)
    (tmp_path / "web.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    mix = (
        MIX.replace("SOURCE", source)
        .replace("PACK", "")
        .replace("{type: bytes}", f'{{type: bpe, path: ., {said}end_of_document: "<eos>"}}')
    )
    (tmp_path / "mix.yaml").write_text(mix)

    shown = CliRunner().invoke(check, [str(tmp_path / "mix.yaml")])

    assert shown.exit_code == 0, shown.exception
    wanted = "this tokenizer puts '<bos>' before it, and documents of sources.web begin without"
    assert (wanted in shown.output.replace("\n", "")) == is_told


LENGTHS = [10 + i * 7919 % 3000 for i in range(3000)]


def write_shards(folder, texts, form):
    """Write texts in their order as a source of many units; return the mix file's entry for it."""
    if form == "parquet":
        for start in range(0, len(texts), 1000):
            table = pa.table({"text": texts[start : start + 1000]})
            pq.write_table(table, folder / f"{start:04}.parquet", row_group_size=100)
        return "type: parquet, path: '*.parquet', text: text"
    if form == "csv":
        (folder / "web.csv").write_text("text\n" + "".join(f"{text}\n" for text in texts))
        return "type: csv, path: web.csv, text: text, unit: 65536"
    (folder / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return "type: jsonl, path: web.jsonl, unit: 65536"


def warnings_of_files(folder, texts, form, shuffle):
    """Write texts in their order, and check a mix of them."""
    file = folder / "mix.yaml"
    source = write_shards(folder, texts, form)
    file.write_text(
        "version: 1\nseed: 1\ntokenizer: {type: bytes}\n"
        f"sources: {{web: {{{source}{shuffle}}}}}\n"
        "mix: {stages: [{weights: {web: 1}}]}\npack: {length: 4096}\n"
        "batch: {tokens: 16384, micro_tokens: 4096}\n"
    )
    arguments = [str(file), "--cache-dir", str(folder / "cache"), "--json"]
    return json.loads(CliRunner().invoke(check, arguments).stdout)["warnings"]


@pytest.mark.parametrize(
    ("is_sorted", "shuffle", "warned"),
    [
        (True, "", True),
        (True, ", shuffle: {method: none}", True),
        (False, "", False),
        (False, ", shuffle: {method: none}", False),
        (True, ", shuffle: {method: units}", False),
        (True, ", shuffle: {block_units: 100}", False),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_files_that_look_sorted_are_told_at_each_check_with_the_remedy(
    tmp_path, form, is_sorted, shuffle, warned
):
    texts = ["x" * n for n in (sorted(LENGTHS) if is_sorted else LENGTHS)]

    # The second is warm, and opens nothing.
    found = [warnings_of_files(tmp_path, texts, form, shuffle) for _ in range(2)]

    said = [[each for each in warnings if "look sorted" in each] for warnings in found]
    assert said[0] == said[1]
    assert len(said[0]) == warned
    assert all("shuffle: {method: units}" in each for each in said[0])


@pytest.mark.parametrize(("method", "warned"), [("none", True), ("block", False)])
def test_a_sorted_file_of_one_unit_is_told_where_nothing_shuffles_it(tmp_path, method, warned):
    texts = ["x" * n for n in range(1, 200)]

    warnings = warnings_of_files(tmp_path, texts, "jsonl", f", shuffle: {{method: {method}}}")

    assert any("look sorted" in each for each in warnings) == warned


@pytest.mark.parametrize("form", ["csv.gz", "tar.gz"])
@pytest.mark.parametrize(("limit", "warned"), [(1 << 10, True), (1 << 20, False)])
def test_compressed_shards_that_are_decoded_whole_are_told_with_their_size(
    tmp_path, monkeypatch, form, limit, warned
):
    monkeypatch.setattr(compressed, "_LARGE_BYTES", limit)
    for name in "ab":
        rows = "".join(f"{name} {i}\n" for i in range(1000))
        if form == "csv.gz":
            (tmp_path / f"{name}.csv.gz").write_bytes(gzip.compress(f"text\n{rows}".encode()))
            continue
        with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as tar:
            member = tarfile.TarInfo("1.txt")
            member.size = len(rows)
            tar.addfile(member, io.BytesIO(rows.encode()))
    kind = "csv" if form == "csv.gz" else "webdataset"
    key = "text" if form == "csv.gz" else "txt"
    file = tmp_path / "mix.yaml"
    file.write_text(
        "version: 1\nseed: 1\ntokenizer: {type: bytes}\n"
        f"sources: {{web: {{type: {kind}, path: '*.{form}', text: {key}}}}}\n"
        "mix: {stages: [{weights: {web: 1}}]}\npack: {length: 64}\n"
        "batch: {tokens: 64, micro_tokens: 64}\n"
    )
    arguments = [str(file), "--cache-dir", str(tmp_path / "cache"), "--json"]

    found = [json.loads(CliRunner().invoke(check, arguments).stdout) for _ in range(2)]

    for one in found:
        (said,) = [each for each in one["warnings"] if "decoded whole" in each] or [""]
        assert bool(said) == warned
        if warned:
            assert said.startswith(f"{file}:4: sources.web: 2 compressed shards are decoded whole")
            assert "2 of them are held decoded together; write smaller shards, or plain" in said


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        *(
            (limit, "is no time to wait, which is more than 0, and at most")
            for limit in ("0", "0s")
        ),
        *((limit, "; a wait is more than 0, and at most") for limit in ("-5", "-1s", "soon")),
        (
            "9999999999s",
            "is no time to wait, which is more than 0, and at most 9223372036 s; give one such as",
        ),
    ],
)
def test_a_limit_that_nothing_can_answer_within_or_nobody_can_wait_for_is_refused(
    tmp_path, limit, said
):
    checked(tmp_path)

    shown = CliRunner().invoke(check, [str(tmp_path / "mix.yaml"), f"--store-timeout={limit}"])

    assert shown.exit_code == 2
    assert f"'{limit}' is " in shown.output
    assert said in shown.output


def test_a_token_cache_whose_store_is_silent_is_told_by_its_key(tmp_path, monkeypatch):
    def silent(*_):
        raise UnavailableError("'a.plain': no time is left of 30 s to find")

    monkeypatch.setattr(TokenCache, "names", silent)
    checked(tmp_path, rest="loader: {token_cache: {path: kept}}\n")

    shown = CliRunner().invoke(check, [str(tmp_path / "mix.yaml")])

    assert isinstance(shown.exception, UnavailableError)
    said = f"loader.token_cache: {tmp_path}/kept: cannot be listed: 'a.plain': no time is left"
    assert said in str(shown.exception)
