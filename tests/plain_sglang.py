"""``python -m tests.plain_sglang``: SGLang's own ``sglang serve``, prepared for a machine without a
GPU."""

from __future__ import annotations

# Outside the guard below: each process that SGLang spawns imports this module anew.
import cosched.bootstrap  # isort: skip

import sys

if __name__ == "__main__":
    if not cosched.bootstrap.has_cuda():
        sys.argv += ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]
    from sglang.cli.main import main

    sys.argv[1:1] = ["serve"]
    main()
