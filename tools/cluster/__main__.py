"""Runs the command line, by folder (`python tools/cluster`) and by module (`python -m cluster`)."""

import sys
from importlib import import_module
from pathlib import Path

# Run by folder, Python puts the package itself first on the path instead of what holds it.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    sys.exit(import_module("cluster.command").main())
