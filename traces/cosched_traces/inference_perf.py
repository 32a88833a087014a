"""Workloads of inference-perf's catalogue (kubernetes-sigs/inference-perf, ``workload-catalog``),
from the statistics that their ``config.json`` publish.

The normal distributions there are lognormal ones of the same mean and deviation here; the bimodal
one is two even stretches with its mean and deviation. Each has one system prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from cosched_traces.builders import Asked, Build, generated
from cosched_traces.lengths import Fixed, Lengths, Quantiles, Uniform, fit_lognormal
from cosched_traces.offline_sets import PrefixGroups
from cosched_traces.sessions import Sessions, SessionSet
from cosched_traces.workload import Workload

_LINES = 1000


def _scaled(mean: float, std: float, low: int, high: int) -> Quantiles:
    """A lognormal distribution as a table of quantiles, for times [s]."""
    drawn = fit_lognormal(mean=mean, std=std, low=low, high=high)
    points = [low, *(drawn.at(step / 20) for step in range(1, 20)), high]
    return Quantiles(
        probabilities=tuple(step / 20 for step in range(21)), points=tuple(map(round, points))
    )


def chat(asked: Asked) -> Sessions:
    """``interactive-chat``: p99 of TTFT 500 ms, of ITL 50 ms."""
    kind = SessionSet(
        turns=fit_lognormal(mean=4, std=2.5, low=1, high=15),
        first=fit_lognormal(mean=2400, std=2500, low=500, high=14_000),
        later=fit_lognormal(mean=50, std=40, low=10, high=1000),
        output=fit_lognormal(mean=300, std=150, low=10, high=1000),
        think=_scaled(45, 40, 5, 300),
        max_context_tokens=16_000,
        head_tokens=(1000,),
    )
    return generated(kind)(asked)


def summarization() -> tuple[int, Lengths, Lengths]:
    """``batch-summarization-rag``: a few long prompts among shorter ones."""
    prompts = Quantiles(probabilities=(0, 0.8, 0.8, 1), points=(1000, 8000, 34_000, 80_000))
    return 500, prompts, fit_lognormal(mean=500, std=300, low=50, high=2000)


def synthetic_data() -> tuple[int, Lengths, Lengths]:
    """``batch-synthetic-data-generation``: short prompts, long replies."""
    prompts = fit_lognormal(mean=500, std=1200, low=50, high=15_000)
    return 2000, prompts, Uniform(500, 8000)


def batch_of(lengths: Callable[[], tuple[int, Lengths, Lengths]]) -> Build:
    """An offline set behind one system prompt. lengths: of it, the prompts and the replies."""

    def build(asked: Asked) -> Workload:
        head, prompts, outputs = lengths()
        groups = PrefixGroups(
            num_groups=1,
            requests_per_group=asked.num_requests or _LINES,
            shared=Fixed(head),
            unique=prompts,
            output=outputs,
        )
        return groups.workload(asked.name, seed=asked.seed)

    return build
