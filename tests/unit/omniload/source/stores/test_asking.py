"""The values that distinguish versions of a file in a store, and how long they stay valid."""

from datetime import UTC, datetime

import pytest

from omniload.source.stores.asking import is_settled, stamp_of, tag_of

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC).timestamp()


def test_a_tag_goes_before_a_time():
    entry = {"mtime": 5.0, "ETag": '"a"', "LastModified": "x"}

    assert (stamp_of(entry), tag_of(entry)) == ('"a"', '"a"')
    assert (stamp_of({"mtime": 5.0}), tag_of({"mtime": 5.0})) == ("5.0", "")
    assert stamp_of({"modification_time": 1_795_748_722_827}) == "1795748722827"
    assert stamp_of({"modificationTime": 1_795_748_722_827, "mtime": ""}) == "1795748722827"
    assert stamp_of({"Last-Modified": "Fri, 02 Jan 2026 11:58:00 GMT"}).endswith("GMT")
    assert (stamp_of({"ETag": ""}), tag_of({})) == ("", "")


@pytest.mark.parametrize(
    ("stamp", "tag", "settled"),
    [
        ('"a"', '"a"', True),
        ('W/"a"', 'W/"a"', False),  # equivalent, but not the same bytes
        ("2026-01-02 11:58:00+00:00", "", True),
        ("2026-01-02 11:58:00", "", True),
        ("2026-01-02 13:58:00+02:00", "", True),
        ("2026-01-02 11:59:30+00:00", "", False),  # may be written again within its second
        ("2026-01-02 12:10:00+00:00", "", False),
        (str(NOW - 61), "", True),
        (str(NOW - 59), "", False),
        (str(int(NOW - 61) * 1000), "", True),  # as HDFS counts
        (str(int(NOW - 59) * 1000), "", False),
        ("Fri, 02 Jan 2026 11:58:00 GMT", "", True),  # as HTTP writes it
        ("Fri, 02 Jan 2026 11:59:30 GMT", "", False),
        (
            f'"{int(NOW - 61):x}-1f4"',
            f'"{int(NOW - 61):x}-1f4"',
            True,
        ),  # a tag of nginx: time and size
        (f'"{int(NOW - 59):x}-1f4"', f'"{int(NOW - 59):x}-1f4"', False),
        ('"9b2cf535f27731c974343645a3985328-2"', '"9b2cf535f27731c974343645a3985328-2"', True),
        ("yesterday", "", False),
        ("nan", "", False),
        ("", "", False),
    ],
)
def test_a_time_tells_versions_apart_once_it_is_past(stamp, tag, settled):
    assert is_settled(stamp, tag, NOW) is settled
