"""Which engine this is, as far as the time of its iterations depends on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from cosched.config import Config
from cosched.policies import policy_entry
from cosched.predict.calibration import Calibrator
from cosched.predict.fitted import GraphSizes
from cosched.predict.linear import CoschedPredictor
from cosched.predict.profile_file import EngineIdentity, Profile

STANDS_FOR = "cosched_stands_for"
"""Key in the ``config.json`` of a stand-in model: the identity of the engine that it plays."""


def calibrator_of(
    server_args: Any,
    model_config: Callable[[], Any],
    config: Config,
    *,
    graphs: GraphSizes | None = None,
) -> Calibrator:
    """Starts from the configuration's profile; cold without one, or where no plan depends on time.
    cosched's own predictor goes on learning from there, those of papers keep their form; that of a
    policy which names one is used as it is. ConfigError when the profile is of another engine."""
    entry = policy_entry(config.policy)
    if config.latency_model is None or not entry.timed:
        return Calibrator(graphs=graphs)
    expected = identity_of(server_args, model_config())
    profile = Profile.of_engine(Path(config.latency_model), expected)
    shape = profile.predictor_named(config.predictor or entry.predictor)
    if entry.predictor is not None:
        return Calibrator(shape, corrects=False)
    points = profile.points if isinstance(shape, CoschedPredictor) else ()
    return Calibrator(shape, graphs=graphs, points=[(p.batch, p.seconds) for p in points])


def identity_of(server_args: Any, model_config: Any) -> EngineIdentity:
    """The identity of the engine with these SGLang arguments and this model."""
    played = getattr(model_config.hf_config, STANDS_FOR, None)
    if played is not None:
        return EngineIdentity.from_dict(played)
    is_cpu = server_args.device == "cpu"
    return EngineIdentity(
        device=_cpu_name() if is_cpu else _device_name(server_args),
        num_cores=len(os.sched_getaffinity(0)) if is_cpu else None,
        model=str(model_config.model_path),
        num_layers=model_config.num_hidden_layers,
        hidden_size=model_config.hidden_size,
        num_heads=model_config.num_attention_heads,
        num_kv_heads=model_config.num_key_value_heads,
        vocab_size=model_config.vocab_size,
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantization=model_config.quantization,
        tp=server_args.tp_size,
        sglang=metadata.version("sglang"),
    )


def _device_name(server_args: Any) -> str:
    import torch

    module = torch.get_device_module(server_args.device)
    name: str = module.get_device_name(server_args.base_gpu_id)
    return name


def _cpu_name() -> str:
    """The model that Linux reports, or the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
