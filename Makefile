# Works with GNU Make 3.81 (macOS) and a POSIX shell. Paths are relative, so the folder's own name may hold spaces.

PYTHON ?= python3
# For a machine without a GPU, the small build of torch: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH := torch==2.13.0

BIN := .venv/bin
# requirements.txt is complete, and only wheels are installed: no other package's code runs on installation.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-deps --only-binary :all:
# Created last, so that an interrupted installation is repeated; it is inside the environment that it describes.
INSTALLED := .venv/.installed

.PHONY: help setup demo test lint bench clean

help:
	@echo "make setup   install vitral and its tools into .venv"
	@echo "make demo    train a Vision Transformer on handwritten digits and inspect it, in two minutes"
	@echo "make test    run the tests on all cores"
	@echo "make lint    check format, style and types"
	@echo "make bench   speed of training steps on this machine, compared with other libraries"
	@echo "make clean   remove builds and caches; .venv stays"
	@echo
	@echo "make setup PYTHON=python3.12   with another Python than python3"
	@echo "make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu   with the small build of torch, for CPUs"

setup: $(INSTALLED)

# A working environment is kept; one that is broken or too old is recreated.
$(INSTALLED): pyproject.toml requirements.txt requirements-cuda.txt
	@fail() { echo "$$1" >&2; exit 1; }; \
	recent='import sys; sys.exit(sys.version_info < (3, 11))'; \
	if $(BIN)/python -c "import pip; $$recent" 2>/dev/null; then exit 0; fi; \
	command -v "$(PYTHON)" >/dev/null || \
		fail "cannot find \"$(PYTHON)\": install Python 3.11 or newer, or give its path with make PYTHON=/path/to/python3."; \
	"$(PYTHON)" -c "$$recent" 2>/dev/null || \
		fail "$(PYTHON) is $$("$(PYTHON)" --version 2>&1), vitral needs 3.11 or newer: give its path with make PYTHON=/path/to/python3."; \
	"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
		fail "$(PYTHON) lacks its venv module: install it (Debian, Ubuntu: apt install python3-venv) and run make again."; \
	"$(PYTHON)" -m venv --clear .venv || \
		fail "$(PYTHON) could not create .venv (see above): fix that and run make again."
	@cuda='import importlib.metadata as m, sys; sys.exit("nvidia" not in str(m.requires("torch")))'; \
	{ $(PIP) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") $(TORCH) && \
	$(PIP) --require-hashes --requirement requirements.txt && \
	if $(BIN)/python -c "$$cuda"; then $(PIP) --require-hashes --requirement requirements-cuda.txt; fi && \
	$(PIP) --no-build-isolation --editable .; } || { \
		echo "pip could not install the versions in requirements.txt (see above): fix that and run make again." >&2; \
		exit 1; }
	@touch $@

demo: $(INSTALLED)
	$(BIN)/vitral demo

# Each worker imports torch, so more than eight take longer; -rs lists the skipped tests with reasons.
test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadgroup -rs

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check

bench: $(INSTALLED)
	$(BIN)/vitral bench train

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +
