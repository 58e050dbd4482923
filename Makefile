# Two commands are all a newcomer needs: `make demo` and `make test`. Both set up what is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Written once what tests import is compiled.
COMPILED := $(VENV)/.compiled
# What the demo needs alone: no compiler, no test tools, no root.
DEMO_STAMP := $(VENV)/.installed-demo
# Training frameworks, beside everything of VENV.
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.installed
# Where an image sets it, each process compiles all that it loads, and what is compiled ahead would be for nothing.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help setup system demo demo-hosts test lanes test-fast check format bench soak mutants docs clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 16

setup: $(STAMP) $(FRAMEWORKS_STAMP) ## Install everything into .venv, and frameworks into .venv-frameworks

system: ## Install the system packages that the tests need
	@PYTHON="$(PYTHON)" sh scripts/system_packages.sh tests

$(STAMP): pyproject.toml constraints.txt scripts/set_up.sh scripts/system_packages.sh
	@sh scripts/set_up.sh "$(PYTHON)" "$(VENV)" tests
	@touch $(STAMP) $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt scripts/set_up.sh scripts/system_packages.sh
	@sh scripts/set_up.sh "$(PYTHON)" "$(VENV)" demo
	@touch $(DEMO_STAMP)

$(FRAMEWORKS_STAMP): $(STAMP) constraints.txt scripts/frameworks.txt scripts/set_up_frameworks.sh
	@sh scripts/set_up_frameworks.sh "$(VENV)" "$(FRAMEWORKS)"
	@touch $(FRAMEWORKS_STAMP)

demo: $(DEMO_STAMP) ## Run the main job: corpus, mix, training, kill, resume, report
	@$(BIN)/python examples/demo.py

demo-hosts: $(DEMO_STAMP) ## The same on two hosts, namespaces of this machine: a rank on each
	@$(BIN)/python -m examples.demo_hosts

test: $(STAMP) ## Run every check and every test
	@$(MAKE) --no-print-directory --jobs 3 check lanes

# Frameworks are installed while the checks use one core: that waits for the network.
lanes: $(COMPILED) $(FRAMEWORKS_STAMP)
	@$(BIN)/python -m tests.lanes -m "not soak"

# Beside the checks, which use one core: lanes that start together would each compile torch and Ray, and those of many
# texts would each make hypothesis's table of letters.
$(COMPILED): $(STAMP)
	@$(BIN)/python -c "import hypothesis, moto.server, pyarrow.dataset, ray, torch.distributed.checkpoint, torch.distributed.fsdp"
	@$(BIN)/python -c "from hypothesis import strategies; strategies.text().validate()"
	@$(BIN)/python -m pytest --quiet --collect-only tests/house/test_house_lanes.py > /dev/null
	@$(BIN)/python -m compileall -q omniload fusefs snapshot trainer_integration
	@touch $(COMPILED)

test-fast: $(STAMP) ## Run the tests that start no cluster and no mount
	@$(BIN)/python -m tests.lanes -m "not ray and not fuse and not slow and not soak"

check: $(STAMP) ## Format, lint, types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: $(STAMP) ## Build the site, with warnings as errors, into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(STAMP) ## Write the format that check wants
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP) ## Take every measurement; reports go to benchmarks/reports
	@for line in planner.balance install trainer.checkpoint_stall trainer.vision_balance loaders.throughput loaders.step_sizes loaders.ranks loaders.waits planner.mix_accuracy faults.resume planner.packing planner.plan_time planner.published_steps demo_wait fusefs.mounts fusefs.checkpoint startup.environment \
		"startup.images --folder .bench/startup" \
		"startup.containerd --folder .bench/containerd --report"; \
	do $(BIN)/python -m benchmarks.$$line || exit 1; done

soak: $(STAMP) $(FRAMEWORKS_STAMP) ## Race readers with writers over mounts, then test every property by new random examples
	@$(BIN)/python -m benchmarks.fusefs.versions --no-report
	@$(BIN)/python -m tests.lanes -m soak
	@$(BIN)/python -m tests.lanes tests/property --hypothesis-profile=thorough
	@$(FRAMEWORKS)/bin/python -m pytest -q tests/frameworks/test_chat_template.py --hypothesis-profile=thorough

mutants: $(STAMP) ## Try the mutants of tests/mutants against the tests that are to catch them
	@$(BIN)/python -m tests.mutants

clean: ## Remove the environment and what the demo made
	rm -rf $(VENV) $(FRAMEWORKS) demo
