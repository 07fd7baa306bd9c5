# make demo: everything from nothing to the verdict on three models.
# make test: everything that must hold.
PYTHON ?= python3
VENV = .venv
RUN = $(VENV)/bin/python
DEMO = out/compare/demo
TORCH_FOR_CPU = https://download.pytorch.org/whl/cpu

# A module is compiled when it is first imported, and most never are: installing is twice as fast.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL = $(RUN) -m pip install --quiet --no-compile

# Two files of packages, two marks: a file that changed installs again. On Linux pip would take torch's
# CUDA build, gigabytes of it. Without a GPU the CPU build comes first, if its index can be reached.
$(VENV)/requirements: requirements.txt
	$(RUN) -m pip --version > /dev/null 2>&1 || { \
		$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
			|| { echo "$(PYTHON) must be Python 3.11 to 3.14: make PYTHON=python3.12"; exit 1; }; \
		$(PYTHON) -m venv $(VENV); }
	if test "$$(uname)" = Linux && ! command -v nvidia-smi > /dev/null; then \
		$(PIP_INSTALL) --retries=1 --timeout=15 --index-url=$(TORCH_FOR_CPU) \
			"$$(grep -o '^torch==[0-9.]*' requirements.txt)" 2> /dev/null \
			|| echo "$(TORCH_FOR_CPU) cannot be reached: taking torch's usual build"; \
	fi
	$(PIP_INSTALL) --requirement requirements.txt
	touch $@

$(VENV)/requirements-dev: $(VENV)/requirements requirements-dev.txt
	$(PIP_INSTALL) --requirement requirements-dev.txt
	touch $@

.PHONY: setup demo test lint format clean
setup: $(VENV)/requirements

# A second call goes on where the first was stopped, and trains nothing that has finished.
demo: setup
	$(RUN) prepare_slimpajama.py --source=stdlib --tokenizer=bytes --tokens=0 --out=data/stdlib
	$(RUN) compare.py config/demo.py --name=demo --seeds=3 --eval_iters=8 \
		--arms="vanilla; resformer: v_residual=True; svformer: share_v=True"
	@echo
	@echo 'An idea of your own, here with the previous layer as the source:'
	@echo '$(RUN) compare.py config/demo.py --name=mine --seeds=3 --arms="vanilla; mine: v_residual=previous"'

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
