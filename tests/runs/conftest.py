"""Tiny policies are those of the trainer's tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "training"))
