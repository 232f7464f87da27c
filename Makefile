# make pretrain     train the quickstart GPT with S2-Attention in Megatron (CPU: about 3 minutes; GPU: Triton kernels, bf16)
# make compare      train it and its dense twin, and lay them side by side: a table, a verdict, and RUNS/compare.html
# make generate     the trained quickstart GPT continues PROMPT, word by word
# make test         the quick tests, of most kinds of faults, without a GPU: 12 minutes on two cores
# make test-all     make test, then the rest of what needs no GPU, 35 minutes more
# make test-long    kills and resumes by the dozen, many drawn launches, a real SLURM on this machine
# make test-engines exported models in engines that are not ours, which it installs (6 GB): 40 minutes
# make test-studies the harness of the studies of quality, a quarter of an hour; CI runs it where they have changed
# make test-gpu     the suite for a GPU machine
# make lint         ruff and the import contracts
# make dist         the release: dist/*.tar.gz from the commit, and from it dist/*.whl
#
#   CONFIG=configs/quickstart_dense.yaml   another sparsity; its run is in runs/<name of the file>
#   ITERATIONS=600                         train that far (a finished run is continued)
#   PROMPT='def main('                     what it continues
#   RUNS=/big/disk/runs                    where corpus, logs and checkpoints go
#   PYTHON=/path/to/python3.12             the Python to make .venv with (else the first one >= 3.12 that is found)
#   VENV=                                  empty: use the packages of the present environment, make no .venv
#   JOBS=1                                 test processes at once
#   TESTS="tests/ops/test_learns.py -x"    what pytest is given

VENV ?= .venv
PYTHON ?=
CONFIG ?= configs/quickstart.yaml
ITERATIONS ?=
RUNS ?= runs
PROMPT ?= def main(
TESTS ?= tests
JOBS ?= $(shell n=$$(nproc); [ $$n -gt 8 ] && n=8; echo $$n)

ifeq ($(strip $(VENV)),)
INSTALLED := check-packages
RUN := $(or $(shell scripts/find-python.sh "$(or $(strip $(PYTHON)),python3)"),$(error no Python to run with))
else
INSTALLED := $(VENV)/.installed
RUN = $(VENV)/bin/python
endif

.PHONY: help pretrain compare generate test test-all test-long test-engines test-studies test-gpu lint dist install check-packages
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

install: $(INSTALLED)

# Written only after a successful installation; setup.py newer than it installs again.
$(VENV)/.installed: setup.py
	@scripts/make-venv.sh "$(VENV)" "$(PYTHON)"
	@touch $@

check-packages:
	@$(RUN) scripts/check-packages.py

pretrain: $(INSTALLED)
	@$(RUN) -m examples.quickstart.run --config "$(CONFIG)" --runs "$(RUNS)" $(if $(strip $(ITERATIONS)),--iterations "$(ITERATIONS)")

compare: $(INSTALLED)
	@for config in configs/quickstart_dense.yaml configs/quickstart.yaml; do \
	    $(RUN) -m examples.quickstart.run --config $$config --runs "$(RUNS)" $(if $(strip $(ITERATIONS)),--iterations "$(ITERATIONS)") || exit; \
	done
	@$(RUN) -m s2_megatron compare "$(RUNS)/quickstart_dense" "$(RUNS)/quickstart" --html "$(RUNS)/compare.html"

# The prompt goes through the environment, so that quotes in it stay as they are. Sampled, because the likeliest words of
# a model as small as this one run in circles.
generate: export PROMPT := $(PROMPT)
generate: $(INSTALLED)
	@$(RUN) -m s2_megatron generate --load "$(RUNS)/$(basename $(notdir $(CONFIG)))/checkpoints" --prompt "$$PROMPT" \
	    --temperature 0.8 --top-k 40

# One thread a process: waiting OpenMP threads burn the cores that the other tests need.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m pytest --durations=15
# With pytest-xdist where it is installed. A file stays in one process, for the costly fixtures that its tests share.
SIDE_BY_SIDE = $$($(RUN) -c 'import xdist' 2>/dev/null && echo "-n $(JOBS) --dist loadfile")

# What TESTS names is run, the slow ones of it too.
ALL := $(filter tests,$(TESTS))

test: $(INSTALLED)
	@$(PYTEST) -m "not gpu and not long and not engines$(if $(ALL), and not slow)" $(SIDE_BY_SIDE) $(TESTS)

test-all: test
	@$(if $(ALL),$(PYTEST) -m "slow and not gpu and not long" $(SIDE_BY_SIDE) $(TESTS),:)

# One after another: they kill processes and wait for answers, which other tests beside them would delay.
test-long: $(INSTALLED)
	@$(PYTEST) -m "long and not gpu" $(TESTS)

test-engines: $(INSTALLED)
	@scripts/make-engines.sh "$(PYTHON)"
	@$(PYTEST) -m engines $(if $(ALL),tests/engines,$(TESTS))

test-studies: $(INSTALLED)
	@$(RUN) studies/check.py
	@$(PYTEST) -m "not gpu" $(SIDE_BY_SIDE) studies/tests
	@$(RUN) -m studies.tests.passed --write

test-gpu: $(INSTALLED)
	@$(PYTEST) -m "gpu or op" $(TESTS)

lint: $(INSTALLED)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

dist: $(INSTALLED)
	@scripts/make-dist.sh "$(RUN)"
