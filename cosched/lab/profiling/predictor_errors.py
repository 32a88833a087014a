"""Errors of the predictors on iterations of a profile that they were not fitted to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cosched.core.batch import BatchShape, BatchTotals
from cosched.errors import ConfigError
from cosched.predict.fitted import ErrorSummary, GraphSizes, fit_predictor, summarise
from cosched.predict.linear import CoschedPredictor
from cosched.predict.profile_file import MeasuredPoint, Profile

KINDS = ("prefill", "cached prefill", "decode", "mixed", "all")
TITLES = {
    "hygen": "HyGen (§4.2, Eq. 1)",
    "echo": "Echo (§5.2, Eq. 6 to 8)",
    "bros": "BROS (§4.1, cost model C)",
    "cosched": "cosched",
}
"""Predictor -> its row in a table."""

ByKind = Mapping[str, ErrorSummary]
"""Kind of batch -> relative errors."""


def kind_of(batch: BatchShape) -> str:
    """Which of the four kinds of designed batches this is."""
    if not batch.prefills:
        return "decode"
    if batch.decodes:
        return "mixed"
    return "cached prefill" if any(p.num_cached for p in batch.prefills) else "prefill"


class Split(NamedTuple):
    """Points to fit a predictor to, and points to compare it with."""

    fitted: Sequence[MeasuredPoint]
    held_out: Sequence[MeasuredPoint]

    @classmethod
    def of(cls, points: Sequence[MeasuredPoint], *, share: float, seed: int) -> Split:
        """share: of the points that is held out (0-1). ConfigError if that is none, or all."""
        order = np.random.default_rng(seed).permutation(len(points)).tolist()
        num_held_out = round(len(points) * share)
        if not 0 < num_held_out < len(points):
            raise ConfigError(f"{len(points)} batches are too few to hold some out")
        shuffled = [points[place] for place in order]
        return cls(shuffled[num_held_out:], shuffled[:num_held_out])

    def errors(self, predictor: str, *, graphs: GraphSizes | None) -> ByKind:
        """Of the named form. ConfigError when there are too few batches of a kind to fit it."""
        batches, seconds = zip(*((p.batch, p.seconds) for p in self.fitted), strict=True)
        fitted = fit_predictor(predictor, batches, seconds, graphs=graphs)
        pairs: dict[str, list[tuple[float, float]]] = {}
        for point in self.held_out:
            pair = fitted.predict_s(BatchTotals.of(point.batch)), point.seconds
            for kind in (kind_of(point.batch), "all"):
                pairs.setdefault(kind, []).append(pair)
        return {kind: summarise(*zip(*of_kind, strict=True)) for kind, of_kind in pairs.items()}


def graphs_of(profile: Profile) -> GraphSizes | None:
    """Sizes with CUDA graphs of the profiled engine, as its fitted predictor has them."""
    predictor = profile.predictor
    if not isinstance(predictor, CoschedPredictor):
        return None
    return GraphSizes(prefill=predictor.prefill.graphs, decode=predictor.decode.graphs)


def markdown(errors: Mapping[str, Mapping[str, ByKind]]) -> Iterator[str]:
    """Engine -> predictor -> errors, as a table: mean / p99 of the relative errors [%]."""
    yield f"| engine | predictor | {' | '.join(KINDS)} | bias |"
    yield "|---" * (3 + len(KINDS)) + "|"
    for engine, of_engine in errors.items():
        for predictor, of_kind in of_engine.items():
            cells = (
                f"{100 * of_kind[kind].mean:.1f} / {100 * of_kind[kind].p99:.0f}"
                if kind in of_kind
                else ""
                for kind in KINDS
            )
            bias = f"{100 * of_kind['all'].bias:+.1f}"
            yield f"| {engine} | {TITLES[predictor]} | {' | '.join(cells)} | {bias} |"


_PAGE = """\
# Errors of the predictors

The [forms of the papers](../architecture.md#iteration-time) and cosched's, each fitted to
{fitted:.0%} of the designed batches of a profile, on the others: mean / p99 of the relative errors
[%], and the mean of the signed errors of all (bias). Designed batches spread wider than what a
server runs: up to the longest context, the largest prefill and hundreds of decodes. HyGen reports
1.07 and 1.78 % on iterations of one trace (§5.3, Fig. 7); the other papers report none.

{table}

cosched's form also knows the sizes of CUDA graphs. In the papers' forms a chunk over a cached
prefix costs what one over none does (HyGen), decodes cost the same however many there are (Echo),
and a mixed batch costs the sum of its parts (BROS). Deviations:
[the papers](papers.md#deviations-from-hygen-and-echo).

```bash
python -m cosched.profile measure --write a100.json --virtual --gpu A100-80 --data-dir DIR
python -m cosched.profile errors a100.json h100.json h200.json --write docs/results/predictors.md
```

Seed {seed}, commit {commit}, SGLang {sglang}.
"""


def page(
    errors: Mapping[str, Mapping[str, ByKind]],
    *,
    held_out: float,
    seed: int,
    made_with: Mapping[str, str | None],
) -> str:
    """``docs/results/predictors.md``."""
    return _PAGE.format(
        table="\n".join(markdown(errors)),
        fitted=1 - held_out,
        seed=seed,
        commit=made_with["commit"],
        sglang=made_with["sglang"],
    )
