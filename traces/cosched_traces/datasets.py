"""Lengths of public datasets as distributions, each with its source.

A fit has the mean and the standard deviation of its source. Without a standard deviation it assumes
a coefficient of variation of 1 before truncation (BROS Table 2: 1.15 and 1.14 for ShareGPT, 1.64
and 0.96 for LMSYS-Chat-1M)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cosched_traces.lengths import Lengths, LogNormal, Quantiles, Uniform, fit_lognormal


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Published statistics of one length [tokens]."""

    mean: float
    low: int
    high: int
    std: float | None = None
    cv: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetLengths:
    """Prompt and output lengths of a dataset, with their source."""

    source: str
    prompt: Published | Lengths
    output: Published | Lengths

    @property
    def prompt_lengths(self) -> Lengths:
        return _distribution(self.prompt)

    @property
    def output_lengths(self) -> Lengths:
        return _distribution(self.output)


def _distribution(given: Published | Lengths) -> Lengths:
    return _fit(given) if isinstance(given, Published) else given


@functools.cache
def _fit(given: Published) -> LogNormal:
    return fit_lognormal(
        mean=given.mean, std=given.std, low=given.low, high=given.high, cv=given.cv
    )


# Probabilities of the tables of quantiles below: finer where the tails are long.
EDGES = (
    *(0, 0.01, 0.02, 0.05),
    *(round(0.1 + 0.05 * step, 2) for step in range(18)),
    *(0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1),
)


def quantile_table(text: str) -> Quantiles:
    """Values at the probabilities of `EDGES`."""
    return Quantiles(probabilities=EDGES, points=tuple(map(int, text.split())))


_OPT_CONTEXT = 2048  # BROS served OPT models: no dataset table of its own bounds, the model does

DATASETS = {
    "alpaca": DatasetLengths(
        source="EcoServe Table 2 (mean, min, max of 52K requests)",
        prompt=Published(mean=19.31, low=9, high=2470),
        output=Published(mean=58.41, low=13, high=292),
    ),
    "sharegpt": DatasetLengths(
        source="EcoServe Table 2 (mean, min, max of 90K requests)",
        prompt=Published(mean=161.31, low=16, high=3200),
        output=Published(mean=337.99, low=19, high=991),
    ),
    "bookcorpus": DatasetLengths(
        source="EcoServe Table 2 (mean, min, max of 11K requests; it splits prompts at 2048)",
        prompt=Published(mean=1952.11, low=18, high=461_000),
        output=Published(mean=681.2, low=32, high=1041),
    ),
    "sharegpt-bros": DatasetLengths(
        source="BROS Table 2 (mean, std), cut at the 2048 tokens of OPT",
        prompt=Published(mean=222.76, std=256.36, low=1, high=_OPT_CONTEXT),
        output=Published(mean=234.51, std=268.50, low=1, high=_OPT_CONTEXT),
    ),
    "lmsys": DatasetLengths(
        source="LMSYS-Chat-1M in BROS Table 2 (mean, std), cut at the 2048 tokens of OPT",
        prompt=Published(mean=90.50, std=148.52, low=1, high=_OPT_CONTEXT),
        output=Published(mean=237.04, std=228.21, low=1, high=_OPT_CONTEXT),
    ),
    "bros-offline": DatasetLengths(
        source="BROS §7.1: uniform in (512, 1024) and (32, 128)",
        prompt=Uniform(512, 1024),
        output=Uniform(32, 128),
    ),
    "demo-chat": DatasetLengths(
        source="made up for the demo: short enough for a small model on a CPU",
        prompt=Uniform(130, 430),
        output=Uniform(16, 64),
    ),
    "azure": DatasetLengths(
        source="quantiles of the Azure LLM inference trace 2023, conversation (CC-BY-4.0)",
        prompt=quantile_table(
            "2 29 91 181 207 372 387 396 403 414 703 984 1020 1045 1071 1097 1130 1189 1315 1877 "
            "2735 4083 4086 4090 4098 4142 4831 6212 14050"
        ),
        output=quantile_table(
            "7 16 24 41 54 67 77 85 91 96 103 113 129 151 177 217 384 395 400 411 424 451 468 509 "
            "540 601 644 954 1000"
        ),
    ),
    "arxiv": DatasetLengths(
        source=(
            "quantiles of arXiv summarization, Llama-2 tokenizer, total at most 4096 (Vidur, MIT)"
        ),
        prompt=quantile_table(
            "1 73 229 747 1242 1564 1802 1986 2150 2308 2453 2596 2730 2861 2996 3127 3249 3370 "
            "3490 3597 3702 3813 3837 3863 3892 3934 3963 4012 4054"
        ),
        output=quantile_table(
            "5 36 44 60 78 92 104 115 125 135 145 156 167 179 192 206 222 242 268 304 372 737 1324 "
            "2206 2775 3273 3583 3845 4056"
        ),
    ),
    "loogle": DatasetLengths(
        source=(
            "LooGLE (arXiv 2311.04939): documents of over 24k tokens on average (Echo §7.1: over "
            "10k words each); spread assumed; answers as in the short-dependency sample"
        ),
        prompt=Published(mean=24_000, low=13_000, high=131_072, cv=0.5),
        output=Uniform(2, 50),
    ),
}
