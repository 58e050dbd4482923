"""Sources that an edit names."""

import pytest

from omniload.base.errors import ConfigError
from omniload.mix.edits.sources import require_known

MANY = [f"s{i:02}" for i in range(37)]


@pytest.mark.parametrize(
    ("known", "said"),
    [(MANY[:12], "s10, s11; correct"), (MANY, "s10, s11 and 25 more; correct")],
)
def test_a_source_that_the_mix_does_not_have_is_told_with_those_that_it_has(known, said):
    require_known(known, known)

    with pytest.raises(
        ConfigError, match=rf"'s1o' is not in the mix \(did you mean 's\d\d'\?\), .*{said}"
    ):
        require_known(["s1o"], known)


def test_what_may_be_a_group_is_told_how_its_sources_are_changed():
    with pytest.raises(ConfigError, match="of a group give its sources, or edit the mix file"):
        require_known(["web"], ["web_de", "web_en"])
