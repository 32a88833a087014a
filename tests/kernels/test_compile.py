"""The kernels compile for real GPUs without one, and stay within their limits."""

import pytest

from cosched_kernels.compile_table import (
    SHARED_MEMORY,
    compile_apart,
    compile_attend,
    compile_reduce,
)
from cosched_kernels.shared_prefix import tiles_for


# Wide tiles run on the strongest tensor cores that there are; those of sm_90 take 64 rows at once.
@pytest.mark.parametrize(
    "arch, rows, options, core",
    [
        (80, 64, {}, "HMMA"),
        (80, 128, {"kv": "fp8e5"}, "HMMA"),
        (80, 64, {"head_dim": 256}, "HMMA"),
        (80, 16, {"head_dim": 256, "kv": "fp8e5"}, "HMMA"),
        (90, 16, {}, "HMMA"),
        (90, 64, {"kv": "fp8e4nv"}, "HGMMA"),
        (90, 128, {"q": "fp16", "kv": "fp16"}, "HGMMA"),
        (100, 64, {}, "UTCHMMA"),
    ],
)
def test_attention_compiles_without_spills(arch, rows, options, core):
    found = compile_attend(arch, rows, **options)
    assert found.spilled == 0
    assert found.shared_memory <= SHARED_MEMORY[arch] / tiles_for(found.head_dim)[rows].per_sm
    assert found.tensor_core == core
    assert found.async_copies > 0


def test_weighing_pieces_compiles_without_spills():
    found = compile_reduce(90)
    assert found.spilled == 0
    assert found.shared_memory <= SHARED_MEMORY[90]


@pytest.mark.long
def test_architectures_do_not_disturb_each_other():
    """In one process, what was first compiled for sm_90 makes Triton use conversions of float8 that
    sm_80 does not have."""
    found = list(compile_apart([(90, [256], ["fp8e5"]), (80, [256], ["fp8e5"])]))
    assert [row.arch for row in found] == [90] * 3 + [80] * 3
