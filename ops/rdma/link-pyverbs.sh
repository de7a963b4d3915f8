#!/usr/bin/env bash
# Make the system's pyverbs importable in .venv. pyverbs on package indexes does not
# build or does not match the system's libibverbs; the distribution's package does.
#
# usage: link-pyverbs.sh [VENV]
set -euo pipefail
venv=${1:-.venv}
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
found=
for each in /usr/lib/python3/dist-packages /usr/lib64/python3*/site-packages; do
    [ -d "$each/pyverbs" ] && found=$each
done
if [ -z "$found" ]; then
    echo "no system pyverbs: apt-get install python3-pyverbs ibverbs-providers (or your system's name for it)" >&2
    exit 1
fi
ln -sfn "$found/pyverbs" "$site/pyverbs"
if ! "$venv/bin/python" -c 'import pyverbs.device' 2>/tmp/pyverbs-error.$$; then
    tail -n 1 /tmp/pyverbs-error.$$ >&2
    rm -f /tmp/pyverbs-error.$$ "$site/pyverbs"
    echo "the system's pyverbs is for another Python than .venv's $version: make .venv with the system's (PYTHON=/usr/bin/python3 make setup)" >&2
    exit 1
fi
rm -f /tmp/pyverbs-error.$$
echo "linked $found/pyverbs into $venv"
