# kvtide: `make up` serves a model, `make test` runs every test; both set themselves up.
#
#   make up ARGS="--port 9000 --decode 2"    arguments for `kvtide up` (see `kvtide up --help`)
#   make test ARGS="-k tidy -x"              arguments for pytest
#   TEST_JOBS=0                              tests in one process, for a debugger
#   PYTHON=python3.12                        which Python makes .venv
#   TORCH_INDEX_URL=...                      index to take torch from (a CPU or CUDA build)

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
ARGS ?=
IMAGE ?= kvtide:local

# threads that wait must not spin: on few cores spinning costs ten times
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

TEST_THREADS ?= 1
# many tests wait more than they compute: one process more than cores, within reason
TEST_JOBS ?= $(shell echo $$(( $$(nproc) < 7 ? $$(nproc) + 1 : 8 )))
SECONDS ?= 600

.PHONY: help setup up test test-full check format bench sim sim-soak chaos soak fuzz audit secrets docs clean distclean test-compose test-rdma test-vllm test-nixl test-mooncake test-sglang test-lmcache rdma

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## make .venv from the pinned versions (the other targets do it by themselves)
	@PYTHON="$(PYTHON)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" ops/setup.sh

up: setup ## serve the demo model: every role, one command
	@exec $(BIN)/kvtide up $(ARGS)

test: setup ## all tests, with a real NATS, PostgreSQL, model and processes
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(TEST_THREADS)} HF_HUB_OFFLINE=1 \
	  $(BIN)/python -m pytest -p tests.side_by_side -n $(TEST_JOBS) --dist loadfile $(ARGS)

# its longest test alone takes longer than what ends a run that hangs
test-full: ARGS += -m "full or not full" -o faulthandler_timeout=3600
test-full: test ## all tests and the long rounds of them (an hour or more)

check: setup ## ruff, pyright strict, import-linter and the tidy tests
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/unit/test_tidy_*.py

format: setup ## let ruff put the code into shape
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: setup ## time to first token, cold and from the cache, of a running `make up`
	@$(BIN)/kvtide bench $(ARGS)

sim: setup ## the production machines in virtual time, under faults
	@$(BIN)/python -m pytest tests/sim $(ARGS)

sim-soak: setup ## SECONDS=600: random seeds; a failing one is printed and replays exactly
	@$(BIN)/python -m kvtide.sim --soak $(SECONDS)

chaos: setup ## root: each fault on real processes under load, and the table of what was seen
	@CHAOS_RESULTS=$(CURDIR)/ops/bench/results/chaos.jsonl HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$(TEST_THREADS) \
	  $(BIN)/python -m pytest -m full tests/chaos $(ARGS)
	@$(BIN)/python -m tests.chaos.table

soak: setup ## root: SECONDS=3600 of mixed load and random faults on the real system, with a plot
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m tests.chaos.soak \
	  --seconds $(if $(filter file,$(origin SECONDS)),3600,$(SECONDS)) $(ARGS)

fuzz: setup ## SECONDS=600: parsers of bytes from outside, guided by what they do (atheris)
	@$(BIN)/python -c "import atheris" 2>/dev/null || $(BIN)/python -m pip install -q --no-deps atheris==2.3.0
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

audit: setup ## known vulnerabilities of the pinned dependencies (asks the network)
	@ops/audit.sh dependencies

secrets: ## secrets in what git tracks
	@ops/audit.sh secrets

test-compose: ## root: build the image, bring docker-compose.yml up, check its answers
	@ops/docker/test-compose.sh $(ARGS)

test-rdma: setup ## the RDMA tests: here if there are devices, else (root) in a virtual machine
	@ops/rdma/test.sh $(ARGS)

test-vllm: setup ## two vLLM engines on one pool, on the CPU; makes vLLM's environment (3 GB)
	@ops/vllm/test.sh $(ARGS)

test-nixl: setup ## the transfer contract over NIXL (UCX); makes an environment for it
	@ops/engines/test.sh nixl $(ARGS)

test-mooncake: setup ## the same over Mooncake's engine (TCP)
	@ops/engines/test.sh mooncake $(ARGS)

test-sglang: setup ## SGLang's connector against its released wheel's own classes
	@ops/connectors/test.sh sglang $(ARGS)

test-lmcache: setup ## LMCache's, the same
	@ops/connectors/test.sh lmcache $(ARGS)

rdma: setup ## link the system's pyverbs into .venv
	@ops/rdma/link-pyverbs.sh .venv

docs: setup ## write docs/wire.md anew from the messages
	@$(BIN)/python -m kvtide.bus.wiredoc >docs/wire.md.new && mv docs/wire.md.new docs/wire.md

clean: ## caches and reports; keeps .venv
	@rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage* htmlcov dist
	@find libs services tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## and .venv
	@rm -rf .venv
