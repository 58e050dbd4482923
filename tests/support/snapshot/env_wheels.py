"""Tiny wheels, built by hand, and environments into which pip installs them without an index."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

__all__ = ["a_quick_pip", "a_venv", "a_wheel", "pip_words"]


def a_wheel(folder, name, version="1.0", modules=None, requires=()):
    """Write a wheel with some modules and a script that prints its version."""
    path = Path(folder) / f"{name}-{version}-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\ndef main():\n    print(VERSION)\n",
        **{f"{name}/{module}": text for module, text in (modules or {}).items()},
        f"{info}/METADATA": "".join(
            [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
            + [f"Requires-Dist: {each}\n" for each in requires]
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-version = {name}:main\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(inside, text)
    return path


def a_venv(folder):
    """Make an environment without pip that also sees the packages of this one, after its own."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--clear", folder], check=True, timeout=60
    )
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = Path(folder) / "lib" / version / "site-packages"
    ours = sysconfig.get_paths()["purelib"]
    (site / "behind.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return Path(folder) / "bin" / "python"


def pip_words(python, wheels, *words):
    """Return the command that installs into an environment with this environment's pip."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index"]
    return [*pip, "--find-links", str(wheels), "--disable-pip-version-check", *words]


QUICK = """
import pathlib, re, sys, zipfile
site, scripts, python = sys.argv[1:4]
names = [w for w in sys.argv[sys.argv.index("install") + 1 :] if not w.startswith("-")]
lines = []
for name in names:
    lines += open(name).read().splitlines() if name.endswith(".txt") else [name]
wanted = [re.split("[ =<>]", line)[0].lower() for line in lines if not line.startswith("#")]
while wanted:
    name = wanted.pop()
    wheel = next(pathlib.Path("wheels").glob(name + "-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        for inside in archive.namelist():
            if inside.endswith("METADATA"):
                wanted += re.findall("^Requires-Dist: (.*)$", archive.read(inside).decode(), re.M)
    script = pathlib.Path(scripts, name + "-version")
    script.write_text(f"#!{python}\\nimport {name}\\n{name}.main()\\n")
    script.chmod(0o755)
"""


def a_quick_pip(folder, python):
    """Return a command that installs as pip would, in a tenth of its time: the start of pip is most of a test."""
    (Path(folder) / "quick").mkdir(exist_ok=True)
    (Path(folder) / "quick" / "pip").write_text(QUICK)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = Path(python).parents[1] / "lib" / version / "site-packages"
    return [
        sys.executable,
        "-I",
        f"{folder}/quick/pip",
        str(site),
        str(Path(python).parent),
        str(python),
        "install",
    ]
