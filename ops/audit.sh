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
  "$tools/bin/pip" install --quiet "$2" || return 1
}

case $what in
dependencies)
  if fetch pip-audit 'pip-audit==2.10.1' &&
    "$tools/bin/pip-audit" --requirement constraints.txt --no-deps --disable-pip \
      --strict --progress-spinner off; then
    exit 0
  fi
  echo "audit: the lines above name what is vulnerable; without them the advisory" >&2
  echo "database could not be asked. Offline, only the pins themselves are checked:" >&2
  .venv/bin/python -m pip check >&2 || true
  exit 1
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
