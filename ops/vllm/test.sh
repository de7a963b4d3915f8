#!/usr/bin/env bash
# vLLM engines on one pool, and as workers, with the demo model on the CPU: makes vLLM's environment
# (build/vllm, 3 GB, some minutes; VLLM_PYTHON names one that is there), runs tests/vllm
# in .venv and writes docs/connect/results/vllm.json. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=build/vllm
if [ -z "${VLLM_PYTHON:-}" ]; then
  if [ ! -e "$venv/.done" ]; then
    rm -rf "$venv"
    PYTHON=.venv/bin/python ops/vllm/environment.sh "$venv"
    touch "$venv/.done"
  fi
  VLLM_PYTHON=$PWD/$venv/bin/python
fi

result=$(mktemp) junit=$(mktemp)
trap 'rm -f "$result" "$junit"' EXIT
started=$SECONDS
KVTIDE_TEST_VLLM_PYTHON=$VLLM_PYTHON KVTIDE_TEST_VLLM_RESULT=$result \
  .venv/bin/python -m pytest -m full --junitxml="$junit" tests/vllm "$@"
commit=$(git rev-parse HEAD)
[ -z "$(git status --porcelain -- libs services tests/vllm)" ] || commit="$commit with changes"
.venv/bin/python - "$result" "$commit" "$((SECONDS - started))" "$junit" \
  >docs/connect/results/vllm.json <<'E2'
import json, os, platform, sys
from xml.etree import ElementTree
text = open(sys.argv[1]).read()
seen = json.loads(text) if text else {}
cases = [one for one in ElementTree.parse(sys.argv[4]).iter("testcase") if not len(one)]
seen["passed"] = {one.get("name"): round(float(one.get("time"))) for one in cases}
head = {"commit": sys.argv[2], "seconds": int(sys.argv[3]), "cpus": os.cpu_count(),
        "machine": platform.machine(), "python": platform.python_version()}
print(json.dumps({**head, **seen}, indent=1))
E2
cat docs/connect/results/vllm.json
