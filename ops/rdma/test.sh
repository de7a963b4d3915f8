#!/usr/bin/env bash
# Run the RDMA tests: on this machine's devices if it has some, else in a virtual
# machine with two Soft-RoCE devices (see vm.sh; needs root).
#
# usage: test.sh [--smoke] [PYTEST_ARGUMENT...]
#
# --smoke runs a few of them: for continuous integration.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
python=${BIN:-.venv/bin}/python

what="tests/contract/test_transfer_contract.py tests/contract/test_transfer_trust.py tests/integration/test_transfer_rdma.py"
if [ "${1:-}" = --smoke ]; then
    shift
    what="$what -k 'test_read_one or test_write or link_down or bad_key'"
fi
command="-m pytest -q -p no:cacheprovider -m rdma $what $*"

if "$python" -c 'import sys; from kvtide.transfer.verbs import device_names; sys.exit(not device_names())' 2>/dev/null; then
    eval "exec $python $command"
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "skipped: no RDMA device here, and the virtual machine needs root and apt" >&2
    exit 0
fi
exec "$root/ops/rdma/vm.sh" --timeout 1200 "python3 $command"
