"""``python -m cosched.run_batch`` is ``cosched batch`` (`cosched.batch.jsonl.command`)."""

from __future__ import annotations

import sys

from cosched.batch.jsonl.command import main

if __name__ == "__main__":
    sys.exit(main())
