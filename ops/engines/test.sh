#!/usr/bin/env bash
# The transfer library's contract suite over a transfer engine of others, nixl or mooncake, and
# a whole system on two pretended hosts over it. Makes an environment for the first
# (build/engines/NAME; ENGINE_PYTHON names one that is there), and writes docs/connect/results/NAME.json. More arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."

name=${1:?usage: ops/engines/test.sh nixl|mooncake [pytest arguments]}
shift
case "$name" in
  # without its dependency on torch, which a transfer does not need
  nixl) wheel=nixl-cu12==1.5.1 ;;
  mooncake) wheel=mooncake-transfer-engine-non-cuda==0.3.13.post1 ;;
  *) echo "no engine $name: nixl or mooncake" >&2; exit 2 ;;
esac

if [ -z "${ENGINE_PYTHON:-}" ]; then
  venv=build/engines/$name
  if [ ! -e "$venv/.done" ]; then
    rm -rf "$venv"
    "${PYTHON:-.venv/bin/python}" -m venv "$venv"
    mapfile -t light < <(grep -iE '^(numpy|msgspec|structlog|xxhash|psutil|prometheus[-_]client|pytest|pytest-timeout|anyio|hypothesis)==' constraints.txt)
    "$venv/bin/pip" install -q --no-deps "$wheel"
    "$venv/bin/pip" install -q "${light[@]}"
    touch "$venv/.done"
  fi
  ENGINE_PYTHON=$venv/bin/python
fi

# the wheel's own verbs library and the system's can't end in one process (a crash at exit);
# where there is no such device UCX needs neither
[ -n "$(ls /sys/class/infiniband 2>/dev/null)" ] || export UCX_MODULES=${UCX_MODULES:-^ib}
export NIXL_LOG_LEVEL=${NIXL_LOG_LEVEL:-FATAL}

report=$(mktemp) system=$(mktemp)
trap 'rm -f "$report" "$system"' EXIT
started=$SECONDS
commit=$(git rev-parse HEAD)
[ -z "$(git status --porcelain -- libs/transfer 'tests/contract/*transfer*')" ] || commit="$commit with changes"
PYTHONPATH=libs/transfer:libs/runtime "$ENGINE_PYTHON" -m pytest -q -p no:schemathesis \
  tests/contract/test_transfer_contract.py tests/contract/test_transfer_trust.py \
  -k "$name" --junit-xml="$report" "$@"
# a whole system, whose roles need more than a transfer does: .venv with the wheel beside it
beside=$PWD/build/engines/$name-beside
if [ ! -e "$beside/.done" ]; then
  rm -rf "$beside"
  .venv/bin/python -m pip install -q --no-deps --target "$beside" "$wheel"
  touch "$beside/.done"
fi
PYTHONPATH="$beside" KVTIDE_TEST_ENGINE=$name .venv/bin/python -m pytest -q -m full \
  tests/e2e/test_transfer_engine_serves.py --junit-xml="$system"
"$ENGINE_PYTHON" - "$report" "$system" "$commit" "$((SECONDS - started))" "$wheel" \
  >"docs/connect/results/$name.json" <<'E2'
import json, os, platform, sys
from xml.etree import ElementTree
suites = [next(ElementTree.parse(path).getroot().iter("testsuite")) for path in sys.argv[1:3]]
count = {key: sum(int(suite.get(key, 0)) for suite in suites)
         for key in ("tests", "failures", "errors", "skipped")}
passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
print(json.dumps({"commit": sys.argv[3], "wheel": sys.argv[5], "seconds": int(sys.argv[4]),
    "cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
    "passed": passed, **count}, indent=1))
E2
cat "docs/connect/results/$name.json"
