# Everything a newcomer needs: `make demo` to see it work, `make test` to check it. Both set up .venv by themselves.
VENV := .venv
PYTHON ?= python3
READY := $(VENV)/.ready
RUN := $(VENV)/bin/python

.PHONY: setup demo test lint browser docs clean

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

docs: $(READY)
	$(RUN) scripts/draw_method.py
	$(RUN) scripts/import_graph.py
	$(RUN) scripts/api_reference.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
