#!/bin/sh
# Installs the system packages that a purpose needs, or prints the line that does. Debian and Ubuntu.
# Usage: system_packages.sh demo|tests
set -eu
purpose=$1

missing=""
need() { # need PACKAGE TEST...: PACKAGE is missing unless TEST succeeds
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}
need python3-venv "${PYTHON:-python3}" -c 'import ensurepip, venv'
if [ "$purpose" = tests ]; then
    need gcc command -v gcc
    need pkg-config command -v pkg-config
    need fuse3 command -v fusermount3
    need libfuse3-dev pkg-config --exists fuse3
    need python3-dev "${PYTHON:-python3}" -c \
        'import os, sysconfig; assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))'
    # What the tests put on a mount.
    need iproute2 command -v ip
    need git command -v git
    need rsync command -v rsync
    need systemd command -v systemd-analyze
    need fio command -v fio
    need dbench command -v dbench
    need stress-ng command -v stress-ng
    need pigz command -v pigz
    need prometheus command -v promtool
    need chromium command -v chromium
    for package in docker-registry skopeo umoci containerd runc podman; do need $package command -v $package; done
fi
# As udev sets it, where no udev runs (containers): without it no user but root mounts anything.
if [ "$purpose" = tests ] && [ "$(id -u)" = 0 ] && [ -c /dev/fuse ]; then chmod 0666 /dev/fuse || true; fi
[ -z "$missing" ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "set-up: installing system packages:$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086 -- a list of package names
    apt-get install -y -qq --no-install-recommends $missing >/dev/null
    exit 0
fi
echo "set-up: system packages are missing; run this line, then the same make command again:" >&2
echo "    sudo apt-get update && sudo apt-get install -y$missing" >&2
exit 3
