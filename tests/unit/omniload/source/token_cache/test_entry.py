"""An entry is believed whole or not at all."""

import struct

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged
from omniload.source.token_cache.entry import ENTRY_VERSION, EncodedUnit, Seal, packed, unpacked

KEY = b"a key that people share"


def a_unit(lists=((1, 2, 3), (), (70_000,)), **changes):
    tokens = Ragged.of([np.array(x, np.int32) for x in lists])
    every = np.ones(len(lists), np.bool_)
    mask = Ragged(values_V=tokens.values_V % 2 == 1, offsets=tokens.offsets)
    known = {
        "tokens": tokens,
        "others": {"loss_mask": mask},
        "bad_B": ~every,
        "kept_B": every,
        "given_B": tokens.lengths_N > 0,
        "made_B": tokens.lengths_N > 0,
        "spoilt_B": ~every,
        "keys_B": np.arange(len(lists), dtype=np.uint64),
    }
    return EncodedUnit(**{**known, **changes})


def everything(unit):
    columns = {"tokens": unit.tokens, **unit.others}
    return {
        **{
            name: (c.offsets.tolist(), c.values_V.tolist(), c.values_V.dtype.str)
            for name, c in columns.items()
        },
        **{
            name: None if (array := getattr(unit, name)) is None else array.tolist()
            for name in ("bad_B", "kept_B", "given_B", "made_B", "spoilt_B", "keys_B")
        },
        "said": (unit.reason, unit.spoilt),
    }


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=5),
    st.sampled_from([b"", KEY]),
)
def test_an_entry_holds_what_was_put_in(lists, key):
    unit = a_unit(lists, reason="line 3: no text", spoilt="é")

    assert everything(unpacked("f/u", packed("f/u", unit, Seal(key)), Seal(key))) == everything(
        unit
    )


@pytest.mark.parametrize("key", [b"", KEY])
def test_an_entry_with_any_byte_changed_is_none(key):
    whole = packed("f/u", a_unit(), Seal(key))

    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        with pytest.raises(IntegrityError):
            unpacked("f/u", damaged, Seal(key))


def test_an_entry_cut_short_anywhere_is_none():
    whole = packed("f/u", a_unit(), Seal())

    for size in range(len(whole)):
        with pytest.raises(IntegrityError):
            unpacked("f/u", whole[:size], Seal())


@pytest.mark.parametrize("mine", [b"", b"another key of people"])
def test_an_entry_of_another_key_is_none(mine):
    with pytest.raises(IntegrityError, match="another key"):
        unpacked("f/u", packed("f/u", a_unit(), Seal(KEY)), Seal(mine))


def test_an_entry_that_was_renamed_is_none():
    with pytest.raises(IntegrityError, match="f/other"):
        unpacked("f/u", packed("f/other", a_unit(), Seal()), Seal())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": Ragged.of([np.array([-1], np.int32)] * 3), "others": {}}, "negative"),
        ({"others": {"loss_mask": Ragged.of([np.ones(1)] * 3, np.bool_)}}, "for each token"),
        ({"others": {"strange": Ragged.of([np.ones(1)] * 3, np.bool_)}}, "strange"),
    ],
)
def test_an_entry_whose_check_holds_is_looked_at_all_the_same(changes, said):
    with pytest.raises(IntegrityError, match=said):
        unpacked("f/u", packed("f/u", a_unit(**changes), Seal()), Seal())


def test_an_entry_without_tokens_is_none():
    said = {"of": "f/u", "records": 0, "has_keys": False, "reason": "", "spoilt": "", "columns": []}
    header = orjson.dumps(said)
    body = struct.pack("<8sII", b"OMNITOKS", ENTRY_VERSION, len(header)) + header

    with pytest.raises(IntegrityError, match="not one column of tokens"):
        unpacked("f/u", body + Seal().check_of(body), Seal())


def test_ids_below_65536_take_two_bytes():
    small, large = (
        packed("f/u", a_unit(((x,) * 1000,), others={}), Seal()) for x in (65_535, 65_536)
    )

    assert len(large) - len(small) == pytest.approx(2000, abs=16)
