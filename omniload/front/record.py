"""What the folder of a loop's run keeps of its mix: that ``omniload mix show`` and ``audit`` can read it."""

from collections.abc import Mapping
from pathlib import Path

from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from omniload.base.log import get_logger
from omniload.base.secrets import without_secrets
from omniload.mix.config import MixConfig, mix_text
from omniload.mix.run_record import MixText

__all__ = ["text_as_run"]

_LOG = get_logger(__name__)
_NO_FILE = "mix-given-in-python.yaml"
"""Name that stands for the file of a mix that has none; relative paths start at its folder."""


def text_as_run(
    given: str | Path | Mapping[str, object] | MixConfig, model: MixConfig
) -> MixText | None:
    """Return a mix as it runs: the text of its file, or another that says the same with settings in it.

    Args:
        given: What ``omniload.open`` was given.
        model: What it came to, settings and all.

    Returns:
        ``None`` for a mix that holds credentials: they would lie in the run's folder.
    """
    if isinstance(given, str | Path):
        path, text = Path(given), mix_text(given)
    else:
        path, text = Path.cwd() / _NO_FILE, ""
    if not _says(text, model):
        text = model.model_dump_json(indent=2)  # which is YAML too, and quotes every text
    if without_secrets(text) != text:
        _LOG.warning(
            "the mix holds credentials, so the run's folder keeps no record of it, and omniload mix show and audit "
            "cannot read the run; give them by the environment of the store's client and leave them out of the mix"
        )
        return None
    return MixText(path=path, text=text)


def _says(text: str, model: MixConfig) -> bool:
    try:
        return parse_yaml(text, MixConfig, name="the mix") == model
    except ConfigError:
        return False  # it was changed since it was read
