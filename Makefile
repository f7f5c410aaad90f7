# `make` alone lists the targets. Everything runs in .venv, which needs only Python >= 3.10 with
# venv. Override PYTHON to choose the interpreter it is made with.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SOURCES := bnncc schedules targets topi_binary tune_logs
# Which results `make bench` renews: all, or some by name (benchmarks/tables.py).
BENCH ?=
PYTEST_ARGS ?=
# How many tests run at once: a number, 0 for none beside pytest's own process, or auto.
JOBS ?= auto
# NumPy's own threads would wait for work in busy loops on cores that the other workers need.
PYTEST := OPENBLAS_NUM_THREADS=1 $(PY) -m pytest --numprocesses $(JOBS) --maxprocesses 8 --dist loadfile $(PYTEST_ARGS)

# Thread counts are part of what is measured and tested, so none is inherited.
unexport TVM_NUM_THREADS
# Tests start hundreds of processes; without byte code, each of them compiles bnncc for a second.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-quick test-all test-cuda test-torch lint format typecheck check peers bench site dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Remade when pyproject.toml changes. An existing .venv is kept; a linker from pip is
# added where the machine has none (bnncc/codegen/link.py knows which it can use).
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: $(PYTHON) is older than 3.10; set PYTHON=/path/to/python3.10 or newer" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --editable '.[test]'
	@command -v cc >/dev/null || command -v ld.lld >/dev/null \
	  || $(PY) -m pip install --quiet --editable '.[zig]'
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(PY) -m pip install --quiet --editable '.[lint]'
	@touch $@

install: $(VENV)/.installed ## create .venv with bnncc and what its tests need

demo: $(VENV)/.installed ## compile and run the digits network beside ONNX Runtime
	$(PY) examples/digits/demo.py

test: $(VENV)/.installed ## run the tests, except the slow ones
	$(PY) -m pytest --doctest-modules --quiet bnncc
	$(PYTEST)

# One of each kind, for the inner loop: passes, definitions of what is right, kernels, command line.
QUICK := before_and_after cli evaluate evaluator frontend layering merge passes pipeline quantizers \
  registry relax_operators simplify ties tiny weight_order
test-quick: $(VENV)/.installed ## run a quick selection of tests, in less than a minute
	$(PYTEST) $(foreach name,$(QUICK),$(wildcard tests/*/test_$(name).py))

test-all: $(VENV)/.installed ## run every test, with ten times the generated cases; resumes if interrupted
	$(PY) -m pytest --doctest-modules --quiet bnncc
	BNNCC_TEST_ALL=1 $(PYTEST) --resume=$(VENV)/test-all.txt

# With NVRTC and what reads its code: pip install -e '.[cuda-test]'
test-cuda: $(VENV)/.installed ## test machine code for GPUs, which needs the extra cuda-test
	$(PYTEST) --dist load tests/codegen/test_cuda_code.py tests/runtime/test_cuda_device.py tests/bundle/test_cuda_import.py \
	  tests/bundle/test_bundle_kernels.py

# In a folder of its own, because TVM imports torch wherever it finds it. Any build of this version: pip prefers
# one for CPUs, 2.13.0+cpu (200 MB), if an index that it is configured with has it.
$(VENV)/torch/.installed: $(VENV)/.installed
	$(PY) -m pip install --quiet --target $(VENV)/torch --upgrade 'torch==2.13.0' transformers
	@touch $@

test-torch: $(VENV)/torch/.installed ## test with modules of PyTorch, too
	PYTHONPATH=$(VENV)/torch $(PY) -m pytest $(PYTEST_ARGS) tests/frontend/test_pytorch*.py

lint: $(VENV)/.installed-lint ## check style, imports and docstrings
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m ruff check --preview --select DOC --ignore DOC201,DOC502 $(SOURCES)
	find $(SOURCES) -name '*.py' | xargs -n 60 -P 2 $(VENV)/bin/numpydoc lint

format: $(VENV)/.installed-lint ## format the sources
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# For the others too: mypy knows which functions of Python's library they lack.
typecheck: $(VENV)/.installed-lint ## check types with mypy, for Linux, macOS and Windows
	printf '%s\n' linux darwin win32 \
	  | xargs -P 2 -I SYSTEM $(PY) -m mypy --platform SYSTEM --cache-dir .mypy_cache/SYSTEM

check: lint typecheck test ## lint, types and tests: what continuous integration runs

# What benchmarks compare with; neither has bnncc in it. Larq Compute Engine wants Python 3.10 to 3.12
# (PYTHON_LCE); where it cannot be had it is not measured.
PYTHON_LCE ?= $(PYTHON)
peers: $(VENV)/.installed ## create .venv-peers and .venv-lce for the benchmarks
	$(PY) benchmarks/peers.py bench >$(VENV)/bench.txt
	$(PY) benchmarks/peers.py bench-lce >$(VENV)/bench-lce.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --requirement $(VENV)/bench.txt
	@test -x .venv-lce/bin/python || $(PYTHON_LCE) -m venv .venv-lce
	@.venv-lce/bin/python -m pip install --quiet --requirement $(VENV)/bench-lce.txt \
	  || { echo "no Larq Compute Engine for $(PYTHON_LCE): it will not be measured" >&2; \
	       rm -rf .venv-lce; }

bench: $(VENV)/.installed ## run every benchmark and rewrite its tables (an hour, on a quiet machine)
	$(PY) benchmarks/tables.py --run $(BENCH)

$(VENV)/.installed-site: $(VENV)/.installed
	$(PY) -m pip install --quiet --editable '.[site]'
	@touch $@

# `te` is TVM's name for tensor expressions.
site: $(VENV)/.installed-site ## build the documentation site into build/site; check spelling, prose and Dockerfiles
	$(VENV)/bin/codespell --ignore-words-list te README.md CONTRIBUTING.md CHANGELOG.md docs examples $(SOURCES)
	$(VENV)/bin/hadolint examples/docker/*.Dockerfile
	$(PY) docs/site/prose.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

dist: $(VENV)/.installed ## build the wheel into dist/
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## remove what was built, but keep .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
