# Everything a newcomer needs: `make demo` to see it work, `make test` to check it. Both set up .venv by themselves.
VENV := .venv
PYTHON ?= python3
READY := $(VENV)/.ready
RUN := $(VENV)/bin/python

.PHONY: setup demo test test-variants lint browser docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; pass one with PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(RUN) -m kernelwarehouse.demo

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Tests look at the training report in a real browser.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
		|| { echo "The tests need the browser chromium. On Debian: apt-get install chromium (as root)"; exit 1; }

test: lint browser
	$(VENV)/bin/pytest --numprocesses 2

# The same tests as other machines would run them. Each takes as long as `make test`.
VARIANTS := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 KERNELWAREHOUSE_NATIVE=0 OMP_NUM_THREADS=1 KERNELWAREHOUSE_TEST_THREADS=2

test-variants: $(READY) browser
	@failed=; empty=$$(mktemp -d); \
	for variant in $(VARIANTS) "CXX=no-such-compiler TORCH_EXTENSIONS_DIR=$$empty"; do \
		echo "== $$variant"; env $$variant $(VENV)/bin/pytest --numprocesses 2 || failed="$$failed [$$variant]"; \
	done; rm -r $$empty; [ -z "$$failed" ] || { echo "failed with$$failed"; exit 1; }

docs: $(READY)
	$(RUN) scripts/draw_method.py
	$(RUN) scripts/import_graph.py
	$(RUN) scripts/api_reference.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
