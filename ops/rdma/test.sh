#!/usr/bin/env bash
# Run the RDMA tests: on this machine's devices if it has some, else in a virtual
# machine with two Soft-RoCE devices (see vm.sh; needs root).
#
# usage: test.sh [--smoke] [PYTEST_ARGUMENT...]
#
# --smoke runs a few of them, for continuous integration: where the virtual machine
# cannot be made it says so and succeeds; where it can, a test that fails is a failure.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
python=${BIN:-.venv/bin}/python

skip() { echo "RDMA tests skipped: $*" >&2; exit 0; }

smoke= limit=1200
what="tests/contract/test_transfer_contract.py tests/contract/test_transfer_trust.py tests/integration/test_transfer_rdma.py"
if [ "${1:-}" = --smoke ]; then
    shift
    smoke=1 limit=400
    # emulated, each module that is imported costs seconds
    what="--assert=plain tests/integration/test_transfer_rdma.py -k 'link_down or bad_key or share_the_work or credits'"
fi
# the arguments as they were given, for a shell that reads them again
extra=
[ $# -eq 0 ] || extra=$(printf ' %q' "$@")
command="-m pytest -q -p no:cacheprovider -m rdma $what$extra"

if "$python" -c 'import sys; from kvtide.transfer.verbs import device_names; sys.exit(not device_names())' 2>/dev/null; then
    eval "exec $python $command"
fi
why="no RDMA device here, and a virtual machine with some needs"
[ "$(id -u)" = 0 ] || skip "$why root"
command -v apt-get >/dev/null || skip "$why apt-get, to get qemu and a kernel"
[ "$(uname -m)" = x86_64 ] || skip "$why x86-64"
if [ -n "$smoke" ] && ! "$root/ops/rdma/vm.sh" --prepare >/dev/null; then
    skip "the virtual machine could not be made, for the reason above"
fi
exec "$root/ops/rdma/vm.sh" --timeout "$limit" "python3 $command"
