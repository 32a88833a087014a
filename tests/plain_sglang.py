"""``python -m tests.plain_sglang``: stock SGLang, for tests that compare with it.

As ``sglang.launch_server``, but prepared for a machine without a GPU.
"""

from __future__ import annotations

# Outside the guard below: each process that SGLang spawns imports this module anew.
import cosched.bootstrap  # isort: skip

import runpy
import sys

if __name__ == "__main__":
    if not cosched.bootstrap.has_cuda():
        sys.argv += ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]
    runpy.run_module("sglang.launch_server", run_name="__main__")
