# Each target sets up the environment it needs; the first one takes a minute or two.
# They need only Python 3.10 to 3.12. To choose one: make run PYTHON=/path/to/python3.11
# An environment that make did not make stays as it is: make test ENV=.venv-make makes another.

ENV ?= .venv
CONSTRAINTS ?= constraints.txt
PYTHON ?= $(call works,python3.12 python3.11 python3.10 python3 python)
CONFIG ?= experiment_configs/mlp/amp.yaml
SEARCH ?= hp_search/loss_scale_grid.yaml
WORKERS ?= 1
# The newest local search; `report` also takes the id of an experiment on the master of DET_MASTER.
STUDY ?= $(patsubst %/study.db,%,$(firstword $(shell ls -t runs/*/*/study.db 2>/dev/null)))
RUN = $(ENV)/bin/python
# Whether make has made an environment: it is ready, or being set up, as its prompt tells.
PROMPT = determined-amp of make
is_made = { test -e $(1)/ready || grep -qs '$(PROMPT)' $(1)/pyvenv.cfg; }

given_python = $(if $(filter command% environment,$(origin PYTHON)),$(PYTHON))

works = $(firstword $(foreach p,$(1),$(shell $(p) -c 'import sys; exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $(p))))

.PHONY: help install run search dashboard report compare test test-oldest test-gpu test-cluster test-readme mutants lint format tensorboard clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

install: $(ENV)/ready ## set up .venv, with all packages of the library, the examples and the tests

run: $(ENV)/ready ## train the main job here: make run [CONFIG=experiment_configs/mlp/fp32.yaml]
	@$(RUN) -m determined_amp train $(CONFIG)

search: $(ENV)/ready ## search the loss scale here: make search [SEARCH=hp_search/loss_scale_asha.yaml WORKERS=2]
	@$(RUN) -m determined_amp search $(SEARCH) --workers $(WORKERS)

dashboard: $(ENV)/ready ## open the newest local search, even while it runs
	@test -n "$(STUDY)" || { echo "no search in runs/ yet: make search" >&2; exit 2; }
	@$(ENV)/bin/optuna-dashboard --host 127.0.0.1 sqlite:///$(STUDY)/study.db

report: $(ENV)/ready ## draw the newest local search: make report [STUDY=folder or experiment id]
	@test -n "$(STUDY)" || { echo "no search in runs/ yet: make search; or give STUDY=..." >&2; exit 2; }
	@$(RUN) -m determined_amp report $(STUDY)

compare: $(ENV)/ready ## would AMP pay on a trial, and in which precision: make compare [CONFIG=...]
	@$(RUN) -m determined_amp compare $(CONFIG)

test: $(ENV)/ready ## all tests that need no GPU or cluster, with the newest torch
	@# Images and CI often keep Python from writing bytecode; the tests start the library many times.
	@PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not cluster and not readme"

test-oldest: ## the same with torch 2.3, the level of Determined's default task image
	@$(MAKE) test ENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt \
	    PYTHON=$(or $(given_python),$(call works,python3.10 python3.11))

# PYTHON is used as it is, because GPU machines have their own torch and often no network. In all
# other tests warnings are errors; here they are not, because CUDA's warnings are not known in advance.
test-gpu: $(if $(given_python),,$(ENV)/ready) ## tests that need a GPU, with a Python that has all packages: make test-gpu PYTHON=python3
	@$(or $(given_python),$(RUN)) -m pytest -m gpu -W default -rs tests/test_gpu.py tests/test_benchmarks_gpu.py

test-cluster: $(ENV)/ready ## everything on a real cluster; needs DET_MASTER and a login
	@$(RUN) -m pytest -m cluster -vv -rs tests/test_cluster.py

test-readme: $(ENV)/ready ## every command of the README, from a fresh clone with its own install
	@$(RUN) -m pytest -m readme -vv -rs tests/test_readme.py

mutants: $(ENV)/ready ## plant faults, and list those that tests miss: MODULE=FILE [TESTS=... SAMPLE=100]
	@test -n "$(MODULE)" || { echo "no module: make mutants MODULE=determined_amp/amp/scaler.py" >&2; exit 2; }
	@$(ENV)/bin/uv pip install --quiet --python $(RUN) -c $(CONSTRAINTS) --group mutants
	@WORKERS=$(WORKERS) SAMPLE=$(SAMPLE) $(RUN) -m tests.mutants $(MODULE) $(TESTS)

lint: $(ENV)/ready ## ruff and mypy, strict, tests included
	@$(ENV)/bin/ruff format --check .
	@$(ENV)/bin/ruff check .
	@$(ENV)/bin/mypy

format: $(ENV)/ready ## format the code as lint requires
	@$(ENV)/bin/ruff format .
	@$(ENV)/bin/ruff check --fix .

tensorboard: $(ENV)/ready ## open the curves of all local runs
	@$(ENV)/bin/tensorboard --logdir runs

clean: ## remove the environments of make, and caches; runs/ stays
	@for made in .venv .venv-oldest; do if $(call is_made,$$made); then rm -rf $$made; fi; done
	@rm -rf .mypy_cache .pytest_cache .ruff_cache

$(ENV)/ready: pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "no Python 3.10 to 3.12 found; name one: make PYTHON=..." >&2; exit 1; }
	@test ! -e $(ENV) || $(call is_made,$(ENV)) || { echo "$(ENV): make has not made it, so it stays" \
	    "as it is; allowed: another folder, as in make $(MAKECMDGOALS) ENV=.venv-make" >&2; exit 2; }
	@echo "setting up $(ENV) with $$($(PYTHON) --version)"
	@test -e $(ENV)/bin/pip || $(PYTHON) -m venv --prompt '$(PROMPT)' $(ENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) uv
	@# Compiled once: without bytecode every process spends seconds more on importing torch.
	@$(ENV)/bin/uv pip install --quiet --compile-bytecode --python $(RUN) -c $(CONSTRAINTS) \
	    -r pyproject.toml --all-extras
	@# The library itself, so that its commands run in any folder.
	@$(ENV)/bin/uv pip install --quiet --python $(RUN) --no-deps --no-build-isolation --editable .
	@touch $@
