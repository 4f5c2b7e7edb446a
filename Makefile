# Everything a user or a developer runs. `make setup` alone makes .venv with the project in it.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test lint types unit fix bench bench-overhead bench-plain bench-bits bench-invariant bench-drafters bench-leader bench-speed bench-quality bench-peers bench-vllm readme clean

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("bozza needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(READY)

demo: setup
	$(BIN)/python examples/demo.py

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python benchmarks/readme.py --check

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest

# Heavy measurements: run nothing else meanwhile. Results go to benchmarks/results, `make readme` shows them.
bench: bench-overhead bench-plain bench-bits bench-invariant bench-speed
	$(BIN)/python examples/demo.py --json benchmarks/results/demo.json

bench-overhead: setup
	$(BIN)/python benchmarks/overhead.py

bench-plain: setup
	$(BIN)/python benchmarks/plain.py --peer prompt_lookup

bench-bits: setup
	$(BIN)/python benchmarks/equal_bits.py
	$(BIN)/python benchmarks/equal_bits.py --dtype float32 --out benchmarks/results/equal_bits_float32.json

bench-invariant: setup
	$(BIN)/python benchmarks/invariant.py

# Needs prompts that no drafter was trained on: lines as for `bozza bench`.
bench-drafters: setup
	$(BIN)/python benchmarks/drafters.py --prompts $(PROMPTS)

bench-leader: setup
	$(BIN)/python benchmarks/leader.py --prompts $(PROMPTS)

# MODELS: more than the default model, as aliases or folders.
bench-speed: setup
	$(BIN)/python benchmarks/speed.py --models smollm2 $(MODELS)

bench-quality: setup
	$(BIN)/python benchmarks/quality.py --prompts $(PROMPTS) --models smollm2 $(MODELS)

# Needs MODEL, and for all peers ASSISTANT and GGUF (benchmarks/peers/fetch.py brings them). Takes hours.
bench-peers: setup
	$(BIN)/python benchmarks/peers/run.py --setup --model $(MODEL)
	$(BIN)/python benchmarks/peers/run.py --prompts $(PROMPTS) --model $(MODEL) \
		$(if $(ASSISTANT),--assistant $(ASSISTANT)) $(if $(GGUF),--gguf $(GGUF)) $(PEERS_OPTIONS)

# Makes an environment with a CPU build of vLLM (8 GB). With MODEL, that one too, a request at a time. Takes an hour.
bench-vllm: VLLM = $(BIN)/python benchmarks/vllm/run.py --prompts $(PROMPTS)
bench-vllm: setup
	$(BIN)/python benchmarks/vllm/overhead.py
	$(VLLM) --models smollm2 --at-once 1 8 --rounds 3 --tokens 64
	$(VLLM) --models smollm2 --at-once 8 --contestants bozza --rounds 3 --out benchmarks/results/vllm-128.json
	$(VLLM) --models smollm2 --at-once 1 8 --contestants bozza --tokens 64 --dtype float32 --out benchmarks/results/vllm-float32.json
	$(if $(MODEL),$(VLLM) --models $(MODEL) --rounds 3 --tokens 64 --out benchmarks/results/vllm-1.5b.json)

readme: setup
	$(BIN)/python benchmarks/readme.py

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
