.DEFAULT_GOAL := help
.PHONY: help env demo test lint check bench docs

ENV := .venv/.complete

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(ENV) ## Create .venv with every extra and the development tools

$(ENV): pyproject.toml constraints.txt scripts/env
	@PYTHON='$(PYTHON)' scripts/env
	@touch $@

demo: $(ENV) ## Show it: a relay that is killed, a receiver that goes down, and nothing is lost
	@.venv/bin/relaybox demo

test: $(ENV) ## Run every test
	.venv/bin/pytest

lint: $(ENV) ## Check style, formatting and the import layers
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports

check: $(ENV) ## Check types
	.venv/bin/mypy

bench: $(ENV) ## Measure emit and the stores
	.venv/bin/python -m benchmarks.emit
	.venv/bin/python -m benchmarks.store

docs: $(ENV) ## Run the code blocks of the documents
	.venv/bin/pytest tests/docs
