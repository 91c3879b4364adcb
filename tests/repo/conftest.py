"""Makes the tools importable, as their scripts do for themselves."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
