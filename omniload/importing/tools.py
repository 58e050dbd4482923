"""The tools whose files are known: a closed list."""

from collections.abc import Callable, Mapping

from omniload.importing import (
    axolotl,
    energon,
    llm_foundry,
    megatron,
    nanotron,
    olmo_core,
    veomni,
)
from omniload.importing.imported import Asked, Imported

__all__ = ["TOOLS"]

TOOLS: Mapping[str, Callable[[object, Asked], Imported]] = {
    "axolotl": axolotl.read,
    "energon": energon.read,
    "llm-foundry": llm_foundry.read,
    "megatron": megatron.read,
    "nanotron": nanotron.read,
    "olmo-core": olmo_core.read,
    "veomni": veomni.read,
}
"""Name of a tool, as the command line says it, to what reads its file."""
