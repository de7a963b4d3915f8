#!/usr/bin/env bash
# The connectors of SGLang or LMCache against the released wheel's own classes, on a real
# pool: sglang or lmcache. Unpacks the wheel in build/connectors/NAME, because it can't be
# installed without CUDA's packages, and writes docs/connect/results/NAME.json. More
# arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."

name=${1:?usage: ops/connectors/test.sh sglang|lmcache [pytest arguments]}
shift
# what the wheel imports on the way to the classes that are used
case "$name" in
  sglang)
    wheel=sglang==0.5.23 beside=()
    tests=(tests/integration/test_connect_sglang.py tests/integration/test_router_sglang_wheel.py)
    ;;
  lmcache)
    wheel=lmcache==0.5.6
    beside=(-r ops/connectors/lmcache.txt)
    tests=(tests/integration/test_connect_lmcache.py)
    ;;
  *) echo "no connector $name: sglang or lmcache" >&2; exit 2 ;;
esac

there=$PWD/build/connectors/$name
if [ ! -e "$there/.done" ]; then
  rm -rf "$there"
  mkdir -p "$there/beside"
  .venv/bin/python -m pip download -q --no-deps -d "$there" "$wheel"
  .venv/bin/python -m zipfile -e "$there"/*.whl "$there/wheel"
  if [ "${#beside[@]}" -gt 0 ]; then
    .venv/bin/python -m pip install -q --no-deps --target "$there/beside" "${beside[@]}"
  fi
  touch "$there/.done"
fi

junit=$(mktemp)
trap 'rm -f "$junit"' EXIT
started=$SECONDS
commit=$(git rev-parse HEAD)
[ -z "$(git status --porcelain -- libs services "${tests[@]}")" ] || commit="$commit with changes"
case "$name" in
  sglang) export KVTIDE_TEST_SGLANG=$there/wheel ;;
  lmcache) export KVTIDE_TEST_LMCACHE=$there/wheel:$there/beside ;;
esac
.venv/bin/python -m pytest -q -m "full or not full" --junitxml="$junit" "${tests[@]}" "$@"
.venv/bin/python - "$junit" "$commit" "$((SECONDS - started))" "$wheel" \
  >"docs/connect/results/$name.json" <<'E2'
import json, os, platform, sys
from xml.etree import ElementTree
suite = next(ElementTree.parse(sys.argv[1]).getroot().iter("testsuite"))
count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
print(json.dumps({"commit": sys.argv[2], "wheel": sys.argv[4], "seconds": int(sys.argv[3]),
    "cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
    "passed": passed, **count}, indent=1))
E2
cat "docs/connect/results/$name.json"
