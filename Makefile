.DEFAULT_GOAL := help
.PHONY: help env env-all demo example example-orders example-documents test test-all test-chaos proof lint check bench docs

ENV := .venv/.complete
BENCH := .venv/.bench
DJANGO42 := .venv-django42/.complete
# Made where the version of Python is installed that they need.
DJANGO61 := .venv-django61/.complete
PYTHONS := $(foreach version,3.12 3.13 3.14,.venv-$(version)/.complete)

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(ENV) ## Create .venv with every extra and the development tools

$(ENV): pyproject.toml constraints.txt scripts/env
	@PYTHON='$(PYTHON)' scripts/env
	@touch $@

$(BENCH): $(ENV)
	@PYTHON='$(PYTHON)' scripts/env bench
	@touch $@

$(DJANGO42): $(ENV) constraints-django42.txt
	@scripts/env django42
	@touch $@

$(DJANGO61): constraints-django61.txt
$(DJANGO61) $(PYTHONS): .venv-%/.complete: $(ENV)
	@scripts/env $*
	@if [ -d $(@D) ]; then touch $@; fi

env-all: $(ENV) $(DJANGO42) $(DJANGO61) $(PYTHONS) ## Create the environments of `make test-all` too

demo: $(ENV) ## Show it: a relay that is killed, a receiver that goes down, and nothing is lost
	@.venv/bin/relaybox demo

example: $(ENV) ## Run a Django project with Celery that tells a runner of uploaded files
	@.venv/bin/python -B examples/django_uploads/run.py

example-orders: $(ENV) ## Run a FastAPI shop that tells a warehouse of paid orders through Kafka
	@.venv/bin/python -B examples/fastapi_orders/run.py

example-documents: $(ENV) ## Run a FastAPI document service that keeps a search engine in step
	@.venv/bin/python -B examples/documents/run.py

test: $(ENV) ## Run the tests that a change is worth: minutes
	@.venv/bin/python -m tests.run fast

test-all: $(ENV) $(DJANGO42) $(DJANGO61) $(PYTHONS) ## Run the full matrix: every server, version, API and page
	@.venv/bin/python -m tests.run fast full

test-chaos: $(ENV) ## Run everything that kills, starves or times, alone on the machine
	@RELAYBOX_BOUNDS=1 .venv/bin/python -m tests.run chaos

proof: $(ENV) ## Run the long proof for MINUTES= (30) and write docs/proof.md; ONLY= names parts, SCHEDULES= bounds the simulation
	.venv/bin/python -m tests.proof --minutes $(or $(MINUTES),30) $(if $(SCHEDULES),--schedules $(SCHEDULES)) $(if $(ONLY),--only $(ONLY))

lint: $(ENV) ## Check style, formatting, the import layers and plain English
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports
	.venv/bin/python -m tests.prose

check: $(ENV) ## Check types
	.venv/bin/mypy

bench: $(BENCH) ## Measure everything against others and write docs/performance.md; PARTS= names some, ROUNDS= (3)
	.venv/bin/pytest benchmarks/tests
	.venv/bin/python -m benchmarks $(PARTS) $(if $(ROUNDS),--rounds $(ROUNDS))

docs: $(ENV) ## Run the code blocks of the documents
	.venv/bin/pytest tests/docs
