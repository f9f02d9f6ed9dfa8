# Each target sets up its environment first, which takes a minute or two the first time.
# All you need is Python 3.10 to 3.12. To choose one: make run PYTHON=/path/to/python3.11
# make never changes an environment that you made. To use another: make test ENV=.venv-make

ENV ?= .venv
CONSTRAINTS ?= constraints.txt
PYTHON ?= $(call works,python3.12 python3.11 python3.10 python3 python)
CONFIG ?= experiment_configs/mlp/amp.yaml
SEARCH ?= hp_search/loss_scale_grid.yaml
WORKERS ?= 1
# The newest local search. `report` also takes the id of an experiment on the master DET_MASTER.
STUDY ?= $(patsubst %/study.db,%,$(firstword $(shell ls -t runs/*/*/study.db 2>/dev/null)))
RUN = $(ENV)/bin/python
# Whether make made the environment $(1): it has the file `ready` or, while unfinished, the prompt.
PROMPT = determined-amp of make
is_made = { test -e $(1)/ready || grep -qs '$(PROMPT)' $(1)/pyvenv.cfg; }

given_python = $(if $(filter command% environment,$(origin PYTHON)),$(PYTHON))

works = $(firstword $(foreach p,$(1),$(shell $(p) -c 'import sys; exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $(p))))

.PHONY: help install run search dashboard report compare test test-oldest test-gpu test-cluster test-readme mutants lint format tensorboard clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

install: $(ENV)/ready ## set up .venv with all packages for the library, the examples and the tests

run: $(ENV)/ready ## train on this machine: make run [CONFIG=experiment_configs/mlp/fp32.yaml]
	@$(RUN) -m determined_amp train $(CONFIG)

search: $(ENV)/ready ## search on this machine: make search [SEARCH=hp_search/loss_scale_asha.yaml WORKERS=2]
	@$(RUN) -m determined_amp search $(SEARCH) --workers $(WORKERS)

dashboard: $(ENV)/ready ## serve a dashboard of the newest local search, even while it runs
	@test -n "$(STUDY)" || { echo "no search in runs/ yet: make search" >&2; exit 2; }
	@$(ENV)/bin/optuna-dashboard --host 127.0.0.1 sqlite:///$(STUDY)/study.db

report: $(ENV)/ready ## report on the newest local search: make report [STUDY=folder or experiment id]
	@test -n "$(STUDY)" || { echo "no search in runs/ yet: make search; or give STUDY=..." >&2; exit 2; }
	@$(RUN) -m determined_amp report $(STUDY)

compare: $(ENV)/ready ## train a trial in each precision, and say which to use: make compare [CONFIG=...]
	@$(RUN) -m determined_amp compare $(CONFIG)

test: $(ENV)/ready ## run all tests that need no GPU or cluster, with the newest torch
	@# The tests start Python many times, so it must write bytecode, which images and CI often turn off.
	@PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not cluster and not readme"

test-oldest: ## run the same tests with torch 2.3, as in Determined's default task image
	@$(MAKE) test ENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt \
	    PYTHON=$(or $(given_python),$(call works,python3.10 python3.11))

# Installs nothing into a given PYTHON, because GPU machines have their own torch and often no network.
# Warnings are errors in all other tests, but not here: nobody knows CUDA's warnings in advance.
test-gpu: $(if $(given_python),,$(ENV)/ready) ## run the GPU tests, with a Python that has all packages: make test-gpu PYTHON=python3
	@$(or $(given_python),$(RUN)) -m pytest -m gpu -W default -rs tests/test_gpu.py tests/test_benchmarks_gpu.py

test-cluster: $(ENV)/ready ## run the tests on a real cluster; needs DET_MASTER and a login
	@$(RUN) -m pytest -m cluster -vv -rs tests/test_cluster.py

test-readme: $(ENV)/ready ## run every command of the README, in a fresh clone with its own environment
	@$(RUN) -m pytest -m readme -vv -rs tests/test_readme.py

mutants: $(ENV)/ready ## plant faults, and list those that the tests miss: MODULE=FILE [TESTS=... SAMPLE=100]
	@test -n "$(MODULE)" || { echo "no module: make mutants MODULE=determined_amp/amp/scaler.py" >&2; exit 2; }
	@$(ENV)/bin/uv pip install --quiet --python $(RUN) -c $(CONSTRAINTS) --group mutants
	@WORKERS=$(WORKERS) SAMPLE=$(SAMPLE) $(RUN) -m tests.mutants $(MODULE) $(TESTS)

lint: $(ENV)/ready ## check style and types with ruff and mypy, tests included
	@$(ENV)/bin/ruff format --check .
	@$(ENV)/bin/ruff check .
	@$(ENV)/bin/mypy

format: $(ENV)/ready ## format the code, and fix what ruff can fix
	@$(ENV)/bin/ruff format .
	@$(ENV)/bin/ruff check --fix .

tensorboard: $(ENV)/ready ## serve the curves of all local runs
	@$(ENV)/bin/tensorboard --logdir runs

clean: ## remove caches and the environments that make made; keep runs/
	@for made in .venv .venv-oldest; do if $(call is_made,$$made); then rm -rf $$made; fi; done
	@rm -rf .mypy_cache .pytest_cache .ruff_cache

$(ENV)/ready: pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "no Python 3.10 to 3.12 found; name one: make PYTHON=..." >&2; exit 1; }
	@test ! -e $(ENV) || $(call is_made,$(ENV)) || { echo "$(ENV): make has not made it, so it stays" \
	    "as it is; allowed: another folder, as in make $(MAKECMDGOALS) ENV=.venv-make" >&2; exit 2; }
	@echo "setting up $(ENV) with $$($(PYTHON) --version)"
	@test -e $(ENV)/bin/pip || $(PYTHON) -m venv --prompt '$(PROMPT)' $(ENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) uv
	@# Without bytecode, every process would take seconds longer to import torch.
	@$(ENV)/bin/uv pip install --quiet --compile-bytecode --python $(RUN) -c $(CONSTRAINTS) \
	    -r pyproject.toml --all-extras
	@# Install the library itself, so that its commands run in any folder.
	@$(ENV)/bin/uv pip install --quiet --python $(RUN) --no-deps --no-build-isolation --editable .
	@touch $@
