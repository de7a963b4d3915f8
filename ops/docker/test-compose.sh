#!/usr/bin/env bash
# Brings docker-compose.yml really up, with two workers of each kind, asks it things over
# HTTP, and takes it down again. Run as `make test-compose`, as root or as somebody who
# may use docker.
#
# Needs: docker with the compose and buildx plug-ins (Debian: apt-get install docker.io
# docker-compose docker-buildx; Docker's own packages: docker-ce docker-compose-plugin
# docker-buildx-plugin), 8 GB of disk, 6 GB of memory, and either a registry or these
# images already there: python:3.11-slim-bookworm, nats:2, postgres:15. Where no engine
# runs, `dockerd` is started for the time of the test, which takes root.
#
#   TORCH_INDEX_URL    index to take torch from; unset: as this machine's pip would
#   KVTIDE_TEST_KEEP   1: leave it running, and say how to take it down
set -euo pipefail
cd "$(dirname "$0")/../.."

PROJECT=kvtide-test-$$
IMAGES=(python:3.11-slim-bookworm nats:2 postgres:15)
dockerd_pid=
work=$(mktemp -d)

say() { printf 'test-compose: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

compose() { docker compose --project-name "$PROJECT" "$@"; }

# invoked by the trap
# shellcheck disable=SC2317
clean_up() {
  local code=$?
  trap - EXIT INT TERM
  if [ "$code" -ne 0 ] && [ -n "${KVTIDE_PORT:-}" ]; then
    say "failed; the last lines of each service:"
    compose logs --no-color --tail 40 >&2 || true
  fi
  if [ "${KVTIDE_TEST_KEEP:-}" = 1 ]; then
    say "left running: docker compose -p $PROJECT down -v"
  else
    compose down --volumes --timeout 10 >/dev/null 2>&1 || true
    if [ -n "$dockerd_pid" ]; then kill "$dockerd_pid" 2>/dev/null || true; wait "$dockerd_pid" || true; fi
  fi
  rm -rf "$work"
  exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

command -v docker >/dev/null || die "there is no docker client: apt-get install docker.io docker-compose docker-buildx"
docker compose version >/dev/null 2>&1 || die "docker has no compose plug-in: apt-get install docker-compose (or docker-compose-plugin)"
docker buildx version >/dev/null 2>&1 || die "docker has no buildx plug-in: apt-get install docker-buildx (or docker-buildx-plugin)"

if ! docker info >/dev/null 2>&1; then
  command -v dockerd >/dev/null || die "no docker engine runs and there is no dockerd to start: apt-get install docker.io"
  [ "$(id -u)" = 0 ] || die "no docker engine runs; starting one takes root"
  say "starting a docker engine"
  dockerd ${DOCKER_DATA:+--data-root "$DOCKER_DATA"} >"$work/dockerd.log" 2>&1 &
  dockerd_pid=$!
  for _ in $(seq 150); do docker info >/dev/null 2>&1 && break; sleep 0.2; done
  docker info >/dev/null 2>&1 || { tail -n 20 "$work/dockerd.log" >&2; die "dockerd did not start"; }
fi

for image in "${IMAGES[@]}"; do
  docker image inspect "$image" >/dev/null 2>&1 || { say "pulling $image"; docker pull -q "$image" >/dev/null; } ||
    die "the image $image is not here and can't be pulled: docker load it, or build one of that name"
done

# the image gets the build of torch that this machine's pip is set up for
if [ -z "${TORCH_INDEX_URL:-}" ] && ! ls ops/docker/wheels/torch-*.whl >/dev/null 2>&1; then
  say "fetching torch for the image"
  python=$( [ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
  "$python" -m pip download -q --no-deps --only-binary :all: --python-version 3.11 \
    -d ops/docker/wheels "$(grep '^torch==' constraints.txt)"
fi

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export KVTIDE_PORT=$port KVTIDE_BIND=127.0.0.1 KVTIDE_THREADS=${KVTIDE_THREADS:-1} KVTIDE_DRAM=${KVTIDE_DRAM:-268435456} KVTIDE_SHM=${KVTIDE_SHM:-512m}

say "building"
compose build --quiet
say "starting: two workers of each kind"
compose up --detach --wait --wait-timeout 600 --scale prefill=2 --scale decode=2
say "asking"
python3 ops/docker/ask.py "http://127.0.0.1:$port"
compose exec -T conductor kvtide status --json >"$work/status.json"
python3 - "$work/status.json" <<'PYTHON'
import collections, json, sys
nodes = json.load(open(sys.argv[1]))["nodes"]
roles = collections.Counter(role for node in nodes for role in node["beat"]["roles"])
hosts = {node["beat"]["host"] for node in nodes if set(node["beat"]["roles"]) & {"prefill", "decode", "store"}}
assert roles == {"gateway": 1, "conductor": 1, "store": 1, "prefill": 2, "decode": 2}, roles
assert len(hosts) == 1, f"workers and store do not share memory: {hosts}"
PYTHON
say "a worker is killed; the rest answers"
victim=$(compose ps --quiet decode | head -n 1)
docker kill "$victim" >/dev/null
python3 ops/docker/ask.py "http://127.0.0.1:$port"
say "passed"
