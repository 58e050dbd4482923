"""Opening a mix: all faults are reported at once, and indexes have a place of their own."""

import gzip
import io
import json
import os
import tarfile
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from omniload.base.errors import ConfigError, OmniloadError
from omniload.commands import faults
from omniload.commands.opening import find_sources, open_spec
from omniload.mix.config import BpeTokenizer, ByteTokenizer
from omniload.mix.schema.transforms import MiddleTransform
from omniload.source.kept_findings import key_of_source, key_of_tokenizer
from tests.support.plane.builders import a_mix
from tests.support.plane.corpora import a_mixed_corpus


def a_file(folder, mix):
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump(mix.model_dump(mode="json")), encoding="utf-8")
    return path


def test_lines_of_faults_are_looked_for_by_one_thread(tmp_path, monkeypatch):
    file = a_file(tmp_path, a_mixed_corpus(tmp_path))
    spec = open_spec(file, dp=2, cache_dir=tmp_path / "cache")
    for path in tmp_path.glob("**/*.parquet"):
        path.unlink()
    asked = []
    monkeypatch.setattr(faults, "line_of", lambda *_: asked.append(threading.get_ident()) or 7)

    with pytest.raises(OmniloadError, match=r"mix.yaml:7: "):
        find_sources(spec, file)

    assert set(asked) == {threading.get_ident()}


def test_sources_are_found_in_the_order_of_the_file(tmp_path):
    spec = open_spec(a_file(tmp_path, a_mixed_corpus(tmp_path)), dp=2, cache_dir=tmp_path / "cache")

    found = find_sources(spec)

    assert [(s.name, s.format, s.shards, s.records) for s in found] == [
        ("ids", "parquet", 2, 120),
        ("text", "jsonl", 1, 120),
    ]
    assert all(source.size_bytes > 0 and source.units > 0 for source in found)


def test_all_that_is_missing_is_reported_at_once(tmp_path):
    tokenizer = BpeTokenizer(type="bpe", path="none.json")
    mix = a_mixed_corpus(tmp_path).model_copy(update={"tokenizer": tokenizer})
    (tmp_path / "text" / "0.jsonl").unlink()
    path = a_file(tmp_path, mix)

    with pytest.raises(ConfigError) as raised:
        find_sources(open_spec(path, dp=99, cache_dir=tmp_path / "cache"))

    lines = str(raised.value).splitlines()
    assert len(lines) == 3
    assert "99 data-parallel ranks" in lines[0]
    assert "none.json" in lines[1]
    assert "sources.text.path" in lines[2]


def test_a_source_without_records_is_refused(tmp_path):
    mix = a_mixed_corpus(tmp_path)
    (tmp_path / "text" / "0.jsonl").write_bytes(b"")

    with pytest.raises(ConfigError, match=r"sources\.text: .* holds no record"):
        find_sources(open_spec(a_file(tmp_path, mix), dp=1, cache_dir=tmp_path / "cache"))


def test_planning_ahead_may_be_set_apart_from_the_file(tmp_path):
    path = a_file(tmp_path, a_mixed_corpus(tmp_path))

    assert open_spec(path, dp=1, cache_dir=None, ahead=1).mix.runtime.prefetch_steps == 1
    assert open_spec(path, dp=1, cache_dir=None).mix.steps_ahead == 4


def test_a_fault_of_a_source_has_the_line_of_its_key(tmp_path):
    file = tmp_path / "mix.yaml"
    file.write_text(
        "version: 1\nseed: 1\n"
        "sources:\n"
        "  web: {type: jsonl, path: web.jsonl, text: body}\n"
        "  books:\n"
        "    type: jsonl\n"
        "    path: none-*.jsonl\n"
        "    text: text\n"
        "mix: {stages: [{from_step: 0, weights: {web: 1, books: 1}}]}\n"
        "tokenizer: {type: bytes}\n"
        "pack: {length: 16}\n"
        "batch: {tokens: 64, micro_tokens: 64}\n"
    )
    (tmp_path / "web.jsonl").write_text('{"text": "a"}\n')
    spec = open_spec(file, dp=1, cache_dir=tmp_path / "cache")

    with pytest.raises(ConfigError) as caught:
        find_sources(spec, file)

    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{file}:7: sources.books.path: ")
    assert lines[1].startswith(f"{file}:4: sources.web: ")


def test_fill_in_the_middle_is_refused_where_the_tokenizer_lacks_its_marks(tmp_path):
    """Every run refuses it; the second time too, when the rest of the source is known."""
    mix = a_mixed_corpus(tmp_path)
    fim = MiddleTransform(type="fim", prefix="<pre>", suffix="<suf>", middle="<mid>")
    text = mix.sources["text"].model_copy(update={"transforms": (fim,)})
    path = a_file(tmp_path, mix.model_copy(update={"sources": {**mix.sources, "text": text}}))
    said = path.read_text().splitlines()
    mark = next(line for line, text in enumerate(said) if "<mid>" in text)
    line = max(i for i, text in enumerate(said[:mark], 1) if "transforms:" in text)

    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            find_sources(open_spec(path, dp=1, cache_dir=tmp_path / "cache"), path)

        at = f"{path}:{line}: sources.text.transforms: fim: prefix is '<pre>'"
        assert str(caught.value).startswith(at), str(caught.value)


def test_a_tokenizer_that_is_not_there_is_told_once_with_its_line(tmp_path):
    """And not by each source that would be read by it."""
    mix = a_mixed_corpus(tmp_path)
    fim = MiddleTransform(type="fim", prefix="<pre>", suffix="<suf>", middle="<mid>")
    text = mix.sources["text"].model_copy(update={"transforms": (fim,)})
    changes = {
        "sources": {**mix.sources, "text": text},
        "tokenizer": BpeTokenizer(type="bpe", path="none.json"),
    }
    path = a_file(tmp_path, mix.model_copy(update=changes))
    lines = path.read_text().splitlines()
    line = next(i for i, said in enumerate(lines, 1) if said.startswith("tokenizer:"))

    with pytest.raises(ConfigError) as caught:
        find_sources(open_spec(path, dp=1, cache_dir=tmp_path / "cache"), path)

    assert str(caught.value).startswith(f"{path}:{line}: tokenizer.path: ")
    assert len(str(caught.value).splitlines()) == 1


def a_mix_of_chats(folder):
    (folder / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    file = folder / "mix.yaml"
    file.write_text(
        "version: 1\nseed: 1\ntokenizer: {type: bytes}\n"
        "sources:\n"
        "  sft:\n    type: jsonl\n    path: chats.jsonl\n    text: messages\n"
        "    transforms: [{type: chat, template: plain.jinja, loss: all}]\n"
        "mix: {stages: [{from_step: 0, weights: {sft: 1}}]}\n"
        "pack: {length: 16}\nbatch: {tokens: 64, micro_tokens: 64}\n"
    )
    return file


def test_a_first_record_that_makes_no_sample_is_told_with_its_place(tmp_path):
    (tmp_path / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}]}\n{"messages": "hello"}\n'
    )
    file = a_mix_of_chats(tmp_path)

    with pytest.raises(ConfigError) as caught:
        find_sources(open_spec(file, dp=1, cache_dir=tmp_path / "cache"), file)

    assert f"{tmp_path}/chats.jsonl:2: holds the text 'hello'" in str(caught.value)


def test_scores_that_are_rounded_are_told_of_before_a_run(tmp_path):
    answers = pa.table({"ids": [[1], [2]], "answer": [7, 123456789]})
    pq.write_table(answers, tmp_path / "prompts.parquet")
    (tmp_path / "mix.yaml").write_text(
        "version: 1\nseed: 1\n"
        "sources: {rl: {type: parquet, path: prompts.parquet, tokens: ids, columns: {scores: answer}}}\n"
        "mix: {stages: [{from_step: 0, weights: {rl: 1}}]}\n"
        "pack: {length: 16}\nbatch: {tokens: 64, micro_tokens: 64, columns: [scores]}\n"
    )
    spec = open_spec(tmp_path / "mix.yaml", dp=1, cache_dir=tmp_path / "cache")

    ((told,),) = [found.doubts for found in find_sources(spec, tmp_path / "mix.yaml")]

    assert "row 1: scores holds 123456789, which float32 rounds to 123456792" in told


@pytest.mark.parametrize(
    ("pack", "long", "said"),
    [
        (
            "",
            20,
            "sources.sft: 20 of its first 64 records are longer than pack.length 16, and over",
        ),
        ("", 6, ""),  # a few are meant to be cut
        (", overlong: drop", 20, ""),
        (", overlong: truncate", 20, ""),
        (", method: concat_and_split", 20, ""),
    ],
)
def test_conversations_of_which_rows_cut_many_are_told(tmp_path, pack, long, said):
    texts = ["word " * 9] * long + ["word"] * (80 - long)
    lines = (json.dumps({"messages": [{"role": "user", "content": t}]}) for t in texts)
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    file = a_mix_of_chats(tmp_path)
    whole = file.read_text()
    opened = {"dp": 1, "cache_dir": tmp_path / "cache"}
    # Findings for rows that cut nothing do not count for rows that cut documents.
    file.write_text(whole.replace("length: 16", "length: 64"))
    assert find_sources(open_spec(file, **opened), file)[0].doubts == ()
    file.write_text(whole.replace("length: 16", f"length: 16{pack}"))

    (found,) = find_sources(open_spec(file, **opened), file)

    assert [told.startswith(said) for told in found.doubts] == [True] * bool(said)


def test_a_blank_line_among_conversations_is_no_sample_to_a_check_either(tmp_path):
    said = '{"messages": [{"role": "user", "content": "a"}]}\r\n'
    (tmp_path / "chats.jsonl").write_bytes(f"{said}\r\n{said}".encode())
    file = a_mix_of_chats(tmp_path)

    (found,) = find_sources(open_spec(file, dp=1, cache_dir=tmp_path / "cache"), file)

    assert (found.records, found.tokens_per_record) == (3, 2 / 3)


TOOLS = [{"name": "add"}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize(
    ("beside", "named", "said"),
    [
        ({"tools": TOOLS}, "", "the first records have 'tools' beside their messages, which are"),
        ({"tools": TOOLS}, ", tools: tools", ""),
        ({"tools": None}, "", ""),
        ({"functions": TOOLS}, "", ""),
        ({"functions": TOOLS}, ", tools: tools", "has tools under 'tools', which the transform"),
    ],
)
def test_tools_that_are_beside_conversations_and_not_read_are_told_of(
    tmp_path, kind, beside, named, said
):
    rows = [{"messages": [{"role": "user", "content": "a"}]} | beside] * 2
    # A column that is missing is refused, as any is that is named.
    missing = kind != "jsonl" and "tools" in named and "tools" not in beside
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, tmp_path / "chats.parquet")
    elif kind == "arrow":
        with pa.ipc.new_stream(tmp_path / "chats.arrow", table.schema) as out:
            out.write_table(table)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "chats.jsonl").write_text(f"no json\n{lines}")
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    file = tmp_path / "mix.yaml"
    file.write_text(
        "version: 1\nseed: 1\ntokenizer: {type: bytes}\n"
        "sources:\n"
        f"  sft:\n    type: {kind}\n    path: chats.{kind}\n    text: messages\n"
        "    on_error: {policy: skip}\n"
        f"    transforms: [{{type: chat, template: plain.jinja, loss: all{named}}}]\n"
        "mix: {stages: [{from_step: 0, weights: {sft: 1}}]}\n"
        "pack: {length: 16}\nbatch: {tokens: 64, micro_tokens: 64}\n"
    )
    spec = open_spec(file, dp=1, cache_dir=tmp_path / "cache")

    if missing:
        with pytest.raises(ConfigError, match="has no column 'tools'"):
            find_sources(spec, file)
        return
    (found,) = find_sources(spec, file)

    # The jsonl has a record that is left out, which is reported too.
    told = [each for each in found.doubts if "records are left out" not in each]
    assert len(found.doubts) - len(told) == (kind == "jsonl")
    assert [said in each for each in told] == [True] * bool(said)


def a_member(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_lines(path, good):
    path.write_text((json.dumps({"text" if good else "body": "some words"}) + "\n") * 9)


def write_texts_of(path, good):
    path.write_bytes(b"some words" if good else b"some \xff words")


def write_archive(path, good):
    with tarfile.open(path, "w") as archive:
        for number in range(9):
            a_member(archive, f"{number}.{'txt' if good else 'body'}", b"some words")


def write_table(path, good):
    pq.write_table(pa.table({"text" if good else "body": ["some words"] * 9}), path)


KINDS = {
    "jsonl": (write_lines, "jsonl", {"text": "text"}, ":1: has no key 'text'; it has body"),
    "text": (write_texts_of, "txt", {}, ": is not UTF-8"),
    "webdataset": (write_archive, "tar", {"text": "txt"}, ": sample '0' at byte 0: has no member"),
    "parquet": (write_table, "parquet", {"text": "text"}, ": has no column 'text'; it has body"),
}


def a_mix_of_files(folder, kind, count, bad=(), **more):
    """Return a mix of one source of ``count`` files, some of which lack the key that the source names."""
    write, extension, keys, _ = KINDS[kind]
    for number in range(count):
        write(folder / f"{number:03}.{extension}", number not in bad)
    source = {"type": kind, "path": f"*.{extension}"} | keys | more
    return a_file(folder, a_mix(sources={"web": source}, tokenizer={"type": "bytes"}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_file_that_holds_something_else_is_told_by_name(tmp_path, kind):
    file = a_mix_of_files(tmp_path, kind, 8, bad=(3, 5))

    with pytest.raises(ConfigError) as caught:
        find_sources(open_spec(file, dp=1, cache_dir=tmp_path / "cache"), file)

    _, extension, _, said = KINDS[kind]
    assert f"sources.web: {tmp_path}/003.{extension}{said}" in str(caught.value)


@pytest.mark.parametrize(("kind", "looked"), [("jsonl", 8), ("webdataset", 8), ("parquet", 1)])
def test_of_many_files_a_few_are_looked_at_and_their_number_is_known(tmp_path, kind, looked):
    spec = open_spec(a_mix_of_files(tmp_path, kind, 50), dp=1, cache_dir=tmp_path / "cache")

    (found,) = find_sources(spec)

    assert (found.looked, found.shards, found.doubts) == (looked, 50, ())


LONG = "words " * 20_000
"""A text longer than the part of later files that is usually looked at."""


def write_long_lines(folder, first):
    """Write two files, of which the first line of the second is given."""
    (folder / "0.jsonl").write_text('{"text": "some words"}\n')
    (folder / "1.jsonl").write_text(json.dumps(first) + '\n{"text": "some words"}\n')
    source = {"type": "jsonl", "path": "*.jsonl"}
    file = a_file(folder, a_mix(sources={"web": source}, tokenizer={"type": "bytes"}))
    return open_spec(file, dp=1, cache_dir=folder / "cache")


def test_a_later_file_whose_first_line_is_long_is_looked_at_too(tmp_path):
    with pytest.raises(ConfigError, match=r"1\.jsonl:1: has no key 'text'; it has body"):
        find_sources(write_long_lines(tmp_path, {"body": LONG}))


@pytest.mark.parametrize(("times", "looked"), [(1, 2), (10, 1)])
def test_a_later_file_counts_as_looked_at_where_a_line_of_it_was(tmp_path, times, looked):
    (found,) = find_sources(write_long_lines(tmp_path, {"text": LONG * times}))

    assert (found.looked, found.shards) == (looked, 2)


def test_a_later_compressed_archive_which_is_read_whole_is_not_looked_at(tmp_path):
    for number in range(3):
        plain = tmp_path / f"{number}.plain"
        write_archive(plain, number != 1)
        (tmp_path / f"{number}.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    source = {"type": "webdataset", "path": "*.tar.gz", "text": "txt"}
    file = a_file(tmp_path, a_mix(sources={"web": source}, tokenizer={"type": "bytes"}))

    (found,) = find_sources(open_spec(file, dp=1, cache_dir=tmp_path / "cache"))

    assert (found.looked, found.shards) == (1, 3)


@pytest.mark.parametrize("kind", ["jsonl", "text", "webdataset"])
def test_where_bad_records_are_skipped_those_of_later_files_are_told_of(tmp_path, kind):
    skips = {"on_error": {"policy": "skip"}}
    spec = open_spec(a_mix_of_files(tmp_path, kind, 4, bad=(2,), **skips), dp=1, cache_dir=None)

    (found,) = find_sources(spec)

    _, extension, _, said = KINDS[kind]
    count = 1 if kind == "text" else 9
    path = f"{tmp_path}/002.{extension}"
    (told,) = found.doubts
    assert f"sources.web: {count} of {path}'s first {count} records are left out" in told
    assert f"the first: {path}{said}" in told


@pytest.mark.parametrize(
    ("content", "written", "is_told"),
    [
        ([{"type": "text", "text": "how's it?"}], "m.content", True),
        ([{"type": "text", "text": "how's it?"}], "m.content | tojson", True),
        ([{"type": "text", "text": "how's it?"}], "m.content[0].text", False),
        ("how's it?", "m.content", False),
        ("[{'type': 'text'}]", "m.content", False),
    ],
)
def test_parts_that_a_template_writes_as_they_stand_are_told(tmp_path, content, written, is_told):
    record = {"asked": [{"from": "user", "value": content}], "tools": [{"name": "weather"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "parts.jinja").write_text(
        f"{{% for m in messages %}}{{{{ {written} }}}}{{% endfor %}}"
    )
    chat = {"type": "chat", "template": "parts.jinja", "loss": "all", "tools": "tools"}
    mix = a_mix(
        tokenizer={"type": "bytes"},
        sources={
            "sft": {
                "type": "jsonl",
                "path": "chats.jsonl",
                "text": "asked",
                "transforms": [chat | {"messages": {"role": "from", "content": "value"}}],
            }
        },
    )

    (found,) = find_sources(open_spec(a_file(tmp_path, mix), dp=1, cache_dir=tmp_path / "cache"))

    assert any("join the texts of the parts" in each for each in found.doubts) is is_told


@pytest.mark.parametrize("wraps", [True, False], ids=["under function", "flat"])
@pytest.mark.parametrize(
    ("arguments", "written", "is_told"),
    [
        ('{"city": "Bern"}', "call.arguments | tojson", True),
        ('{"city": "Bern"}', "call.arguments", False),
        ({"city": "Bern"}, "call.arguments | tojson", False),
        (
            "7",
            "call.arguments | tojson",
            False,
        ),  # a text without a quote, which cannot be recognised
    ],
)
def test_arguments_that_a_template_quotes_once_more_are_told_and_what_rows_cut_hides_none(
    tmp_path, arguments, written, is_told, wraps
):
    call = {"name": "weather", "arguments": arguments}
    calls = [{"type": "function", "function": call}] if wraps else [call]
    asked = {"role": "user", "content": "how is it? " * 999}
    record = [asked, {"role": "assistant", "content": "", "tool_calls": calls}]
    lines = json.dumps({"messages": [asked]}) + "\n" + json.dumps({"messages": record}) + "\n"
    (tmp_path / "chats.jsonl").write_text(lines)
    (tmp_path / "calls.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        "{% set call = c.function or c %}{{ WRITTEN }}{% endfor %}{% endfor %}".replace(
            "WRITTEN", written
        )
    )
    mix = a_mix(
        tokenizer={"type": "bytes"},
        sources={
            "sft": {
                "type": "jsonl",
                "path": "chats.jsonl",
                "text": "messages",
                "transforms": [{"type": "chat", "template": "calls.jinja", "loss": "all"}],
            }
        },
    )

    (found,) = find_sources(open_spec(a_file(tmp_path, mix), dp=1, cache_dir=tmp_path / "cache"))

    cut, *others = found.doubts
    assert "records are longer than pack.length" in cut
    assert ["have their arguments as texts of JSON" in each for each in others] == [True] * is_told


class OpenedError(Exception):
    """A source was opened again."""


@pytest.fixture
def a_checked(tmp_path, monkeypatch):
    """A mix that was checked once, its shards not opened again without an error."""
    mix = a_mixed_corpus(tmp_path)
    spec = open_spec(a_file(tmp_path, mix), dp=1, cache_dir=tmp_path / "cache")
    found = find_sources(spec)

    def opened(name, *_, **__):
        raise OpenedError(name)

    monkeypatch.setattr("omniload.commands.opening.open_shards", opened)
    return spec, found


def test_what_has_not_changed_since_it_was_found_is_not_opened_again(a_checked):
    spec, found = a_checked

    assert find_sources(spec) == found


def test_a_shard_that_was_replaced_by_one_of_its_size_and_time_is_opened_again(a_checked, tmp_path):
    spec, _ = a_checked
    shard = tmp_path / "text" / "0.jsonl"
    before = shard.stat()
    other = tmp_path / "other"
    other.write_bytes(b"x" * before.st_size)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(shard)

    with pytest.raises(OpenedError, match="text"):
        find_sources(spec)


def test_findings_that_are_damaged_or_of_another_version_are_found_again(a_checked):
    spec, _ = a_checked
    (kept,) = spec.cache_dir.glob("*.findings.json")
    whole = kept.read_bytes()

    for damaged in (whole[:-9], whole.replace(b'"version":12', b'"version":11'), b"", b"[]"):
        assert damaged != whole
        kept.write_bytes(damaged)
        with pytest.raises(OpenedError):
            find_sources(spec)


def test_a_finding_rests_on_what_the_file_says_and_on_the_tokenizer(tmp_path):
    source = a_mixed_corpus(tmp_path).sources["text"]
    other = source.model_copy(update={"split": "eval"})
    of_bytes = key_of_tokenizer(ByteTokenizer(type="bytes"), tmp_path)
    bpe = BpeTokenizer(type="bpe", path="tokenizer.json")
    tokenizers = [of_bytes, key_of_tokenizer(None, tmp_path), key_of_tokenizer(bpe, tmp_path)]
    for text in ("one", "three"):
        (tmp_path / "tokenizer.json").write_text(text)
        tokenizers.append(key_of_tokenizer(bpe, tmp_path))
    keys = [key_of_source(source, (), tokenizer) for tokenizer in tokenizers]

    assert len({*keys, key_of_source(other, (), of_bytes)}) == len(keys) + 1
    assert key_of_source(source, (), of_bytes) == keys[0]


def test_a_source_that_is_at_fault_is_told_again_and_the_others_are_known(a_checked, tmp_path):
    spec, _ = a_checked
    shard = tmp_path / "text" / "0.jsonl"
    shard.rename(tmp_path / "away")

    for _ in range(2):
        with pytest.raises(ConfigError, match=r"sources\.text\.path: .* matches no file"):
            find_sources(spec)
