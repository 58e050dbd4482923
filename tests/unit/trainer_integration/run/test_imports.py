import gc

import pytest

from trainer_integration.run.imports import kept_imports


@pytest.fixture(autouse=True)
def _as_before():
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def test_what_is_made_inside_is_never_looked_at_by_the_collector_again():
    with kept_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]

    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(made)
    tracked = {id(each) for each in gc.get_objects()}
    assert not any(id(each) in tracked for each in made)


def test_a_collector_that_was_off_stays_off():
    gc.disable()

    with kept_imports():
        pass

    assert not gc.isenabled()


def test_an_import_that_fails_leaves_the_collector_on():
    with pytest.raises(ModuleNotFoundError), kept_imports():
        raise ModuleNotFoundError("torch")

    assert gc.isenabled()
