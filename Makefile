# The whole interface to the project; the logic lives in the scripts it calls.
.DEFAULT_GOAL := help
PY := .venv/bin/python
PYTEST := $(PY) -m pytest -q
export PYTHONUNBUFFERED := 1

.PHONY: help setup demo demo-down cluster-up cluster-down lint check-gen gen lock bench \
	test test-unit unit-decides unit-waits test-worker test-kernels test-model test-control-plane control-plane-operator \
	control-plane-rest test-e2e test-long test-gpu

help: ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 28

setup: ## Install the locked packages into .venv
	@tools/setup.sh

demo: setup ## Bring a cluster up, install the chart, apply the example, ask the model a question
	@$(PY) tools/demo.py up

demo-down: setup ## Remove what the demo made, the local cluster included
	@$(PY) tools/demo.py down

cluster-up: setup ## Start the local cluster alone
	@$(PY) tools/cluster up

cluster-down: setup ## Stop the local cluster
	@$(PY) tools/cluster down

test: setup lint check-gen test-unit test-worker test-kernels test-model test-control-plane test-e2e ## All that needs no GPU, but for test-long; CI runs this

# Two processes side by side: one of them mostly waits, for leases that run out and silent workers.
test-unit: setup ## Tests of pure logic: under a minute
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target unit-decides unit-waits

UNIT := -m "not (gpu or control_plane or e2e or model or long)"
WAITS := $(addprefix tests/operator/test_, lease.py main.py probe.py tenancy_faults.py workqueue.py)

unit-decides:
	$(PYTEST) --ignore=tests/kernels --ignore=tests/worker $(WAITS:%=--ignore=%) $(UNIT)

unit-waits:
	$(PYTEST) $(WAITS) $(UNIT)

test-worker: setup ## The runtime on small random models, and its server
	$(PYTEST) tests/worker -m "not (gpu or model or long)"

# A process of their own: Triton reads TRITON_INTERPRET when it is first imported.
test-kernels: setup ## The kernels against their references under the interpreter, and compiled for sm_90
	$(PYTEST) tests/kernels -m "not (gpu or long)"

test-model: setup ## The trained model against transformers, and behind the API
	$(PYTEST) --ignore=tests/kernels -m "model and not (gpu or long)"

# Two processes side by side, each with API servers of its own: much of the time is waiting.
test-control-plane: setup ## Against a real API server
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target control-plane-operator control-plane-rest

CONTROL_PLANE := -m "control_plane and not (e2e or long)"
SIMULATED := $(addprefix tests/operator/, test_degrade_real.py test_lost_zone.py test_tenancy.py)

control-plane-operator:
	$(PYTEST) tests/operator $(SIMULATED:%=--ignore=%) $(CONTROL_PLANE)

control-plane-rest:
	$(PYTEST) $(SIMULATED) $(CONTROL_PLANE)
	$(PYTEST) --ignore=tests/kernels --ignore=tests/operator $(CONTROL_PLANE)

test-e2e: setup ## On the whole local cluster: install, serve, repair, upgrade, uninstall
	$(PYTEST) tests/e2e --timeout=900 -m "not long"

test-long: setup ## Full sizes, long loads and faults at random: the best part of an hour
	$(PYTEST) --ignore=tests/kernels -m "hypothesis and not (gpu or control_plane or e2e or model or long)" \
		--hypothesis-profile=exploring
	$(PYTEST) --ignore=tests/kernels -m "long and not gpu" --timeout=1800

test-gpu: ## The kernels and the engine on an NVIDIA GPU
	$(PYTEST) tests/kernels -m gpu
	$(PYTEST) tests/worker/test_gpu.py -m gpu

lint: setup ## Formatting, style, types and layers
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

check-gen: setup ## Generated files equal what their sources give
	$(PY) tools/generate.py --check

gen: setup ## Write the generated files
	$(PY) tools/generate.py

lock: setup ## Resolve requirements/*.in again
	tools/lock.sh

bench: setup ## The benchmarks that need no GPU
	$(PY) benchmarks/engine.py --cpu
	$(PY) benchmarks/operator.py
	$(PY) benchmarks/quality.py
