"""The optional parts of the distribution: the missing module, and the command that installs it.

The import name ``omniload`` is also that of another project on the public index. A message with
``pip install 'omniload[ray]'`` would overwrite our files with those of that project. Therefore the name of our
distribution is defined here once, and every message uses it.
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
"""Name of this distribution on a package index; the packages in it keep their names."""

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
"""Extra that installs a top-level module."""


def install_line(*extras: str) -> str:
    """Return the command that installs ``extras`` of this distribution."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def missing_extra(
    what: str, error: ModuleNotFoundError, *, extra: str | None = None
) -> ConfigError:
    """Return the refusal of ``what``, which needs the module that ``error`` did not find.

    ``extra`` names the extra to install if several bring the module.

    Raises:
        ModuleNotFoundError: ``error`` itself, if no extra brings its module, which is a fault of ours.
    """
    module = (error.name or "").partition(".")[0]
    if module not in EXTRA_OF:
        raise error
    return ConfigError(
        f"{what} needs the package {module}, which is not installed; {install_line(extra or EXTRA_OF[module])}"
    )


def missing_client(error: ImportError) -> str:
    """Return what a client of a store lacks, in its own words, and the install command if an extra brings it."""
    # fsspec names the package only in its text; the error before it has the name of the module.
    found = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    extra = EXTRA_OF.get((found.name or "").partition(".")[0])
    return f"{error}; {install_line(extra)}" if extra else str(error)


def refuse_namesake() -> None:
    """Refuse to run if the other project of this name is installed into the same folder.

    Both distributions contain a package ``omniload``. The one installed last has overwritten files of the other, so
    neither can be trusted to run.

    Raises:
        ConfigError: The other project is there; the message has its version and the commands that repair the
            installation.
    """
    site = Path(omniload.__file__).parents[1]
    # Only in our own folder, because a namesake elsewhere on the path overwrites nothing.
    for record in site.glob(f"{_NAMESAKE}-*.dist-info"):
        version = record.name.removeprefix(f"{_NAMESAKE}-").removesuffix(".dist-info")
        raise ConfigError(
            f"{site} holds the distribution {_NAMESAKE} {version}, another project whose package omniload lies over "
            f"ours; pip uninstall {_NAMESAKE} {DISTRIBUTION}, then pip install {DISTRIBUTION}"
        )
