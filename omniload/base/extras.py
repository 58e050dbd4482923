"""The optional parts of the distribution: the module that is missing, and the line that installs it.

The import name ``omniload`` is also that of another project on the public index. A message that
said ``pip install 'omniload[ray]'`` would put that project's files over ours, so the name of our
distribution stands here once, and every message takes it from here.
"""

from pathlib import Path

import omniload
from omniload.base.errors import ConfigError

__all__ = [
    "DISTRIBUTION",
    "EXTRA_OF",
    "install_line",
    "missing_client",
    "missing_extra",
    "refuse_namesake",
]

DISTRIBUTION = "omniload-data"
"""Name of this distribution on a package index; the packages it holds keep theirs."""

_NAMESAKE = "omniload"

EXTRA_OF = {
    "PIL": "images",
    "gcsfs": "gcs",
    "google": "containerd",
    "grpc": "containerd",
    "hdfs_native": "hdfs",
    "indexed_gzip": "image",
    "jinja2": "report",
    "lance": "lance",
    "mlflow": "mlflow",
    "pyfuse3": "fuse",
    "ray": "ray",
    "s3fs": "s3",
    "safetensors": "torch",
    "tensorboard": "tensorboard",
    "tiktoken": "tiktoken",
    "torch": "torch",
    "trio": "fuse",
    "wandb": "wandb",
}
"""Extra that brings a top-level module."""


def install_line(*extras: str) -> str:
    """Return the command that installs ``extras`` of this distribution."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def missing_extra(
    what: str, error: ModuleNotFoundError, *, extra: str | None = None
) -> ConfigError:
    """Return the refusal of ``what``, which needs the module that ``error`` did not find.

    ``extra`` names the one to install where several bring it.

    Raises:
        ModuleNotFoundError: ``error`` itself, where no extra brings its module: a fault of ours.
    """
    module = (error.name or "").partition(".")[0]
    if module not in EXTRA_OF:
        raise error
    return ConfigError(
        f"{what} needs the package {module}, which is not installed; {install_line(extra or EXTRA_OF[module])}"
    )


def missing_client(error: ImportError) -> str:
    """Return what a client of a store lacks, as it says itself, and the line that installs it where an extra does."""
    # fsspec names the package in words, and in what was not found before them.
    found = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    extra = EXTRA_OF.get((found.name or "").partition(".")[0])
    return f"{error}; {install_line(extra)}" if extra else str(error)


def refuse_namesake() -> None:
    """Refuse to run where the other project of this name is installed into the same folder.

    Both distributions hold a package ``omniload``: the one installed last has overwritten files of
    the other, and neither can be trusted to run.

    Raises:
        ConfigError: With the version found and the lines that mend it.
    """
    site = Path(omniload.__file__).parents[1]
    # Beside our own files: a namesake elsewhere on the path lies over nothing.
    for record in site.glob(f"{_NAMESAKE}-*.dist-info"):
        version = record.name.removeprefix(f"{_NAMESAKE}-").removesuffix(".dist-info")
        raise ConfigError(
            f"{site} holds the distribution {_NAMESAKE} {version}, another project whose package omniload lies over "
            f"ours; pip uninstall {_NAMESAKE} {DISTRIBUTION}, then pip install {DISTRIBUTION}"
        )
