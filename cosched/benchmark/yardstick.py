"""The yardstick: one table that every policy is held against.

Llama-3.1-8B on an A100-80G. The Azure conversation trace as online beside four offline jobs:
documents of arXiv length that share nothing, shuffled prompts like those of MMLU 5-shot, 20
questions on each of 60 documents, shuffled, and long prompts with short replies beside short ones
with long replies. Sessions of a coding agent beside two of these, and chats of several turns beside
those like MMLU: there the KV that an offline request takes is what the next turn would have found.

Jobs end. Each is as large as what `hygen` does in 300 to 400 s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cosched.benchmark.progress import progress_of_runs
from cosched.benchmark.report import (
    attainment_cell,
    bound_cells,
    job_cells,
    markdown_table,
)
from cosched.benchmark.suite import SuiteResult, num_runs, run_suite
from cosched.core.request import Slo
from cosched.errors import ConfigError, choices
from cosched.metrics.table import markdown_rows
from cosched.simulation.options import data_dir_of, run_spec_of
from cosched.simulation.run import DEFAULT_SLO, RunResult, RunSpec, WorkloadSpec
from cosched.simulation.scenario import SCENARIOS, scenario
from cosched.simulation.store import ResultStore
from cosched.versions import versions

__all__ = ["MOST_DURATION_S", "WORKLOADS", "run_yardstick", "specs_of", "yardstick_page"]


MOST_DURATION_S = 1200.0
"""A job that is not done after three times as long as it takes `hygen` does not end [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """An offline workload of the yardstick and the online one beside it.

    num_requests  of the offline workload; None: the whole of it
    online        by whether there is a data folder: without one it is generated
    kv_tokens     capacity of the KV pool; None: what the GPU has left
    """

    workload: str
    title: str
    online: Mapping[bool, WorkloadSpec]
    num_requests: int | None = None
    slo: Slo = DEFAULT_SLO
    kv_tokens: int | None = None


_CHAT = {
    True: WorkloadSpec(name="azure-conv", rate=2.5),
    False: WorkloadSpec(name="azure-like", rate=2.5),
}

# As many as the GPU bears: with six, stock scheduling misses a quarter of the targets without any
# offline request. Their contexts fit the pool, and leave little of it.
_AGENTS = {
    True: WorkloadSpec(name="agents", num_sessions=5),
    False: WorkloadSpec(name="agents-like", num_sessions=5),
}
_AGENTS_SLO = Slo(ttft_s=3.0, tpot_s=0.05)
_AGENTS_KV_TOKENS = 400_000

# A turn whose context is in the cache is answered in a twentieth of a second: a target of a second
# would not tell whether it is.
_CHATS_SLO = Slo(ttft_s=0.3, tpot_s=0.05)

WORKLOADS: Mapping[str, _Pair] = {
    "i": _Pair(
        workload="arxiv",
        title="(i) documents of arXiv length, nothing shared",
        num_requests=600,
        online=_CHAT,
    ),
    "ii": _Pair(
        workload="mmlu-like",
        title="(ii) like MMLU 5-shot, shuffled: 57 shared prefixes",
        num_requests=20_000,
        online=_CHAT,
    ),
    "iii": _Pair(
        workload="documents",
        title="(iii) 20 questions on each of 60 documents of 6-14k tokens",
        num_requests=1200,
        online=_CHAT,
    ),
    "iv": _Pair(
        workload="arxiv",
        title="(iv) sessions of a coding agent beside the documents of (i)",
        num_requests=350,
        online=_AGENTS,
        slo=_AGENTS_SLO,
        kv_tokens=_AGENTS_KV_TOKENS,
    ),
    "iv-b": _Pair(
        workload="documents",
        title="(iv-b) sessions of a coding agent beside the questions of (iii)",
        num_requests=700,
        online=_AGENTS,
        slo=_AGENTS_SLO,
        kv_tokens=_AGENTS_KV_TOKENS,
    ),
    "v": _Pair(
        workload="mmlu-like",
        title="(v) chats of several turns beside the prompts of (ii), in a pool too small for both",
        online={
            has_data: WorkloadSpec(name="multi-turn", num_sessions=128)
            for has_data in (True, False)
        },
        num_requests=18_000,
        slo=_CHATS_SLO,
        kv_tokens=280_000,
    ),
    "vi": _Pair(
        workload="summaries-and-stories",
        title="(vi) prompts for the arithmetic beside replies for the memory",
        num_requests=480,
        online=_CHAT,
    ),
}


def run_yardstick(
    arguments: argparse.Namespace,
    *,
    num_jobs: int,
    quiet: bool,
    names: Sequence[str],
    store: ResultStore | None = None,
) -> dict[str, SuiteResult]:
    """Run every scenario on each pair of workloads: title -> results.

    Options given on the command line win over the yardstick's own; ``--offline`` picks a pair by
    its number, or those with an offline workload by its name.
    """
    specs = specs_of(arguments)
    num_seeds = arguments.seeds
    planned = [num_runs(spec, names, num_seeds=num_seeds) for spec in specs.values()]
    suites = {}
    with progress_of_runs(
        "yardstick",
        total=sum(count for count, _ in planned),
        is_estimate=any(is_estimate for _, is_estimate in planned),
        quiet=quiet,
    ) as on_run:
        for key, spec in specs.items():
            suites[WORKLOADS[key].title] = run_suite(
                spec,
                names,
                num_jobs=num_jobs,
                num_seeds=num_seeds,
                store=store,
                on_run=partial(_on_run_of, key, on_run),
            )
    return suites


def _on_run_of(
    key: str, on_run: Callable[[str, RunResult], None], name: str, result: RunResult
) -> None:
    on_run(f"({key}) {name}", result)


def specs_of(arguments: argparse.Namespace) -> dict[str, RunSpec]:
    """What is run for each pair of workloads that the options ask for: its number -> run."""
    chosen = {
        key: pair
        for key, pair in WORKLOADS.items()
        if arguments.offline in (None, key, pair.workload)
    }
    if not chosen:
        raise ConfigError(
            f"--offline {arguments.offline!r} is no set of the yardstick; choose from "
            f"{choices({*WORKLOADS, *(pair.workload for pair in WORKLOADS.values())})}"
        )
    return {key: _spec(arguments, pair) for key, pair in chosen.items()}


def _spec(arguments: argparse.Namespace, pair: _Pair) -> RunSpec:
    online = pair.online[data_dir_of(arguments) is not None]
    given = argparse.Namespace(**vars(arguments))
    given.offline = pair.workload
    given.offline_requests = arguments.offline_requests or pair.num_requests
    given.kv_tokens = arguments.kv_tokens or pair.kv_tokens
    given.slo_ttft = arguments.slo_ttft or pair.slo.ttft_s
    given.slo_tpot = arguments.slo_tpot or pair.slo.tpot_s
    given.online = arguments.online or online.name
    if arguments.online_rate is None and arguments.online_sessions is None:
        given.online_rate, given.online_sessions = online.rate, online.num_sessions
    return run_spec_of(given, scenario("s1"))


def yardstick_page(arguments: argparse.Namespace, suites: Mapping[str, SuiteResult]) -> str:
    """What is compared, the tables, and the command that made them, as Markdown."""
    spec = _spec_of(next(iter(suites.values())))
    made_with = versions()
    parts = [
        "# The yardstick\n",
        "Generated by `python -m cosched.bench yardstick --write FILE`.\n",
        _what(spec, num_seeds=len(next(iter(next(iter(suites.values())).seeds.values())))),
        "## Scenarios\n",
        "\n".join(f"* `{name}`: {entry.summary}" for name, entry in SCENARIOS.items())
        + "\n* `NAME-tuned`: that baseline at its best: of a search over `--chunked-prefill-size` "
        "(256 to 1024 in steps of 64, and 2048, 4096, 8192), mixed chunks and `--schedule-policy` "
        "where stock schedules, and the rate or the cap of offline requests, the setting with the "
        "most offline throughput within 1 point of s0's attainment, or the highest attainment "
        "where none gets there\n"
        "\nThe rate of `hygen-throttled` is searched likewise, up to that of `offline-fcfs`, at "
        "SGLang's chunk size.\n",
    ]
    parts += ["## All of them\n", _all_of(suites)]
    for title, suite in suites.items():
        parts += [
            f"## {title}\n",
            _beside(_spec_of(suite)),
            markdown_table(suite.rows, suite.seeds),
        ]
        for name, sweep in suite.sweeps.items():
            parts += [
                f"<details><summary>the sweep behind {name}</summary>\n",
                markdown_table(sweep),
                "</details>\n",
            ]
    profile = model = ""
    begins = "Policies that predict times begin without a profile and learn while they run."
    if arguments.latency_model is not None:
        profile = "python -m cosched.profile measure --virtual --write a100.json\n"
        model = "--latency-model a100.json "
        begins = (
            "Policies that predict times begin with the profile that the first command measures."
        )
    parts.append(
        "## How to run it again\n\n"
        "```bash\n"
        f"{profile}python -m cosched.bench yardstick --data-dir DIR --duration {spec.duration_s:g} "
        f"--seed {spec.seed} --seeds {arguments.seeds} {model}--write FILE\n"
        "```\n\n"
        f"{begins}\n\n"
        "`DIR` holds the public traces and kernel tables named in docs/workloads.md and "
        "docs/cost_models.md. Without it the online trace and the offline sets are generated with "
        "the same statistics, and the cost model is `roofline`.\n\n"
        f"Made with cosched {made_with['cosched']} (commit {made_with['commit']}), "
        f"sglang {made_with['sglang']}, seed {spec.seed}.\n"
    )
    return "\n".join(parts)


def _all_of(suites: Mapping[str, SuiteResult]) -> str:
    """One row for each job and scenario beside online requests."""
    rows = []
    for title, suite in suites.items():
        ground = title.split()[0]
        beside = {n: s for n, s in suite.seeds.items() if s[0].result.spec.scenario.has_online}
        for name, seeds in beside.items():
            has_job = seeds[0].result.spec.scenario.has_offline
            job = job_cells(seeds) if has_job else [""] * 5
            rows.append([ground, suite.rows[name].name, attainment_cell(seeds), *job])
        bound = bound_cells(beside)
        if bound is not None:
            rows.append([ground, "bound", "", *bound])
    headers = ("job", "scenario", "both met %", "job done s", "mean completion s")
    return markdown_rows((*headers, "p95 completion s", "work/s", "of bound %"), rows)


def _spec_of(suite: SuiteResult) -> RunSpec:
    return next(iter(suite.rows.values())).result.spec


def _beside(spec: RunSpec) -> str:
    """What differs between the pairs of workloads."""
    online = spec.online
    load = "No online requests"
    if online is not None and online.num_sessions is not None:
        load = f"Online `{online.name}`, {online.num_sessions} sessions at a time"
    elif online is not None:
        load = f"Online `{online.name}` at {online.rate or 'its own'} req/s"
    return (
        f"{load}; targets TTFT {spec.slo.ttft_s} s and TPOT {spec.slo.tpot_s} s; "
        f"{spec.machine.capacity():,} KV tokens.\n"
    )


def _what(spec: RunSpec, *, num_seeds: int) -> str:
    machine = spec.machine.describe()
    over_seeds = (
        f"\n*Both met*, completion and work are means over {num_seeds} seeds with the 95 % "
        "interval of Student's t; all else is of the first seed, with which the searches are "
        "made.\n"
        if num_seeds > 1
        else ""
    )
    knows = (
        "Clients ask for as many tokens as the reply has, so every policy knows all lengths."
        if spec.clairvoyant
        else "Clients ask for the most tokens that their data set has: no policy knows a length."
    )
    return (
        f"{machine['model']} on {machine['tp']} x {machine['gpu']}; cost model "
        f"`{spec.cost.name}`, decodes {spec.cost.mixed_decode_factor:g} times as dear beside "
        f"prefills; at most {spec.duration_s:g} s. SGLang's own scheduler runs in virtual time; "
        f"only the forward pass is modelled (docs/architecture.md). {knows}\n\n"
        "A run ends when its job is done, or after that time; one of a search gives up once too "
        "many online requests have missed their targets. *s0 in that window* is what online "
        "requests alone reach in the same time. *Job done* is the end of the last line, *work/s* "
        "the device seconds done per second, of which *bound* is the most beside the online "
        "requests. *Offline tok/s* counts the prompts whose first token came out and all output "
        "tokens; the *ceiling* is the best of the offline-only runs. Definitions: "
        f"docs/metrics.md.\n{over_seeds}"
    )
