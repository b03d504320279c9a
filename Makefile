# Everything a newcomer needs: Python 3.11 or newer, pip, make and git. `make demo` is the place to start.
#   make demo                      method fednca on embedded images; prints the result table and the report's path
#   make demo DATA=path/to/data    the same on real chest X-rays (a folder or zip with metadata.csv)
#   make demo PRESET=presets/x.toml ARGS="-c 'method=fedavg federation.rounds=5'"    another one
#   make rehearsal                 a whole federation of hospitals on this machine: kits, TLS, keys, real processes
#   make test                      runs the tests; `make drills` the slow ones that start processes
#   make compare PLAN=results/incongruent.toml   methods x partitions x seeds as one table (an hour and more)
#   make lint | bench | clean

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
DATA ?=
PRESET ?= $(if $(DATA),presets/fednca-cxr.toml,presets/fednca-mosaic.toml)
TIMEOUT ?= 1800
ARGS ?=

PLAN ?= results/fednca.toml
JOBS ?= 2

.PHONY: demo rehearsal compare test drills lint bench clean install install-test
.DEFAULT_GOAL := demo

# A half-made environment would look finished to the next call, so it is removed; one of an old Python is never made.
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

install: $(PY)
	@$(PY) deploy/install.py

install-test: $(PY)
	@$(PY) deploy/install.py test dicom dp

demo: install
	@$(PY) -m server_app.simulate --preset "$(PRESET)" $(if $(DATA),--data "$(DATA)") --timeout $(TIMEOUT) $(ARGS)

# Methods x partitions x seeds into one table beside the plan; continues where it was stopped.
compare: install
	@$(PY) -m server_app.compare "$(PLAN)" --out "$(basename $(PLAN)).md" --runs-dir runs --jobs $(JOBS) $(ARGS)

# SuperLink and three SuperNodes over TLS with node keys; the model must be that of one process. A few minutes.
rehearsal: install
	@$(PY) -m server_app.rehearsal $(ARGS)

test: install-test
	@$(PY) -m pytest -m "not slow" $(ARGS)

# Processes, Ray, SuperNodes, real kills: about twice as long again as the tests.
drills: install-test
	@$(PY) -m pytest -m slow $(ARGS)

lint: install-test
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

bench: install
	@$(PY) -m bench $(ARGS)

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis
