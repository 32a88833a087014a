"""Latency: what an iteration costs, measured, modelled or guessed (docs/cost_models.md)."""

from cosched.core.batch import BatchTotals
from cosched.core.estimates import Predictor
from cosched.latency.base import OVERLAPPED, SYNCHRONOUS, CostModel, CpuOverhead
from cosched.latency.calibration import Calibrator
from cosched.latency.capacity import kv_capacity_tokens
from cosched.latency.features import TotalsTable, totals_table
from cosched.latency.graphs import GraphSizes
from cosched.latency.noise import NoisyModel
from cosched.latency.predictor import (
    PREDICTORS,
    FittedPredictor,
    fit_predictor,
    predictor_from_dict,
)
from cosched.latency.profile_file import EngineIdentity, MeasuredPoint, Profile
from cosched.latency.profile_model import ProfileModel
from cosched.latency.registry import COST_MODELS, make_cost_model
from cosched.latency.specs import GPUS, MODELS, GpuSpec, ModelSpec, gpu_spec, model_spec

__all__ = [
    "COST_MODELS",
    "GPUS",
    "MODELS",
    "OVERLAPPED",
    "PREDICTORS",
    "SYNCHRONOUS",
    "BatchTotals",
    "Calibrator",
    "CostModel",
    "CpuOverhead",
    "EngineIdentity",
    "FittedPredictor",
    "GpuSpec",
    "GraphSizes",
    "MeasuredPoint",
    "ModelSpec",
    "NoisyModel",
    "Predictor",
    "Profile",
    "ProfileModel",
    "TotalsTable",
    "fit_predictor",
    "gpu_spec",
    "kv_capacity_tokens",
    "make_cost_model",
    "model_spec",
    "predictor_from_dict",
    "totals_table",
]
