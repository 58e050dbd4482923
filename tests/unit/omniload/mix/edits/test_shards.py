"""The shard that a name means, and the shards that are left out at a step."""

import pytest

from omniload.base.errors import ConfigError
from omniload.base.secrets import HIDDEN
from omniload.mix.edits.edit import Edit, SetWeights, SkipShard, Undo, said_of
from omniload.mix.edits.history import History
from omniload.mix.edits.shards import left_out_of, shard_meant, shards_like
from tests.support.plane.builders import a_mix

PATHS = {
    "web": ["/data/web/part-0.jsonl", "/data/web/part-1.jsonl", "/data/web/old/part-1.jsonl"],
    "code": ["s3://bucket/code/part-0.jsonl"],
}
NAMES = ("code", "web")


def looked_for(file, source=None, paths=None):
    change = SkipShard(file=file, source=source)
    # As two loaders would answer, with a source each.
    found = [shards_like(change, {name: each}) for name, each in (paths or PATHS).items()]
    return shard_meant(change, NAMES, found)


def skip(number=1, of=3, source="web"):
    return SkipShard(file=f"{source}/{number}", source=source, number=number, of=of)


@pytest.mark.parametrize(
    ("file", "source", "number"),
    [
        ("/data/web/part-1.jsonl", "web", 1),
        ("old/part-1.jsonl", "web", 2),
        ("s3://bucket/code/part-0.jsonl", "code", 0),
        ("bucket/code/part-0.jsonl", "code", 0),
        ("./code/part-0.jsonl", "code", 0),
    ],
)
def test_a_shard_is_named_by_its_path_or_the_end_of_it(file, source, number):
    found = looked_for(file)

    assert (found.source, found.number, found.of) == (source, number, len(PATHS[source]))
    assert found.file == PATHS[source][number]


def test_a_path_that_is_the_whole_name_is_meant_though_others_end_in_it():
    paths = {"web": ["part-1.jsonl", "old/part-1.jsonl"]}

    assert looked_for("part-1.jsonl", paths=paths).number == 0


def test_several_shards_of_a_name_are_listed_with_what_tells_them_apart():
    with pytest.raises(ConfigError, match=r"'part-1.jsonl' is 2 shards: .*; say more of its path"):
        looked_for("part-1.jsonl")
    with pytest.raises(ConfigError, match=r"2 shards: .* of web, .* of code; say more"):
        looked_for("part-0.jsonl")
    shared = {"web": ["all/x.txt"], "code": ["all/x.txt"]}
    with pytest.raises(ConfigError, match=r"x.txt of web, all/x.txt of code; say --source NAME$"):
        looked_for("x.txt", paths=shared)

    assert looked_for("part-0.jsonl", "code").source == "code"


def test_of_a_name_that_many_shards_have_the_first_are_listed_and_the_others_counted():
    many = {f"s{i:02}": [f"s{i:02}/part-0.parquet"] for i in range(9)}

    with pytest.raises(ConfigError, match=r"is 9 shards: s00/.* of s05, and 3 more; say more of"):
        looked_for("part-0.parquet", paths=many)


def test_a_source_that_two_loaders_have_open_while_it_moves_has_its_shard_once():
    change = SkipShard(file="old/part-1.jsonl")
    found = shards_like(change, {"web": PATHS["web"]})

    assert shard_meant(change, NAMES, [found, found]).number == 2


def test_no_shard_of_a_name_is_told_with_those_most_like_it():
    with pytest.raises(
        ConfigError, match=r"no shard of 2 sources is 'part-11.jsonl'.* of 4 that"
    ) as refused:
        looked_for("part-11.jsonl")
    # A part of a name is not the end of a path.
    with pytest.raises(ConfigError, match=r"no shard of source 'web' is 'art-1\.jsonl'"):
        looked_for("art-1.jsonl", "web")
    with pytest.raises(ConfigError, match="did you mean 'web'"):
        looked_for("part-0.jsonl", "wob")

    assert "most like it: /data/web/" in str(refused.value)


def test_what_the_folder_keeps_of_a_path_has_no_secret_and_is_text():
    url = "s3://" + "AKIAEXAMPLE:wJalrXUtnFEMI@" + "bucket/x.jsonl"
    found = looked_for("x.jsonl", paths={"web": [url, "y.jsonl"]})

    assert HIDDEN in found.file
    assert "wJalr" not in found.file
    odd = looked_for(r"b/y\udcff.jsonl", paths={"web": ["a.jsonl", "b/y\udcff.jsonl"]})
    assert odd.number == 1
    assert odd.model_dump_json()


def test_an_undo_holds_from_its_own_step_on_and_before_the_edit_takes_it_back_whole():
    def edit(revision, step, change, undoes=None):
        return Edit(revision=revision, step=step, change=change, stages=(), undoes=undoes)

    edits = [edit(1, 5, skip(1)), edit(2, 7, skip(2)), edit(3, 9, Undo(), undoes=2)]

    assert [left_out_of(edits, step) for step in (4, 5, 7, 9)] == [
        {},
        {"web": (1,)},
        {"web": (1, 2)},
        {"web": (1,)},
    ]
    assert left_out_of([edit(1, 5, skip(1)), edit(2, 3, Undo(), undoes=1)], 6) == {}


def test_a_shard_is_left_out_once_and_never_the_last_of_its_source():
    history = History(a_mix()).edited(skip(1), 4)

    with pytest.raises(ConfigError, match="left out already, by edit 1 from step 4 on"):
        history.edited(skip(1), 9)
    with pytest.raises(ConfigError, match=r"last of 3 shards .* omniload mix retire RUN web"):
        history.edited(skip(2), 9).edited(skip(0), 12)
    with pytest.raises(ConfigError, match="was not looked for"):
        history.edited(SkipShard(file="x.jsonl"), 9)

    assert history.edited(Undo(), 6).edited(skip(1), 9).left_out_at(9) == {"web": (1,)}
    assert History(a_mix()).edited(skip(0, of=2), 1).edited(skip(0, of=2, source="code"), 2)


def test_weights_stay_and_are_still_changed_by_others():
    history = History(a_mix()).edited(SetWeights(weights={"web": 3}), 2).edited(skip(1), 4)

    assert history.shares_at(4) == history.shares_at(3)
    assert history.edits[-1].stages == ()
    assert history.edited(Undo(), 5).edited(Undo(), 6).shares_at(6) == {"code": 0.5, "web": 0.5}
    assert said_of(history.edits[-1].change) == "skip --shard web/1 --source web"


def test_a_window_of_steps_ends_where_a_shard_goes_though_an_earlier_step_was_edited_later():
    history = History(a_mix()).edited(skip(1), 20).edited(SetWeights(weights={"web": 3}), 10)

    assert history.revision_at(10) == 2
    assert history.steps_alike(10) == 10
    assert [history.left_out_at(step) for step in (19, 20)] == [{}, {"web": (1,)}]


def test_a_run_that_draws_amounts_leaves_shards_out_too():
    mix = a_mix(version=2, mix={"amounts": {"web": {"epochs": 2}, "code": {"tokens": 900}}})
    history = History(mix).edited(skip(1), 4)

    assert history.edited(Undo(), 8).left_out_at(8) == {}
