"""``python -m cosched.simulate`` is ``cosched simulate`` (`cosched.lab.simulate`)."""

from __future__ import annotations

import sys

from cosched.lab.simulate import main

if __name__ == "__main__":
    sys.exit(main())
