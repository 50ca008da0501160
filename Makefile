# Everything a person runs. `make setup` is done by itself where it is needed; each target works in
# a fresh clone for a user without special rights.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Interpreter for the environment; empty = the newest fitting one found.
PYTHON ?=
# A built TensorRT-LLM engine, for `test-trtllm`, which runs in the Python that has TensorRT-LLM.
ENGINE ?= $(TOKENFLOW_TRTLLM_ENGINE)
# Flags for `serve`, `demo` and `burst-pa`, e.g. make demo ARGS="--runs 5"
ARGS ?=
# Where pip may look besides its own configuration, e.g. PIP_FLAGS="--find-links wheels/"
PIP_FLAGS ?=

# The laboratory; jobs: processes that simulate side by side.
RESULTS := perf/results
JOBS ?= 1
# Seeds of `make rules`, as perf.rules takes them
SEEDS ?= 1
TIERED := tokenflow-tiering,fcfs-max-utilization-host,tokenflow-paper-tiering,tokenflow-guide-tiering
SIMULATE := OMP_NUM_THREADS=1 $(BIN)/python -m perf.simulate --jobs $(JOBS)
SWEEP := OMP_NUM_THREADS=1 $(BIN)/python -m perf.sweep --jobs $(JOBS) --seeds 1-3 --setup

# Test workers share the cores: one thread each, and waiting threads sleep instead of spinning.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

.PHONY: help setup doctor model serve demo demo-kv kv-cycles burst-pa test test-trtllm soak check format bench kv-tiers lab sweep rules docs clean distclean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## environment in .venv, and a check of what pip cannot bring

$(READY): pyproject.toml constraints.txt
	@python=$$(.ci/find-python "$(PYTHON)") && \
	  { test -x $(BIN)/python || "$$python" -m venv $(VENV); }
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt \
	  -e '.[engine,server,client,perf,dev]'
	$(BIN)/tokenflow doctor
	@touch $@

doctor: $(READY)  ## what this machine lacks, with the line to run
	$(BIN)/tokenflow doctor

model: $(READY)  ## fetch and convert SmolLM2-135M-Instruct
	$(BIN)/tokenflow model fetch

serve: model  ## the real server with SmolLM2; prints what to try
	$(BIN)/tokenflow serve $(ARGS)

demo: model  ## one burst, first-come-first-served against tokenflow; table and picture
	$(BIN)/tokenflow demo $(ARGS)

demo-kv: model  ## a burst that finds the KV pool full, with host memory behind it; table
	$(BIN)/python -m perf.demo_kv $(ARGS)

kv-cycles: $(READY)  ## 2,000 pauses and resumes on a host tier for ten; hit share and memory
	$(BIN)/python -m perf.kv_cycles $(ARGS)

burst-pa: model  ## the same burst driven by perf_analyzer
	$(BIN)/tokenflow burst-pa $(ARGS)

check: $(READY)  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: check model  ## every check and test, the real server included
	@status=0; set -x; \
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile -m "not e2e" || status=1; \
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile -m "e2e and not alone" || status=1; \
	$(TEST_ENV) $(BIN)/python -m pytest -m "e2e and alone" || status=1; \
	exit $$status

test-trtllm:  ## on a machine with TensorRT-LLM: every section of its suite, ENGINE=folder
	@test -n "$(ENGINE)" || { echo "name a built engine: make test-trtllm ENGINE=folder" >&2; exit 2; }
	TOKENFLOW_TRTLLM_ENGINE="$(abspath $(ENGINE))" $(or $(PYTHON),python3) -m pytest \
	  -m trtllm -p no:cacheprovider tests/hardware $(ARGS)

soak: model  ## long interleavings, killed engines and 20,000 requests; about 20 minutes
	TOKENFLOW_SOAK=10 $(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile --timeout 3600 \
	  tests/core/test_coordinator_machine.py tests/scheduler/test_races.py
	$(BIN)/python -m perf.kills
	$(BIN)/python -m perf.slow_readers
	$(BIN)/python -m perf.soak

format: $(READY)  ## rewrite the sources as `check` wants them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: model  ## cost of a plan, of the process channel and of a decode step
	$(BIN)/python -m perf.plan_cost
	$(BIN)/python -m perf.channel
	$(BIN)/python -m perf.engine_step

kv-tiers: model  ## what the two tiers of KV cost and what each part is worth; about 6 minutes
	$(BIN)/python -m perf.kv_tiers $(ARGS)

lab: $(READY)  ## every policy on the paper's set-ups, in virtual time; tables, pictures, sweeps
	$(SIMULATE) --all --policies headline,$(TIERED),disaggregated \
	  --output $(RESULTS)/simulate.json --figures $(RESULTS)
	for rate in 6 20; do for host in 0 32 128; do \
	  test $$rate-$$host = 6-128 || $(SIMULATE) --all --rate $$rate --host-gb $$host \
	    --policies fcfs-reserve,fcfs-max-utilization,sglang-like,tokenflow,tokenflow-tiering \
	    --output $(RESULTS)/simulate_$${rate}_tok_$${host}_gb.json > /dev/null || exit 1; \
	done; done
	$(SIMULATE) --setup h200-burst-400 --policies headline,$(TIERED) \
	  --output $(RESULTS)/simulate_burst_400.json --figures $(RESULTS)
	for rate in 6 20; do $(SIMULATE) --setup open-ended,h200-open-ended --rate $$rate \
	  --policies fcfs-reserve,fcfs-max-utilization,sglang-like,tokenflow,tokenflow-tiering \
	  --output $(RESULTS)/simulate_open_ended_$${rate}_tok.json > /dev/null || exit 1; \
	done
	$(SIMULATE) --setup 4090-b --policies ablation \
	  --output $(RESULTS)/ablation.json --figures $(RESULTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m perf.assumptions --jobs $(JOBS)
	$(MAKE) sweep

sweep: $(READY)  ## parameters of the scheduler over seeds, with intervals; about twenty minutes with JOBS=2
	$(SWEEP) 4090-b,4090-c --param conservativeness=1,2,5,20
	$(SWEEP) 4090-b,4090-c --param plan_interval_s=0.02,0.1,0.5,1
	$(SWEEP) 4090-b,4090-c --param min_quantum_s=0.25,0.5,2,4
	$(SWEEP) 4090-b,4090-c --param load_limit=0.6,0.75,1
	$(SWEEP) 4090-b,4090-c --param recompute_share=0,0.3,0.6
	$(SWEEP) 4090-a,h200-c --param tail_share=0.3,0.7,0.9
	$(SWEEP) open-ended,h200-open-ended --rate 20 --name open_ended \
	  --param learn_output_lengths=false --param load_by_expectation=true

rules: $(READY)  ## what each rule of the scheduler is worth, SEEDS=1-3 for intervals; about forty minutes with JOBS=2
	OMP_NUM_THREADS=1 $(BIN)/python -m perf.rules --jobs $(JOBS) --seeds $(SEEDS)

docs: $(READY)  ## rewrite the generated tables of README and docs
	$(BIN)/python -m perf.report --update

clean:  ## caches and build output; keeps .venv, the model and the results
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean  ## also .venv and downloaded tools
	rm -rf $(VENV) .cache
