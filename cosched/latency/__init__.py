"""Latency: what an iteration costs, measured, modelled or guessed (docs/cost_models.md)."""

from cosched.latency.base import OVERLAPPED, SYNCHRONOUS, CostModel, CpuOverhead
from cosched.latency.capacity import kv_capacity_tokens
from cosched.latency.noise import NoisyModel
from cosched.latency.profile_model import MeasuredPoint, ProfileModel
from cosched.latency.registry import COST_MODELS, make_cost_model
from cosched.latency.specs import GPUS, MODELS, GpuSpec, ModelSpec, gpu_spec, model_spec

__all__ = [
    "COST_MODELS",
    "GPUS",
    "MODELS",
    "OVERLAPPED",
    "SYNCHRONOUS",
    "CostModel",
    "CpuOverhead",
    "GpuSpec",
    "MeasuredPoint",
    "ModelSpec",
    "NoisyModel",
    "ProfileModel",
    "gpu_spec",
    "kv_capacity_tokens",
    "make_cost_model",
    "model_spec",
]
