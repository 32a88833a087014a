"""The kernels on a real GPU: the types and sizes that the interpreter cannot do."""

import pytest
import torch

from tests.scripts import script

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_outputs_are_those_of_float64(dtype, head_dim):
    module = script("gpu_kernels")
    heads = module.HeadShape(num_q_heads=32, num_kv_heads=8, head_dim=head_dim)
    shape = module.Shape(batch=37, documents=3, prefix=3000)
    assert module.check(module.Card("cuda"), shape, heads, dtype)["error"] < 0.03
