"""Cost models by name: the one place that knows which there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cosched.errors import ConfigError, choices
from cosched.lab.cost_models.base import OVERLAPPED, CostModel, CpuOverhead, PrefixReads
from cosched.lab.cost_models.kernel_table import KernelTableModel
from cosched.lab.cost_models.noise import NoisyModel, SlowingModel
from cosched.lab.cost_models.profile_model import ProfileModel
from cosched.lab.cost_models.roofline import RooflineModel
from cosched.lab.cost_models.specs import GpuSpec, ModelSpec, gpu_spec, model_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What a caller asked for; None where it said nothing."""

    model: ModelSpec | None
    gpu: GpuSpec | None
    tp: int
    data_dir: Path | None
    profile: Path | None
    overhead: CpuOverhead
    mixed_decode_factor: float
    prefix_reads: PrefixReads

    def hardware(self, name: str) -> tuple[ModelSpec, GpuSpec]:
        if self.model is None or self.gpu is None:
            missing = "model" if self.model is None else "gpu"
            raise ConfigError(f"cost model {name!r} needs a {missing}")
        return self.model, self.gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModelEntry:
    """One named cost model. `summary` is one line for ``--help``."""

    name: str
    summary: str
    make: Callable[[_Request], CostModel]


def _kernel_table(request: _Request) -> CostModel:
    model, gpu = request.hardware("kernel-table")
    if request.data_dir is None:
        raise ConfigError(
            "cost model 'kernel-table' needs data_dir, the folder with the kernel tables; "
            "without tables choose 'roofline'"
        )
    return KernelTableModel(
        model=model,
        gpu=gpu,
        tp=request.tp,
        data_dir=request.data_dir,
        overhead=request.overhead,
        mixed_decode_factor=request.mixed_decode_factor,
        prefix_reads=request.prefix_reads,
    )


def _roofline(request: _Request) -> CostModel:
    model, gpu = request.hardware("roofline")
    return RooflineModel(
        model=model,
        gpu=gpu,
        tp=request.tp,
        overhead=request.overhead,
        prefix_reads=request.prefix_reads,
    )


def _profile(request: _Request) -> CostModel:
    if request.profile is None:
        raise ConfigError("cost model 'profile' needs profile, a file that cosched.profile wrote")
    return ProfileModel.load(request.profile)


_ENTRIES = (
    CostModelEntry(
        name="kernel-table",
        summary="measured SGLang kernel times of a GPU (needs a folder of tables)",
        make=_kernel_table,
    ),
    CostModelEntry(
        name="profile",
        summary="fitted to iterations of a live engine (needs its profile file)",
        make=_profile,
    ),
    CostModelEntry(
        name="roofline",
        summary="FLOPs and bytes of the model over the peaks of the GPU (needs no files)",
        make=_roofline,
    ),
)

COST_MODELS: Mapping[str, CostModelEntry] = {entry.name: entry for entry in _ENTRIES}
assert len(COST_MODELS) == len(_ENTRIES), "duplicate cost model name"


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

    model, gpu, tp  what runs where; names or specs (kernel-table, roofline)
    data_dir        folder of the kernel tables, or the root of the data set they lie in
    profile         file that cosched.profile wrote
    overhead        CPU time per iteration that nothing hides (kernel-table, roofline)
    mixed_decode_factor  of `KernelTableModel`; the others have no such part
    prefix_reads    how decodes read what they have in common: a value of `PrefixReads`
                    (kernel-table, roofline)
    slower          times as long it takes (`SlowingModel`) once it has worked for `slower_after_s`
    noise_sigma     above 0: multiplied by lognormal noise of mean 1, drawn from `seed`
    """
    if name not in COST_MODELS:
        raise ConfigError(f"unknown cost model {name!r}; choose from {choices(COST_MODELS)}")
    if mixed_decode_factor != 1 and name != "kernel-table":
        raise ConfigError(f"cost model {name!r} has no mixed_decode_factor; kernel-table has one")
    if prefix_reads not in [way.value for way in PrefixReads]:
        raise ConfigError(
            f"prefix_reads is {prefix_reads!r}; choose from {choices([*PrefixReads])}"
        )
    if prefix_reads != PrefixReads.EACH and name == "profile":
        raise ConfigError(f"cost model {name!r} was measured, and knows no prefix_reads but 'each'")
    request = _Request(
        model=model_spec(model) if isinstance(model, str) else model,
        gpu=gpu_spec(gpu) if isinstance(gpu, str) else gpu,
        tp=tp,
        data_dir=None if data_dir is None else Path(data_dir),
        profile=None if profile is None else Path(profile),
        overhead=overhead,
        mixed_decode_factor=mixed_decode_factor,
        prefix_reads=PrefixReads(prefix_reads),
    )
    made = COST_MODELS[name].make(request)
    if slower != 1:
        made = SlowingModel(made, factor=slower, after_s=slower_after_s)
    return NoisyModel(made, seed=seed, sigma=noise_sigma) if noise_sigma else made
