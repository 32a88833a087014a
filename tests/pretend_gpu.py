"""torch as it is beside eight H100s, for as much as SGLang's arguments ask of it. Import it before
SGLang, in a process of its own: nothing can be computed there."""

import os
import subprocess
from types import SimpleNamespace
from unittest import mock

import torch

import cosched.bootstrap  # noqa: F401  # stands in for the compiled packages

_GB = 1 << 30
_NAME = "NVIDIA H100 80GB HBM3"

os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
torch.version.cuda = "13.0"
for _name, _value in {
    "is_available": True,
    "is_initialized": True,
    "device_count": 8,
    "current_device": 0,
    "get_device_capability": (9, 0),
    "get_device_name": _NAME,
    "mem_get_info": (79 * _GB, 80 * _GB),
    "get_device_properties": SimpleNamespace(
        name=_NAME,
        major=9,
        minor=0,
        total_memory=80 * _GB,
        multi_processor_count=132,
        warp_size=32,
    ),
}.items():
    mock.patch.object(torch.cuda, _name, return_value=_value).start()

_run = subprocess.run


def _answer_nvidia_smi(command, *args, **options):
    if "nvidia-smi" not in str(command):
        return _run(command, *args, **options)
    line = "81559" if "memory.total" in str(command) else "9.0"
    return subprocess.CompletedProcess(command, 0, f"{line}\n" * 8, "")


mock.patch.object(subprocess, "run", _answer_nvidia_smi).start()
