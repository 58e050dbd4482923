"""Checks before a run's sources are opened: none of them may take the run's own files; and their versions are fixed."""

from dataclasses import replace

from omniload.actors.plane import PlaneSpec
from omniload.source.formats.opening import at_versions, require_apart_from_run

__all__ = ["with_versions"]


def with_versions(spec: PlaneSpec) -> PlaneSpec:
    """Return a run whose mix names the versions of its data sets: the versions of its state, or the newest ones.

    So a restarted or added loader reads the same version as the others, whatever was committed meanwhile.

    Raises:
        ConfigError: A source includes files of the run's own folder.
        OmniloadError: As for opening the sources.
    """
    if spec.run_dir is not None:
        for name, config in spec.mix.sources.items():
            require_apart_from_run(
                name,
                config,
                base_dir=spec.base_dir,
                run_dir=spec.run_dir,
                has_journal=not spec.mix.runtime.journal,
            )
    mix, kept = spec.mix, (spec.state or {}).get("fingerprint")
    found = kept if isinstance(kept, dict) else {}
    sources = {
        name: at_versions(
            name,
            config,
            base_dir=spec.base_dir,
            shards_digest=str(found.get(f"sources.{name}.shards", "")),
        )
        for name, config in mix.sources.items()
    }
    if all(sources[name] is config for name, config in mix.sources.items()):
        return spec
    return replace(spec, mix=mix.model_copy(update={"sources": sources}))
