"""The run that a verb of ``omniload train`` is of."""

import pytest

from omniload.base.errors import ConfigError
from trainer_integration.commands.run_folder import checkpoints_of, folder_of


def test_a_folder_is_a_run_whatever_its_training_file_has_become(tmp_path):
    assert folder_of(tmp_path) == tmp_path
    assert checkpoints_of(tmp_path) == str(tmp_path / "checkpoints")


@pytest.mark.parametrize("named", [folder_of, checkpoints_of])
def test_what_is_not_there_may_have_been_meant_as_a_folder_or_a_file(tmp_path, named):
    with pytest.raises(ConfigError, match="gone: no such file or folder; give the folder of a run"):
        named(tmp_path / "gone")
