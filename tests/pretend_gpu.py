"""torch as it is beside eight GPUs, for as much as SGLang's arguments ask of it. Import it before
SGLang, in a process of its own: nothing can be computed there. PRETENDED_GPU: H100 (default) or
B200."""

import os
import subprocess
from types import SimpleNamespace
from unittest import mock

import torch

import cosched.bootstrap  # noqa: F401  # stands in for the compiled packages

_GB = 1 << 30
_NAME, _CAPABILITY, _SIZE_GB, _CORES = {
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 80, 132),
    "B200": ("NVIDIA B200", (10, 0), 180, 148),
}[os.environ.get("PRETENDED_GPU", "H100")]

os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
torch.version.cuda = "13.0"
for _name, _value in {
    "is_available": True,
    "is_initialized": True,
    "device_count": 8,
    "current_device": 0,
    "get_device_capability": _CAPABILITY,
    "get_device_name": _NAME,
    "mem_get_info": ((_SIZE_GB - 1) * _GB, _SIZE_GB * _GB),
    "get_device_properties": SimpleNamespace(
        name=_NAME,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_SIZE_GB * _GB,
        multi_processor_count=_CORES,
        warp_size=32,
    ),
}.items():
    mock.patch.object(torch.cuda, _name, return_value=_value).start()

_run = subprocess.run


def _answer_nvidia_smi(command, *args, **options):
    if "nvidia-smi" not in str(command):
        return _run(command, *args, **options)
    asks_memory = "memory.total" in str(command)
    line = str(_SIZE_GB * 1024 - 359) if asks_memory else ".".join(map(str, _CAPABILITY))
    return subprocess.CompletedProcess(command, 0, f"{line}\n" * 8, "")


mock.patch.object(subprocess, "run", _answer_nvidia_smi).start()
