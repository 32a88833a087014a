"""``python -m cosched COMMAND ...`` is ``cosched COMMAND ...``."""

from __future__ import annotations

import sys

from cosched.cli import main

if __name__ == "__main__":
    sys.exit(main())
