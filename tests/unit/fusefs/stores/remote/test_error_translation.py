"""Errors of clients, as the protocol of stores means them."""

import errno

import pyarrow as pa
import pytest

from fusefs.stores.remote.error_translation import translated
from omniload.base.errors import IntegrityError, UnavailableError

SAME = [
    FileNotFoundError(errno.ENOENT, "none"),
    FileExistsError(errno.EEXIST, "there"),
    PermissionError(errno.EACCES, "no"),
    NotADirectoryError(errno.ENOTDIR, "file"),
    IsADirectoryError(errno.EISDIR, "directory"),
    OSError(errno.ENOSPC, "full"),
    OSError(errno.ENOTEMPTY, "full of files"),
    IntegrityError("cut short"),
    UnavailableError("down"),
]


def raised(error, *foreign):
    with pytest.raises(BaseException) as caught, translated("a/b", *foreign):  # noqa: PT011
        raise error
    return caught.value


@pytest.mark.parametrize("error", SAME, ids=lambda error: type(error).__name__)
def test_an_error_that_means_the_same_stays_itself(error):
    assert raised(error) is error


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "broken"), OSError("no number"), TimeoutError("late")]
)
def test_every_other_failure_of_the_system_is_an_outage_that_names_the_path(error):
    found = raised(error)

    assert type(found) is UnavailableError
    assert found.__cause__ is error
    assert str(found).startswith("'a/b': the store answers: ")


def test_an_error_of_the_clients_own_is_an_outage_that_names_its_class():
    assert "ArrowInvalid: odd" in str(raised(pa.ArrowInvalid("odd"), (pa.ArrowException,)))
    assert "KeyError: 'x'" in str(raised(KeyError("x")))


def test_a_defect_passes_where_the_client_says_what_it_raises():
    defect = TypeError("ours")

    assert raised(defect, (pa.ArrowException, ValueError)) is defect


def test_an_interrupt_is_no_outage():
    stop = KeyboardInterrupt()

    assert raised(stop) is stop


def test_a_block_that_raises_nothing_returns():
    with translated("a"):
        done = True

    assert done


def test_an_outage_at_the_root_names_no_empty_path():
    with pytest.raises(UnavailableError, match=r"^the store answers: "), translated(""):
        raise OSError(errno.EIO, "broken")
