# make demo: sets up .venv and runs the main job.   make test: sets up .venv and runs the tests.
# Both are safe to run again, also after an interruption; the set-up is done once.
#
# PyPI's torch for Linux is the CUDA build (several GB). For the small CPU build run, once:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# More of the package's extras for the development venv, e.g. `make setup EXTRAS=dev,train`.
EXTRAS ?= dev
# Options for the demo, e.g. `make demo ARGS="--json"`.
ARGS ?=

VENV := .venv
STAMP := $(VENV)/.set-up
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

.PHONY: setup chromium app demo test lint bench clean

setup: $(STAMP)

# The stamp is written last: an interrupted set-up starts again, and pip keeps what is already installed.
$(STAMP): pyproject.toml requirements/constraints.txt
	@if ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
		python="$(PYTHON)"; \
		if [ -z "$$python" ]; then \
			echo "error: no Python >= 3.11 found; on Debian or Ubuntu: sudo apt install python3 python3-venv" >&2; exit 1; \
		fi; \
		if ! $$python -c 'import ensurepip, venv' >/dev/null 2>&1; then \
			package=python$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv; \
			echo "error: $$python cannot make a virtual environment; on Debian or Ubuntu: sudo apt install $$package" >&2; \
			exit 1; \
		fi; \
		echo "making $(VENV) with $$python"; \
		$$python -m venv --clear $(VENV); \
	fi
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable '.[$(EXTRAS)]'
	@touch $@

# The tests of the Space drive a Chromium; as root on Debian it is installed here, once.
chromium:
	@browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }; \
	if ! browser >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing Debian's chromium for the tests of the Space"; \
			apt-get update -qq >/dev/null && apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
		fi; \
		browser >/dev/null || { \
			echo "error: the tests of the Space need a Chromium; on Debian or Ubuntu: sudo apt install chromium" >&2; exit 1; }; \
	fi

app: setup
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt \
		--editable '.[app]'
	$(VENV)/bin/python app.py

demo: setup
	$(VENV)/bin/hf-specdec compare $(ARGS)

test: chromium setup
	$(VENV)/bin/python -m pytest -q

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

bench: setup
	$(VENV)/bin/python benchmarks/bench.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
