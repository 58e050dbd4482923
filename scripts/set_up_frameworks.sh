#!/bin/sh
# Installs training frameworks into a virtual environment of their own. Safe to repeat.
# Usage: set_up_frameworks.sh BASE_VENV VENV
# It sees the packages of BASE_VENV, torch among them: some 30 seconds and 500 MB, not minutes and gigabytes.
set -eu
base=$1
venv=$2
here=$(cd "$(dirname "$0")/.." && pwd)

echo "set-up: installing training frameworks into $venv"
"$base/bin/python" -m venv --without-pip "$venv"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
shared=$("$base/bin/python" -c "$packages")
own=$("$venv/bin/python" -c "$packages")
# Read like a line of the base's own: its editable install of this tree works here too.
echo "import site; site.addsitedir('$shared')" > "$own/base_environment.pth"
"$base/bin/python" -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-compile \
    --constraint "$here/constraints.txt" --requirement "$here/scripts/frameworks.txt"
echo "set-up: done"
