# What continuous integration runs is what you run: `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
PICTURES ?= 1
MACHINES ?=
TORCHES ?= 2.11.0 2.13.0 2.15.0
VERSIONED ?= runtime capture planner export parallel integrations

.PHONY: setup demo test test-slow test-gpu test-machines test-versions gpu gpu-simulated check docs format bench pictures clean browser

setup: $(STAMP)

# torch goes first and by its exact version: a range may resolve to a build with several GB of GPU libraries.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[torch,hf,dev]"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[integrations]" || echo "without other people's trainers: their tests are skipped"
	touch $@

demo: setup
	$(BIN)/jettison demo

# Tests of pages need a Chromium: the one that is there, or Debian's where apt may be used. JETTISON_WITHOUT_BROWSER=1 leaves them out.
browser: setup
	$(BIN)/python tests/support/chromium.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Pages of docs/ as a site; what does not lead anywhere is an error. Where there is a Chromium its pictures are drawn anew, and
# else are those of docs/images; PICTURES=0 leaves them, as `make test` does.
docs: setup
	test -f $(VENV)/.docs || $(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	test "$(PICTURES)" = 0 || $(BIN)/python -m benchmarks.pictures docs/_build/html/_images --quick || echo "pictures of the site are those of docs/images"

# What comes before the tests takes one core at a time each.
test: setup
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target PICTURES=0 check browser docs
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu"

test-slow: setup browser
	$(BIN)/python -m pytest -m "slow and not gpu"

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

# The tests as on other machines: kernels of older processors, one core, a busy machine. Hours; MACHINES="avx2 busy" runs some.
test-machines: setup browser
	cd tests && ../$(BIN)/python -m support.machines $(MACHINES) -- -n $(WORKERS) -m "not slow and not gpu"

# What hangs on torch's and transformers' insides, on the oldest torch that is supported, the one of constraints.txt and the
# newest, each in an environment of its own (a CUDA build of several GB) with the newest transformers. Hours.
test-versions: $(TORCHES:%=test-torch-%)

test-torch-%: .venv-torch-%/.installed
	cd $(or $(TMPDIR),/tmp) && $(CURDIR)/.venv-torch-$*/bin/jettison demo
	.venv-torch-$*/bin/python -m pytest -n $(WORKERS) -m "not slow and not gpu" $(VERSIONED:%=tests/%)

.PRECIOUS: .venv-torch-%/.installed
.venv-torch-%/.installed: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "torch==$*"
	$(@D)/bin/python -m pip install --quiet -e ".[torch,hf,dev]" "torch==$*"
	$(@D)/bin/python -m pip install --quiet -e ".[integrations]" "torch==$*" || echo "without other people's trainers: their tests are skipped"
	touch $@

# Without setup: on the machine that has the device there may be torch and no way to install anything.
gpu:
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu.kit $(GPU)

# The kit on a CUDA device made of host memory and threads: its logic, bits and bytes, no times and no graphs. Needs g++.
SIMULATED ?= gradients losses offload predictions
gpu-simulated: setup
	cd tests && ../$(BIN)/python -m support.simulated_cuda benchmarks.gpu.kit --tiny --out ../out/gpu-simulated --sections $(SIMULATED)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks.peers

# Every picture in docs/images, as commands and pages draw it now, to be committed.
pictures: setup browser
	$(BIN)/python -m benchmarks.pictures

clean:
	rm -rf $(VENV) .venv-torch-* build dist docs/_build docs/generated .pytest_cache .ruff_cache .mypy_cache .hypothesis out plan.json proof.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
