# make chat: set up what is missing and chat.  make test: the same, and run all tests.
# Needs make and a Python of 3.11 or newer; everything else goes into .venv.

VENV := .venv
SOURCES := pyproject.toml $(wildcard setup.py kernels/cpu/*.c kernels/cpu/*.h kernels/cpu/*.cpp)

.PHONY: chat test clean

chat: $(VENV)/chat-ready
	@$(VENV)/bin/tqchat $(ARGS)

test: $(VENV)/test-ready
	@$(VENV)/bin/python tests/emulator/clang.py
	@$(VENV)/bin/python -m pytest $(ARGS)

$(VENV)/chat-ready: $(SOURCES) $(VENV)/bin/python
	@echo "Installing MLX, Textual and tqchat into $(VENV), and compiling: a minute or two ..."
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".$$($(EXTRA))"
	@touch $@

$(VENV)/test-ready: $(VENV)/chat-ready
	@echo "Installing what the tests need: another minute or two ..."
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".$$($(EXTRA) | sed 's/^$$/[dev]/; s/]$$/,dev]/; s/\[dev,dev\]/[dev]/')"
	@touch $@

$(VENV)/bin/python:
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then \
	  echo "tqchat needs Python 3.11 or newer with its venv module, and none was found." >&2; \
	  case $$(uname) in \
	    Darwin) echo "Install one: brew install python@3.13, or from python.org." >&2;; \
	    *) echo "Install one: apt install python3 python3-venv, dnf install python3, or from python.org." >&2;; \
	  esac; exit 1; \
	fi; \
	"$$python" -m venv $(VENV)

clean:
	rm -rf $(VENV) build *.egg-info kernels/cpu/*.so

# The newest Python there is; one that cannot make virtual environments does not count.
FIND_PYTHON = for name in python3.14 python3.13 python3.12 python3.11 python3; do \
	  path=$$(command -v $$name) || continue; \
	  "$$path" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
	    2>/dev/null && echo "$$path" && break; \
	done

# MLX's backend: none to choose on macOS; on Linux CUDA by the driver's version, else the CPU's.
EXTRA = if [ "$$(uname)" = Darwin ]; then :; else \
	  driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1); \
	  if [ "$${driver:-0}" -ge 580 ] 2>/dev/null; then echo '[cuda13]'; \
	  elif [ "$${driver:-0}" -ge 525 ] 2>/dev/null; then echo '[cuda12]'; \
	  else echo '[cpu]'; fi; fi
