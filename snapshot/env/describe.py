"""What an interpreter says of itself; run as a file by any interpreter, with its own library only."""

import json
import os
import platform
import sys
import sysconfig

__all__ = ["describe", "witnesses"]


def describe() -> dict[str, str]:
    """Return where this interpreter installs, and what wheels are chosen by."""
    paths = sysconfig.get_paths()
    return {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "purelib": paths["purelib"],
        "platlib": paths["platlib"],
        "scripts": paths["scripts"],
        "implementation": platform.python_implementation(),
        "version": platform.python_version(),
        "cache_tag": sys.implementation.cache_tag or "",
        "soabi": sysconfig.get_config_var("SOABI") or "",
        "abiflags": getattr(sys, "abiflags", ""),
        "platform": sysconfig.get_platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
    }


def witnesses() -> list[str]:
    """Return the files that the description was made from: as long as they stay, so does it."""
    found = [os.path.realpath(sys.executable), os.__file__, sysconfig.__file__, platform.__file__]
    libraries = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDLIBRARY")
    if all(libraries):
        found.append("/".join(libraries))  # a shared one holds the version
    names = [name for name in sys.modules if name.startswith("_sysconfigdata")]
    found += [sys.modules[name].__file__ or "" for name in names]
    return [path for path in found if os.path.isfile(path)]  # noqa: PTH113


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"description": describe(), "witnesses": witnesses()}))
