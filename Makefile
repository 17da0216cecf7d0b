# Every task of the project. `make demo` and `make test` also work as the first command on a fresh
# clone: they build .venv when it is missing.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ready

.PHONY: setup demo test test-all lint bench lock java wheel release-check site clean

setup: $(STAMP) java

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(PY) -m kdissect.compile
	touch $@

# Spark needs Java 17 or newer: found, installed where we may, or asked for in one line.
java:
	@tools/java.sh

demo: $(STAMP) java
	$(VENV)/bin/kdissect dissect "captures/*.pcap*" --keylog captures/tls13.keylog --out out/demo --overwrite

test: $(STAMP) java
	$(PY) -m pytest -n 3 --dist loadgroup --no-loadscope-reorder $(TESTS)

test-all: $(STAMP) java
	$(PY) -m pytest --timeout 0 --hypothesis-profile many -m "heavy or not heavy"

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m tools.measure_english --offenders *.md docs kdissect

bench: $(STAMP) java
	$(PY) bench/run.py

# A wheel of this platform and Python, with machine code for x86-64-v3 (elsewhere: for this CPU), and
# the source archive, into dist/.
wheel: $(STAMP)
	rm -rf build dist
	$(PY) -m build --quiet --sdist --no-isolation
	$(PY) -m kdissect.compile --cpu common
	$(PY) -m build --quiet --wheel --no-isolation $$($(PY) tools/wheel_tags.py)

release-check: wheel
	tools/release_check.sh $(PY)

# The documentation as one site, in out/site.
site: $(STAMP)
	$(PY) -m mkdocs build --strict --quiet

# Versions and hashes only: lines that name where packages come from belong to a machine.
lock: $(STAMP)
	cp requirements.lock requirements.new
	$(VENV)/bin/pip-compile --quiet --generate-hashes --strip-extras --no-header --no-annotate \
	  --allow-unsafe --extra dev -o requirements.new pyproject.toml
	sed '/^--/d' requirements.new > requirements.lock
	rm requirements.new

clean:
	rm -rf out build kdissect/machine_code dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
