"""``python -m cosched.bench`` is ``cosched bench`` (`cosched.lab.bench`)."""

from __future__ import annotations

import sys

from cosched.lab.bench import main

if __name__ == "__main__":
    sys.exit(main())
