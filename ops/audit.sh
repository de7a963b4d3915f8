#!/usr/bin/env bash
# ops/audit.sh dependencies|secrets: known vulnerabilities of what is pinned; secrets in
# what git tracks. The tools live in .venv-audit, apart from what they judge.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-}
tools=.venv-audit

fetch() {
  [ -x "$tools/bin/$1" ] && return
  [ -d "$tools" ] || "${PYTHON:-python3}" -m venv "$tools"
  timeout 120 "$tools/bin/pip" install --quiet "$2" || return 1
}

case $what in
dependencies)
  # ends with 1 for a known vulnerability, with 3 where the advisories of a pin can't be asked
  report=$(mktemp)
  trap 'rm -f "$report"' EXIT
  if fetch pip-audit 'pip-audit==2.10.1'; then
    timeout 300 "$tools/bin/pip-audit" --requirement constraints.txt --no-deps --disable-pip \
      --progress-spinner off --format json --output "$report" >&2 || true
  fi
  "${PYTHON:-python3}" - "$report" <<'EOF'
import json
import sys
from pathlib import Path

text = Path(sys.argv[1]).read_text(encoding="utf-8")
pins = json.loads(text)["dependencies"] if text else []
known = [pin for pin in pins if "skip_reason" not in pin]
bad = [(pin, each) for pin in known for each in pin["vulns"]]
for pin, each in bad:
    mended = ", ".join(each["fix_versions"]) or "nothing yet"
    print(f"audit: {pin['name']} {pin['version']}: {each['id']}, mended in {mended}")
print(f"audit: {len(known)} of {len(pins)} pins looked up, {len(bad)} known vulnerabilities")
if not known:
    print("audit: the advisory database could not be asked (it needs the network)")
elif len(known) < len(pins):
    for pin in pins:
        if "skip_reason" in pin:
            print(f"audit: {pin['name']} was not looked up: {pin['skip_reason']}")
sys.exit(1 if bad else 0 if known and len(known) == len(pins) else 3)
EOF
  ;;
secrets)
  # keys of known shapes, and files that hold nothing else; needs no network
  shapes='-----BEGIN [A-Z ]*PRIVATE KEY-----|\bS[UAONCX][A-Z2-7]{56}\b|\bAKIA[0-9A-Z]{16}\b'
  shapes+='|\bgh[pousr]_[A-Za-z0-9]{36}\b|\bgithub_pat_[A-Za-z0-9_]{40}|\bxox[abp]-[A-Za-z0-9-]{20}'
  shapes+='|\bAIza[0-9A-Za-z_-]{35}|\bsk-(ant-|proj-)?[A-Za-z0-9_-]{32}|\bhf_[A-Za-z0-9]{34}\b'
  shapes+='|\bkvt_[0-9a-f]{12}_[A-Za-z0-9_-]{43}|\beyJ[A-Za-z0-9_-]{20,}\.eyJ[A-Za-z0-9_-]{20}'
  shapes+='|://[^/@[:space:]:"{$]+:[^/@[:space:]"{$]{12,}@'
  found=0
  git grep -nIPe "$shapes" -- . ':!ops/audit.sh' || found=$?
  if [ "$found" -gt 1 ]; then
    echo "secrets: git could not look (is this a repository?)" >&2
    exit 1
  fi
  if [ "$found" -eq 0 ]; then
    echo "secrets: the lines above look like keys" >&2
    exit 1
  fi
  if git ls-files | grep -E '\.(seed|key|p12|pfx|kdbx)$|(^|/)(secret|\.env|id_(rsa|ed25519))$'; then
    echo "secrets: the files above are named as files of keys are" >&2
    exit 1
  fi
  echo "secrets: nothing that looks like a key in what git tracks"
  ;;
*)
  echo "usage: ops/audit.sh dependencies|secrets" >&2
  exit 2
  ;;
esac
