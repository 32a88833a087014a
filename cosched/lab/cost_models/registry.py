"""Cost models by name."""

from __future__ import annotations

from pathlib import Path

from cosched.errors import ConfigError, choices
from cosched.lab.cost_models.cost_model import OVERLAPPED, CostModel, CpuOverhead, PrefixReads
from cosched.lab.cost_models.kernel_table import KernelTableModel
from cosched.lab.cost_models.noise import NoisyModel, SlowingModel
from cosched.lab.cost_models.profile_model import ProfileModel
from cosched.lab.cost_models.roofline import RooflineModel
from cosched.lab.cost_models.specs import GpuSpec, ModelSpec, gpu_spec, model_spec

COST_MODELS = {
    "kernel-table": "measured times of SGLang's kernels on a GPU (needs a folder of tables)",
    "profile": "fitted to iterations that cosched.profile measured (needs its file)",
    "roofline": "FLOPs and bytes of the model over the peaks of the GPU (needs no files)",
}


def make_cost_model(
    name: str,
    *,
    model: str | ModelSpec | None = None,
    gpu: str | GpuSpec | None = None,
    tp: int = 1,
    data_dir: Path | str | None = None,
    profile: Path | str | None = None,
    overhead: CpuOverhead = OVERLAPPED,
    mixed_decode_factor: float = 1.0,
    prefix_reads: str = PrefixReads.EACH.value,
    noise_sigma: float = 0.0,
    slower: float = 1.0,
    slower_after_s: float = 0.0,
    seed: int = 0,
) -> CostModel:
    """A cost model by name. ConfigError naming value and choices when something does not fit.

    model, gpu, tp       names or specs (kernel-table, roofline)
    data_dir             folder of the kernel tables, or root of the data set that contains them
    profile              file that cosched.profile wrote
    overhead             CPU time per iteration that is not hidden (kernel-table, roofline)
    mixed_decode_factor  of `GpuModel` (kernel-table, roofline)
    prefix_reads         how decodes read shared prefixes: a value of `PrefixReads` (kernel-table,
                         roofline)
    slower               factor on the time (`SlowingModel`) after `slower_after_s` of work
    noise_sigma          above 0: multiplied by lognormal noise of mean 1, drawn from `seed`
    """
    if name not in COST_MODELS:
        raise ConfigError(f"unknown cost model {name!r}; choose from {choices(COST_MODELS)}")
    if mixed_decode_factor != 1 and name == "profile":
        raise ConfigError(f"cost model {name!r} has no mixed_decode_factor: it was measured")
    if prefix_reads not in [way.value for way in PrefixReads]:
        raise ConfigError(
            f"prefix_reads is {prefix_reads!r}; choose from {choices([*PrefixReads])}"
        )
    made: CostModel
    if name == "profile":
        if prefix_reads != PrefixReads.EACH:
            raise ConfigError(f"cost model {name!r} was measured with prefix_reads 'each' only")
        if profile is None:
            raise ConfigError("cost model 'profile' needs profile, a file of cosched.profile")
        made = ProfileModel.load(Path(profile))
    else:
        if model is None or gpu is None:
            missing = "model" if model is None else "gpu"
            raise ConfigError(f"cost model {name!r} needs a {missing}")
        model = model_spec(model) if isinstance(model, str) else model
        gpu = gpu_spec(gpu) if isinstance(gpu, str) else gpu
        reads = PrefixReads(prefix_reads)
        if name == "roofline":
            made = RooflineModel(
                model=model,
                gpu=gpu,
                tp=tp,
                overhead=overhead,
                mixed_decode_factor=mixed_decode_factor,
                prefix_reads=reads,
            )
        elif data_dir is None:
            raise ConfigError(
                "cost model 'kernel-table' needs data_dir, the folder with the kernel tables; "
                "without tables choose 'roofline'"
            )
        else:
            made = KernelTableModel(
                model=model,
                gpu=gpu,
                tp=tp,
                data_dir=Path(data_dir),
                overhead=overhead,
                mixed_decode_factor=mixed_decode_factor,
                prefix_reads=reads,
            )
    if slower != 1:
        made = SlowingModel(made, factor=slower, after_s=slower_after_s)
    return NoisyModel(made, seed=seed, sigma=noise_sigma) if noise_sigma else made
