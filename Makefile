# make reproduce | test | test-all | planted | kills | sanitize | lab | figures | docs | lint; each sets up .venv first.
# Other options go through the command itself: .venv/bin/jagged reproduce --help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Set-up compiles no module: where none may be kept, every start of Python compiles thousands anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup reproduce test test-all planted kills sanitize lab figures docs lint constraints

setup: $(READY)

# torch is named with its exact version, so that a CPU build is taken where one is offered. Modules
# are compiled when they are first imported, as most never are.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in [(3, 11), (3, 12)] else \
	    f"Python 3.11 or 3.12 is needed, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
	    --constraint constraints.txt $$(grep '^torch==' constraints.txt) --editable '.[dev]'
	@touch $@

# NOTEBOOKS at a time: side by side they disturb each other's timings.
NOTEBOOKS ?= 1
reproduce: $(READY)
	$(BIN)/jagged reproduce --preset smoke -n $(NOTEBOOKS)

# JOBS processes at a time; with several GPUs they take turns on them. `test` leaves out cases that
# say the same again and what starts or compiles for long: see tests/support/short_suite.py
JOBS ?= 2
test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --short

test-all: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Whether the tests notice known bugs, planted in copies of this checkout one at a time.
planted: $(READY)
	$(BIN)/python tests/support/planted_bugs.py -n $(JOBS)

# Whether commands that are killed at random moments lose or leave anything; half an hour.
kills: $(READY)
	$(BIN)/python tests/support/kills.py --moments 20 --seed 0

# On a GPU: every access to memory of every kernel on small batches, in parts, JOBS of them at a
# time: they mostly compile. PyTorch's cache of memory would hide accesses past an end. racecheck
# does without the kernels for Hopper: it reports buffers that warps hand over by mbarriers as races
# (see tests/support/racecheck_controls.py).
MATRIX := $(BIN)/python tests/support/small_matrix.py
SANITIZE := xargs -n 1 -P $(JOBS) env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --error-exitcode 1
sanitize: $(READY)
	$(MATRIX) --names | $(SANITIZE) --tool memcheck $(MATRIX)
	$(MATRIX) --names --without-hopper | $(SANITIZE) --tool racecheck $(MATRIX)

lab: $(READY)
	$(BIN)/jagged lab

figures: $(READY)
	$(BIN)/jagged figures

# The reference of jagged_kernels, from its docstrings: build/docs/index.html
docs: $(READY)
	$(BIN)/python -W error::UserWarning -m pdoc --docformat google \
	    --output-directory build/docs jagged_kernels

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

# After changing dependencies: the versions of this environment become the pins. Extras, which set-up
# leaves out, keep theirs.
constraints: $(READY)
	$(BIN)/python -m pip freeze --exclude-editable > constraints.new
	$(BIN)/python tests/support/new_pins.py constraints.txt constraints.new && rm constraints.new
