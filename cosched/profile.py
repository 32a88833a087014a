"""``python -m cosched.profile`` is ``cosched profile`` (`cosched.lab.profile`)."""

from __future__ import annotations

import sys

from cosched.lab.profile import main

if __name__ == "__main__":
    sys.exit(main())
