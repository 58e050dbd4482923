"""What an interpreter says of itself; run as a file by any interpreter, with its own library only."""

import json
import platform
import sys
import sysconfig

__all__ = ["describe"]


def describe() -> dict[str, object]:
    """Return where this interpreter installs, and what wheels are chosen by."""
    paths = sysconfig.get_paths()
    return {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "purelib": paths["purelib"],
        "platlib": paths["platlib"],
        "scripts": paths["scripts"],
        "identity": {
            "implementation": platform.python_implementation(),
            "version": platform.python_version(),
            "cache_tag": sys.implementation.cache_tag or "",
            "soabi": sysconfig.get_config_var("SOABI") or "",
            "abiflags": getattr(sys, "abiflags", ""),
            "platform": sysconfig.get_platform(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        },
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe()))
