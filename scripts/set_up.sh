#!/bin/sh
# Installs the project and what it needs into a virtual environment. Safe to repeat.
# Usage: set_up.sh PYTHON VENV demo|tests
# `demo` brings what `make demo` runs; `tests` brings all extras and the programs that tests compare with.
set -eu
python=$1
venv=$2
purpose=$3
here=$(cd "$(dirname "$0")/.." && pwd)

case $purpose in
    demo) extras=ray,torch,report ;;
    tests) extras=all,dev,docs ;;
    *) echo "set-up: demo or tests, not $purpose" >&2; exit 2 ;;
esac
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    found=$("$python" --version 2>&1 || echo "no $python")
    echo "set-up: Python 3.11 or newer is needed, found: $found; run make PYTHON=/path/to/python3.11" >&2
    exit 2
fi
PYTHON="$python" sh "$here/scripts/system_packages.sh" "$purpose"

if [ ! -x "$venv/bin/python" ]; then
    echo "set-up: creating $venv"
    "$python" -m venv "$venv"
fi
echo "set-up: installing Python packages into $venv (a minute or two the first time)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint "$here/constraints.txt" --editable "$here[$extras]"
echo "set-up: done"
