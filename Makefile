# make demo: everything from nothing to a comparison of three models.
# make test: everything that must hold.
PYTHON ?= python3
VENV = .venv
RUN = $(VENV)/bin/python
DEMO = out/demo

# Threads that wait for a busy neighbor must not spin: on two cores, of which another program uses
# one, that made training three times as slow. Where nobody else works, waiting passively is free.
export OMP_WAIT_POLICY ?= PASSIVE

# Two files of packages, two marks: a file that changed installs again.
$(VENV)/requirements: requirements.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --requirement requirements.txt
	touch $@

$(VENV)/requirements-dev: $(VENV)/requirements requirements-dev.txt
	$(RUN) -m pip install --quiet --requirement requirements-dev.txt
	touch $@

.PHONY: setup demo test lint format clean
setup: $(VENV)/requirements

# Each line goes on where it was stopped, and does nothing where it had finished.
demo: setup
	$(RUN) prepare_slimpajama.py --source=stdlib --tokenizer=bytes --tokens=0 --out=data/stdlib
	$(RUN) train.py config/demo.py --init_from=auto --out_dir=$(DEMO)/vanilla
	$(RUN) train.py config/demo.py --init_from=auto --out_dir=$(DEMO)/resformer --v_residual=True
	$(RUN) train.py config/demo.py --init_from=auto --out_dir=$(DEMO)/svformer --share_v=True
	$(RUN) compare.py $(DEMO)/vanilla $(DEMO)/resformer $(DEMO)/svformer
	$(RUN) sample.py --out_dir=$(DEMO)/resformer --start="def " --max_new_tokens=200

test: $(VENV)/requirements-dev
	$(RUN) -m pytest -n auto --dist worksteal $(ARGS)

lint: $(VENV)/requirements-dev
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

format: $(VENV)/requirements-dev
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

clean:
	rm -rf $(VENV) $(DEMO) data/stdlib
