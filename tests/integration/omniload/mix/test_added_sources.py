"""A source that would end the run is refused when it is added, and neither the run nor its edits change."""

import json

import pytest
import yaml

import omniload
from tests.support.plane.edits.mix_commands import json_of

BARREN = "sources.more: none of its 80 records gives a sample that fits pack.length 32; change"
REFUSED = {
    "another key": ({"text": "body"}, "a.jsonl:1: has no key 'body'; it has text"),
    "another condition": ({"where": {"lang": "en"}}, "has no key 'lang'; it has text"),
    "all left out": ({"transforms": [{"type": "filter", "max_tokens": 2}]}, BARREN),
    "all too long": ({"path": "long.jsonl", "overlong": "drop"}, BARREN),
    "all undecodable": ({"text": "body", "on_error": {"policy": "skip"}}, BARREN),
}


@pytest.fixture
def folder(tmp_path):
    for name, times in (("a", 1), ("long", 9)):
        lines = [json.dumps({"text": f"record {i} " * times}) for i in range(80)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    mix = {
        "version": 1,
        "seed": 1,
        "tokenizer": {"type": "bytes"},
        "sources": {"a": {"type": "jsonl", "path": "a.jsonl"}},
        "mix": {"stages": [{"weights": {"a": 1}}]},
        "pack": {"length": 32},
        "batch": {"tokens": 128, "micro_tokens": 64},
    }
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(mix))
    return tmp_path


def add(folder, **changes):
    source = {"type": "jsonl", "path": "a.jsonl"} | changes
    (folder / "more.yaml").write_text(yaml.safe_dump({"sources": {"more": source}}))
    return json_of("add", folder / "run", "more", "--from", folder / "more.yaml", "--weight", 1)


def opened(folder, **changes):
    return omniload.open(folder / "mix.yaml", run_dir=folder / "run", arrays="numpy", **changes)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("is_up", [True, False])
def test_a_source_of_which_nothing_can_be_drawn_is_refused_and_the_run_goes_on(case, is_up, folder):
    changes, said = REFUSED[case]
    with opened(folder) as loader:
        loader.next_batch()
        if is_up:
            with pytest.raises(omniload.OmniloadError, match=said):
                add(folder, **changes)
        while loader.next_step < 12:
            loader.next_batch()
        state = loader.state_dict()
    if not is_up:
        with pytest.raises(omniload.OmniloadError, match=said):
            add(folder, **changes)

    assert json_of("show", folder / "run")["edits"] == []
    with opened(folder, state=state, steps=14) as loader:
        assert len(list(loader)) == 2


def test_a_source_that_was_refused_is_added_once_it_is_mended(folder):
    with opened(folder) as loader:
        loader.next_batch()
        with pytest.raises(omniload.IntegrityError, match="has no key 'body'"):
            add(folder, text="body")

        step = add(folder, overlong="drop")["edit"]["step"]

        while loader.next_step < step + 8:
            batch = loader.next_batch()
    assert batch.tokens_by_source["more"] > 0


def test_few_first_records_that_give_nothing_do_not_refuse_a_source_that_has_others(folder):
    lines = [json.dumps({"text": "long " * 20 if i < 70 else "short"}) for i in range(80)]
    (folder / "late.jsonl").write_text("\n".join(lines))

    with opened(folder) as loader:
        loader.next_batch()
        shuffle = {"method": "none"}
        assert add(folder, path="late.jsonl", overlong="drop", shuffle=shuffle)["edit"]["step"] > 0
