# Every task of the project. `make demo` and `make test` also work as the first command on a fresh
# clone: they build .venv when it is missing.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ready
# what the bounds decide: kernels, Arrow, SQL, charts and pages, Spark, the command line
LOWEST := tests/codec tests/capture tests/tcp tests/tls tests/sql tests/report tests/pipeline/test_spark.py \
  tests/test_cli.py tests/test_charts.py tests/test_pandas.py tests/test_plot.py

.PHONY: setup demo test test-all lint bench lock lowest java wheel release-check site clean

setup: $(STAMP) java

# --no-deps: the lock is complete on Linux; on a Mac it has all but what an IPython kernel adds there
$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(PY) -m kdissect.compile
	touch $@

# Spark needs Java 17 or newer: found, installed where we may, or asked for in one line.
java:
	@tools/java.sh

demo: $(STAMP) java
	$(VENV)/bin/kdissect dissect "captures/*.pcap*" --keylog captures/tls13.keylog --out out/demo --overwrite

test: $(STAMP) java
	$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(TESTS)

test-all: $(STAMP) java
	$(PY) -m pytest --timeout 0 --hypothesis-profile many -m "heavy or not heavy"

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(STAMP) java
	$(PY) bench/run.py

# A wheel of this platform and Python, with machine code for x86-64-v3 (elsewhere: for this CPU), and
# the source archive, into dist/.
wheel: $(STAMP)
	rm -rf build dist
	$(PY) -m build --quiet --sdist --no-isolation
	$(PY) -m kdissect.compile --cpu common
	$(PY) -m tools.build_wheel

release-check: wheel
	tools/release_check.sh $(PY)

# The documentation as one site, in out/site.
site: $(STAMP)
	$(PY) -m mkdocs build --strict --quiet

# Versions and hashes only: lines that name where packages come from belong to a machine.
lock: $(STAMP)
	mkdir -p out
	cp requirements.lock out/requirements.new
	$(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")' > out/dev.in
	$(VENV)/bin/pip-compile --quiet --generate-hashes --strip-extras --no-header --no-annotate \
	  --allow-unsafe --extra notebook -o out/requirements.new pyproject.toml out/dev.in
	sed '/^--/d' out/requirements.new > requirements.lock

# The product's tests with the lowest version of each dependency that pyproject.toml allows.
lowest: $(STAMP) java
	rm -rf out/lowest
	$(VENV)/bin/uv venv --quiet --python $(PY) out/lowest
	$(VENV)/bin/uv pip compile --quiet --resolution lowest-direct --all-extras pyproject.toml -o out/lowest.txt
	$(VENV)/bin/uv pip install --quiet --python out/lowest/bin/python -r out/lowest.txt \
	  dpkt hypothesis pytest pytest-randomly pytest-timeout pytest-xdist
	out/lowest/bin/python -m pytest -n 2 --dist loadfile $(LOWEST)

clean:
	rm -rf out build kdissect/machine_code dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
