#!/usr/bin/env bash
# Makes .venv from the pinned versions in constraints.txt, once; a second run is a no-op
# until pyproject.toml, constraints.txt, the Python or TORCH_INDEX_URL change. Safe to
# interrupt: the stamp is written last, and the next run goes on where this one stopped.
#
#   PYTHON           which Python (3.11 or later) to make the environment with
#   TORCH_INDEX_URL  index to take torch from: PyTorch's index of CPU builds (small), or
#                    the one of a CUDA version; unset: pip's own index and settings
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
LOG=$VENV/setup.log

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is not there"
    is_recent "$PYTHON" || die "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1); 3.11 or later is needed"
    return
  fi
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if is_recent "$candidate"; then PYTHON=$candidate; return; fi
  done
  die "Python 3.11 or later is needed: apt-get install python3 python3-venv (or set PYTHON)"
}

# one set-up of this folder at a time
exec 9<pyproject.toml
if command -v flock >/dev/null; then
  flock -n 9 || { say "another set-up is running here; waiting for it"; flock -w 1800 9 || die "it did not end in 30 minutes"; }
fi

find_python
wanted=$({ cat pyproject.toml constraints.txt; printf '%s\n' "$PWD" "${TORCH_INDEX_URL:-}" "$("$PYTHON" -V)"; } | sha256sum | cut -c1-32)
[ "$(cat "$VENV/.stamp" 2>/dev/null)" = "$wanted" ] && [ -x "$VENV/bin/kvtide" ] && exit 0

version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
  die "$PYTHON has no venv module: apt-get install python$version-venv (Debian, Ubuntu)"

# an environment that is broken, was moved here, or is another Python's is made anew
made_for="$PWD $version"
if [ -e "$VENV" ] && { [ "$(cat "$VENV/.made-for" 2>/dev/null)" != "$made_for" ] ||
  ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }; then
  say "removing $VENV, which is not usable here"
  rm -rf "$VENV"
fi
if [ ! -e "$VENV" ]; then
  say "1/4 making $VENV with $("$PYTHON" -V)"
  "$PYTHON" -m venv "$VENV"
  printf '%s' "$made_for" >"$VENV/.made-for"
fi
rm -f "$VENV/.stamp"
: >"$LOG"

# pip's whole output goes to the log; what it downloads and installs is shown
pip_install() {
  "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1 |
    tee -a "$LOG" |
    awk '/^ *Downloading [^ ]+ \(/ { sub(/^ */, ""); print "  " $0; fflush() }
         /^Installing collected/ { print "  installing"; fflush() }' >&2 ||
    { tail -n 15 "$LOG" >&2; die "pip failed; its output is in $LOG; run again to go on"; }
}

say "2/4 pip"
pip_install -c constraints.txt pip

torch=$(grep '^torch==' constraints.txt)
if [ -n "${TORCH_INDEX_URL:-}" ]; then
  say "3/4 $torch from TORCH_INDEX_URL (some 200 MB for the CPU, gigabytes for CUDA)"
  pip_install --no-deps --index-url "$TORCH_INDEX_URL" "$torch"
else
  say "3/4 $torch (TORCH_INDEX_URL chooses a CPU or a CUDA build)"
  pip_install -c constraints.txt "$torch"
fi

say "4/4 kvtide and its tools"
pip_install -c constraints.txt --build-constraint constraints.txt --group dev \
  -e '.[gateway,catalog,worker,local,otel,router]'

printf '%s' "$wanted" >"$VENV/.stamp"
say "done"
