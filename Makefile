# The course's commands. `make help` lists them.
#   make run                      .venv from the lock that fits this machine, then the whole course
#   make run PYTHON=python3       that interpreter as it is; installs nothing (a container, no network)
#   make run BASE_PYTHON=python3.12   the Python that .venv is made with
#   make run SET=cpu              the set of packages (cpu, cuda12, cuda13), instead of by the driver
#   make run EXTRAS=te            TransformerEngine too: built from source, needs nvcc and the cuDNN headers
#   make run ARGS="..."           passed on to the command (also for lab, test, bench, doctor)
PYTHON ?=
BASE_PYTHON ?= python3
SET ?=
EXTRAS ?=
ARGS ?=
UV ?= uv
# Each test process imports JAX and compiles: more than eight only fight over the cores' caches and memory.
WORKERS ?= auto --maxprocesses 8

.DEFAULT_GOAL := help
.PHONY: help run test test-gpu test-cloud lint format lab regenerate compare claims validate matrix site preclass bench clock \
  doctor saved lock clean preflight deploy send token forward image teardown

ifeq ($(strip $(PYTHON)),)
PY := .venv/bin/python
# What a module system or a container set for another Python must not reach into .venv.
unexport PYTHONPATH
unexport PYTHONHOME
# What make_env.py can't say itself, because nothing can start it, is said here.
env = @command -v "$(BASE_PYTHON)" >/dev/null || { echo "make: BASE_PYTHON=$(BASE_PYTHON) is not here." \
	"Install Python with: sudo apt install python3-venv" >&2; exit 1; }; \
	"$(BASE_PYTHON)" deploy/make_env.py venv --base "$(BASE_PYTHON)" --set "$(SET)" --extras "$(EXTRAS)"
else
PY := $(PYTHON)
export PYTHON
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
env = @command -v "$(PYTHON)" >/dev/null || { echo "make: PYTHON=$(PYTHON) is not here. Name a Python that is," \
	"or let make build its own .venv: make $@" >&2; exit 1; }; "$(PYTHON)" deploy/make_env.py check --for $@
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2} /^# --- / {print substr($$0, 7)}' Makefile
	@sed -n 's/^#   //p' Makefile

run: ## execute the whole course; an HTML page per notebook and an index in build/
	$(env)
	@$(PY) -m attnlab run $(ARGS)

test: export JAX_PLATFORMS ?= cpu
test: ## run the tests, on the CPU (JAX_PLATFORMS=cuda make test: on the GPU); JUnit in build/test/
	$(env)
	@mkdir -p build/test
	@$(PY) -m pytest -n $(WORKERS) --dist loadgroup --ignore tests/cloud \
	  --junitxml build/test/junit.xml $(ARGS)

test-gpu: export JAX_PLATFORMS = cuda
test-gpu: export XLA_PYTHON_CLIENT_PREALLOCATE ?= false
test-gpu: ## run the tests of clocks, programs and hand-written kernels on this machine's GPU, the kernels compiled
	$(env)
	@$(PY) -m pytest -q -rs tests/test_gpu.py tests/test_tiles.py tests/test_flash.py tests/test_hopper.py \
	  tests/test_limits.py $(ARGS)

test-cloud: export JAX_PLATFORMS ?= cpu
test-cloud: ## test terraform/ and deploy/ without a cloud (needs terraform and kubectl)
	$(env)
	@for tool in terraform kubectl; do command -v $$tool >/dev/null || { echo "make: test-cloud needs $$tool:" \
	  "make preflight says where to get it" >&2; exit 1; }; done
	@$(MAKE) --no-print-directory PY="$(PY)" .venv-cloud/ready
	@mkdir -p build/test
	@$(PY) -m pytest tests/cloud -n $(WORKERS) --dist loadgroup --junitxml build/test/cloud.xml $(ARGS)

.venv-cloud/ready: deploy/locks/cloud.txt
	@echo "making .venv-cloud: checkov and kubernetes-validate"
	@rm -rf .venv-cloud
	@"$(PY)" -m venv .venv-cloud
	@.venv-cloud/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
	  --only-binary :all: -r $<
	@touch $@

lint: ## check code and notebooks; changes nothing
	$(env)
	@$(PY) -m ruff check src tests deploy notebooks
	@$(PY) -m ruff format --check src tests deploy notebooks
	@$(PY) -m attnlab.notebook_files check notebooks

format: ## bring code and notebooks into the form that lint wants
	$(env)
	@$(PY) -m ruff format src tests deploy notebooks
	@$(PY) -m ruff check --fix src tests deploy notebooks
	@$(PY) -m attnlab.notebook_files format notebooks

lab: ## open JupyterLab on the notebooks
	$(env)
	@$(PY) -m jupyterlab --notebook-dir notebooks $(ARGS)

regenerate: ## execute the course here, and put its outputs and records in place of the committed ones
	$(env)
	@$(PY) -m attnlab regenerate $(ARGS)

compare: ## what changed between the recorded results and the last run (ARGS="OLD NEW": between two others)
	$(env)
	@$(PY) -m attnlab compare $(ARGS)

claims: ## every claim of the course with its verdict over the recorded results
	$(env)
	@$(PY) -m attnlab claims $(ARGS)

validate: export JAX_PLATFORMS ?= cpu
validate: ## run the notebooks and compare them with their committed outputs, by nbval
	$(env)
	@$(PY) -m attnlab validate $(ARGS)

matrix: ## the tests and the notebooks on the oldest and the newest JAX, each in its own environment
	@$(BASE_PYTHON) deploy/matrix.py $(ARGS)

site: ## the executed notebooks as a static site in build/site/
	$(env)
	@$(PY) -m attnlab site $(ARGS)

HOSTS ?=
preclass: ## doctor and the first notebook on the machines of a class: HOSTS="a b" by ssh, ARGS="--pods app=..." by kubectl
	$(env)
	@$(PY) -m attnlab preclass $(HOSTS) $(ARGS)

bench: ## the course cold and warm: seconds of each notebook, and its slowest cells
	$(env)
	@$(PY) -m attnlab bench $(ARGS)

clock: ## what the clock costs here, and how it compares with Nsight Compute where that is installed
	$(env)
	@$(PY) -m attnlab clock $(ARGS)

doctor: ## what can run here, and what to do about the rest
	$(env)
	@$(PY) -m attnlab doctor $(ARGS)

saved: ## the recorded H200 timings (ARGS=03: of one notebook)
	$(env)
	@$(PY) -m attnlab saved $(ARGS)

# --- On Google Cloud (see README):
# Given on the command line alone: a PORT or a YES of the environment was meant for something else.
OVERLAY = base
SOURCES =
IMAGE =
DIGEST =
CERT =
KEY =
PORT = 8884
YES =
cloud = @command -v "$(BASE_PYTHON)" >/dev/null || { echo "make: BASE_PYTHON=$(BASE_PYTHON) is not here." \
	"Install Python with: sudo apt install python3" >&2; exit 1; }; "$(BASE_PYTHON)" deploy/cloud

preflight: ## look whether a Google Cloud project can hold the course: tools, account, APIs, quota
	$(cloud) preflight

deploy: ## JupyterLab and the course into the cluster (OVERLAY=public SOURCES=A.B.C.D/32, IMAGE=, DIGEST=, CERT=, KEY=)
	$(cloud) deploy --overlay "$(OVERLAY)" --sources "$(SOURCES)" --image "$(IMAGE)" --digest "$(DIGEST)" \
	  --cert "$(CERT)" --key "$(KEY)"

send: ## the course as it is here into the pod; what a student changed stays
	$(cloud) send

forward: ## hold http://localhost:8884 open to the pod until Ctrl-C (PORT=: another port here)
	$(cloud) forward --port "$(PORT)"

token: ## show what JupyterLab's page asks for
	$(cloud) token

image: ## build the class image with Cloud Build
	$(cloud) image

teardown: ## delete the pod, its volume and the cluster, then list what is left (YES=1: without asking)
	$(cloud) teardown $(if $(filter 1,$(YES)),--yes)

# --- For maintainers:
lock: ## resolve pyproject.toml anew into deploy/locks/ (needs uv and a network)
	@command -v "$(UV)" >/dev/null || { echo "make: UV=$(UV) is not here. Install uv (pipx install uv)," \
	"or name it: make lock UV=/path/to/uv" >&2; exit 1; }
	@for set in cpu cuda12 cuda13; do \
	  case $$set in cpu) extra= ;; *) extra="--extra $$set" ;; esac; \
	  echo "deploy/locks/$$set.txt"; \
	  "$(UV)" pip compile pyproject.toml --quiet --upgrade --extra test $$extra --group build \
	    --universal --fork-strategy requires-python --python-version 3.11 --no-emit-index-url --generate-hashes \
	    --custom-compile-command "make lock" --output-file deploy/locks/$$set.txt || exit; \
	done
	@echo deploy/locks/cloud.txt
	@"$(UV)" pip compile --group cloud --quiet --upgrade --universal --python-version 3.11 --no-emit-index-url \
	  --generate-hashes --custom-compile-command "make lock" --output-file deploy/locks/cloud.txt
	@echo deploy/locks/pod.txt  # without hashes: the image's own versions take precedence
	@sed -n 's/.*name: PACKAGES, value: \(.*\)}/\1/p; s/^ARG JUPYTERHUB=/jupyterhub==/p' deploy/base/jupyter.yaml deploy/image/Dockerfile \
	  | tr ' ' '\n' | "$(UV)" pip compile - \
	  --quiet --upgrade --python-version 3.12 --python-platform linux --no-emit-index-url --no-annotate \
	  --custom-compile-command "make lock" --output-file deploy/locks/pod.txt

clean: ## remove build/ and caches (.venv stays; remove it with: rm -r .venv)
	@rm -rf build .pytest_cache .ruff_cache .hypothesis src/attnlab.egg-info
	@find src tests deploy notebooks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	@find notebooks -name .ipynb_checkpoints -type d -prune -exec rm -rf {} + 2>/dev/null || true
