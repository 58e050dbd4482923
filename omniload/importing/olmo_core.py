"""OLMo-core's source mixture: ratios of sources of numpy files, with limits to what is repeated.

::

    requested_tokens: 100_000_000_000    # in all, which the sources share
    sources:
      - source_name: web
        target_ratio: 0.8
        paths: [s3://bucket/web/*.npy]
        max_repetition_ratio: 1.5        # how often a token may come
        max_source_fraction: 0.9         # how much of the source may be used
"""

from omniload.importing.fields import Fields
from omniload.importing.files import numpy_source, of_token_files
from omniload.importing.imported import Asked, Imported, new_name
from omniload.importing.tools import Tool, has_sources

__all__ = ["TOOL"]


def _read(document: object, asked: Asked) -> Imported:
    """Return the mixture that ``document``, the file's content, declares."""
    found = of_token_files(asked)
    top = Fields(document if isinstance(document, dict) else {}, "", asked.report)
    by_name: dict[str, float] = {}
    for source in top.items("sources"):
        name = new_name(source.need("source_name", str, "source"), found.sources)
        by_name[name] = source.number("target_ratio") or 0.0
        paths = source.texts("paths")
        if not paths:
            source.refuse("paths", "is missing")
        found.sources[name] = numpy_source(paths, asked)
        if (most := source.number("max_repetition_ratio", least=1.0)) is not None:
            found.sources[name]["max_repetition"] = most
        if (part := source.number("max_source_fraction")) is not None and part < 1:
            source.refuse(
                "max_source_fraction", f"is {part:g}: a part of a source cannot be declared"
            )
        source.end()
    if not found.sources:
        top.refuse("sources", "names no source")
    top.note(
        {
            "global_batch_size": "give --batch",
            "processes": "loaders are counted by runtime",
            "quiet": "a matter of output",
            "render_tables": "a matter of output",
        }
    )
    found.total_tokens = top.take("requested_tokens", int, 0) or None
    if found.total_tokens is not None and found.total_tokens < 1:
        top.refuse("requested_tokens", f"is {found.total_tokens}; a run draws 1 or more")
    found.seed = top.take("seed", int, 0)
    top.end()
    found.stages.append((0, by_name))
    return found


TOOL = Tool(read=_read, sign="sources, a list of mappings", holds=has_sources(dict))
