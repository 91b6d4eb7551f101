.DEFAULT_GOAL := help
.PHONY: help env demo test lint check bench docs

ENV := .venv/.complete
BENCH := .venv/.bench

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(ENV) ## Create .venv with every extra and the development tools

$(ENV): pyproject.toml constraints.txt scripts/env
	@PYTHON='$(PYTHON)' scripts/env
	@touch $@

$(BENCH): $(ENV)
	@PYTHON='$(PYTHON)' scripts/env bench
	@touch $@

demo: $(ENV) ## Show it: a relay that is killed, a receiver that goes down, and nothing is lost
	@.venv/bin/relaybox demo

test: $(ENV) ## Run every test
	.venv/bin/pytest --numprocesses 2 --dist loadfile -m 'not slow'
	.venv/bin/pytest -m slow

lint: $(ENV) ## Check style, formatting and the import layers
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports

check: $(ENV) ## Check types
	.venv/bin/mypy

bench: $(BENCH) ## Measure emit, the stores and the relay, against others
	.venv/bin/python -m benchmarks.emit
	.venv/bin/python -m benchmarks.store
	.venv/bin/python -m benchmarks.relay

docs: $(ENV) ## Run the code blocks of the documents
	.venv/bin/pytest tests/docs
