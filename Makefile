# The two commands of the README are `make demo` and `make test`; each sets up what it needs.

python = .venv/bin/python

# Extras to install besides what a target needs: `make demo EXTRAS=cuda13` trains on the GPU.
EXTRAS ?=

# The demonstration. `make demo DEMO_FLAGS="--steps 100"` changes it: later flags win.
demo_run = runs/demo
demo_command = $(python) -m oomb_jax.train --model tiny --ctx 16384 --steps 60 --learning-rate 0.01 --warmup 5 \
	--weight-decay 0 --attention dense --eval-every 20 --eval-batches 4 --out $(demo_run)
DEMO_FLAGS ?=

# Tests spend their time compiling, each on one core.
pytest_flags = -n auto --maxprocesses 8

.PHONY: help setup demo test test-latest test-aot lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv with everything for development (EXTRAS=cuda13 or cuda12 for a GPU)
	@sh scripts/setup dev$${EXTRAS:+,$$EXTRAS}

demo: ## set up, train the tiny model on real text at a context of 16,384 and show the result (about 7 minutes)
	@echo "demo: trains a tiny model on the text of Python's standard library; the result goes to $(demo_run)"
	@sh scripts/setup "$$EXTRAS"
	@if [ -e $(demo_run) ]; then echo "demo: the result of the demo before goes to $(demo_run)-before"; \
		rm -rf $(demo_run)-before; mv $(demo_run) $(demo_run)-before; fi
	$(demo_command) $(DEMO_FLAGS)

test: ## set up, then lint, types and the whole test suite on the CPU (about 12 minutes on two cores)
	@echo "test: style and types first, then the whole test suite on the CPU"
	@sh scripts/setup dev$${EXTRAS:+,$$EXTRAS}
	@$(MAKE) --no-print-directory lint
	$(python) -m pytest $(pytest_flags)

test-latest: ## the test suite with the newest release of jax, in .venv-latest
	@VENV=.venv-latest LATEST=1 sh scripts/setup dev
	@.venv-latest/bin/python -c 'import jax, jaxlib; print("test-latest: jax", jax.__version__, "jaxlib", jaxlib.__version__)'
	.venv-latest/bin/python -m pytest $(pytest_flags)

test-aot: ## compile the kernels for an H200 without a GPU, in .venv-aot (about 5 minutes)
	@VENV=.venv-aot sh scripts/setup dev,aot
	.venv-aot/bin/python -m pytest $(pytest_flags) tests/aot tests/pallas_kernels/test_triton.py tests/pallas_kernels/test_page_move.py

lint: ## style and types (after make setup)
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m pyright

format: ## repair style (after make setup)
	$(python) -m ruff check --fix
	$(python) -m ruff format

clean: ## remove environments, caches and build products; runs/ stays
	rm -rf .venv .venv-latest .venv-aot .venv-uv .pytest_cache .ruff_cache build dist oomb_jax.egg-info
	find oomb_jax tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

export EXTRAS
