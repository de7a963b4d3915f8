#!/usr/bin/env bash
# Make the system's pyverbs importable in .venv. pyverbs on package indexes does not
# build or does not match the system's libibverbs; the distribution's package does.
#
# usage: link-pyverbs.sh [VENV]
set -euo pipefail
venv=${1:-.venv}
python=$venv/bin/python
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
link=$site/pyverbs
# of an earlier time, when the system had one, or another
[ ! -L "$link" ] || rm "$link"

found=
for each in /usr/lib/python3/dist-packages /usr/lib64/python3*/site-packages; do
    [ ! -d "$each/pyverbs" ] || found=$each
done
if [ -z "$found" ]; then
    echo "no system pyverbs: apt-get install python3-pyverbs ibverbs-providers (or your system's name for it), then make rdma" >&2
    exit 1
fi
ln -s "$found/pyverbs" "$link"
if ! problem=$("$python" -c 'import pyverbs.device' 2>&1); then
    rm "$link"
    echo "${problem##*$'\n'}" >&2
    theirs=$(cd "$found/pyverbs" && ls device.cpython-*.so 2>/dev/null | head -n 1)
    theirs=${theirs#device.cpython-}; theirs=${theirs%%-*}
    if [ -n "$theirs" ] && [ "${theirs/3/3.}" != "$version" ]; then
        echo "the system's pyverbs is for Python ${theirs/3/3.} and $venv has $version: make $venv with the system's (make distclean; PYTHON=/usr/bin/python3 make setup rdma)" >&2
    else
        echo "the system's pyverbs does not load in $venv's Python $version" >&2
    fi
    exit 1
fi
devices=$("$python" -c '
import pyverbs.device
try: print(len(pyverbs.device.get_device_list()))
except Exception: print(0)')
echo "linked $found/pyverbs into $venv (Python $version); RDMA devices here: $devices"
