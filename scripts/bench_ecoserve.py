#!/usr/bin/env python3
"""EcoServe's evaluation (§2, §4) in virtual time, figure by figure.

    .venv/bin/python scripts/bench_ecoserve.py --figures table 10 11 --data-dir DIR --results DIR

`stock` is SGLang alone at the rates, as it comes and tuned; `table` every allocation under a
saturated queue, pages of 1 and 32; 1 and 13 all schedulers at one load; 4, 5 and 12 the sweeps of
`SWEEPS`; 10 the sweep over rates, and the highest rate that each sustains (`sustained` is that
alone); 11 the parts of EcoServe; 2 and 6 groups of equal length and the KV of those that wait;
`forward` the forward size that saturates the machine.

Rates are shares of the capacity: what stock SGLang serves of a saturated queue with the setting of
`TUNED` that serves most. Targets of JCT come from an unloaded run. Both are measured first. Every
run is kept in --results, so an interrupted call goes on where it was; `--duration 60` is a look at
it. Rows whose policy is not there are named and left out.

Clients ask for the most that the data set has; what a policy knows of lengths is `--lengths`.

`--latency-models DIR` has a profile per machine (`opt-13b.json`, ...), each of `python -m
cosched.profile measure --virtual` with the machine's options; where there is none policies learn
while they run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from measuring import end, parser_of, runs_of, show

from cosched.benchmark.jct import (
    NORMALIZED_LIMIT,
    Measures,
    Unloaded,
    at_rate,
    measure,
    saturated,
    sustained_rate,
    unloaded,
    unloaded_of,
)
from cosched.core.batch import BatchShape, BatchTotals, Prefill
from cosched.core.estimates import Predictor
from cosched.cost_models.base import CostModel
from cosched.decision_log.groups import Groups, read_groups
from cosched.decision_log.read import read_log
from cosched.errors import ConfigError, choices
from cosched.metrics.figure import check_can_draw
from cosched.metrics.plots_sweep import Panel, plot_panels
from cosched.metrics.table import markdown_rows
from cosched.policy.forward_size import target_forward_size
from cosched.simulation.machine import Machine
from cosched.simulation.parallel import call_all
from cosched.simulation.run import (
    CostSpec,
    RunResult,
    RunSpec,
    WorkloadSpec,
    config_of,
    cost_model_of,
    execute,
)
from cosched.simulation.scenario import scenario
from cosched.simulation.store import ResultStore

MACHINES = {
    "opt-13b": Machine(model="OPT-13B", gpu="A100-80", kv_tokens=14_648),
    "llama-33b": Machine(model="Llama-33B", gpu="A100-80", tp=2, kv_tokens=12_019),
    "opt-175b": Machine(model="OPT-175B", gpu="A100-80", tp=8, kv_tokens=55_949),
}
"""EcoServe §2.1, §4: 12, 19.2 and 264 GB of KV cache."""

LARGE = {"opt-175b": 4}
"""Machines that need so many times the flood; their ORCA runs 16 requests at once (§4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """What the paper found best of a data set (§2.3, §4), and what a look at it needs.

    flood     requests/s that no scheduler here serves on OPT-13B; see `flood_of`
    stretch   its runs are so many times as long: requests come more seldom, or more often
    sigma     of `oracle-noise`: with `padding`, as many lengths are enough as the paper's predictor
              had (77.5, 73.2, 69.8 %)
    padding, reserve, buffer  shares of the predicted length, of the pool, of the length
    """

    flood: float
    stretch: float
    sigma: float
    padding: float
    reserve: float
    buffer: float


DATA_SETS = {
    "alpaca": DataSet(flood=80, stretch=0.5, sigma=0.13, padding=0.10, reserve=0.02, buffer=0.15),
    "sharegpt": DataSet(flood=6, stretch=1, sigma=0.23, padding=0.15, reserve=0.03, buffer=0.15),
    "bookcorpus": DataSet(
        flood=1.2, stretch=3, sigma=0.35, padding=0.20, reserve=0.04, buffer=0.10
    ),
}


def flood_of(data: str, machine: str) -> float:
    """Requests/s that saturate the machine."""
    return DATA_SETS[data].flood * LARGE.get(machine, 1)


LENGTHS: Mapping[str, Callable[[DataSet], dict[str, Any]]] = {
    "oracle": lambda data: {"mode": "oracle"},
    "oracle-noise": lambda data: {
        "mode": "oracle-noise",
        "sigma": data.sigma,
        "padding": data.padding,
    },
    "histogram": lambda data: {"mode": "histogram", "coverage": 0.75},
    "limit": lambda data: {"mode": "limit"},
}
"""`cosched.length.config.LengthConfig` by name; the coverage of `histogram` is that with which the
policies come that give memory out by length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table.

    scenario       by name, of a policy too
    large          in its place on `LARGE` machines; None: the same
    machine        fields of `Machine` that differ
    config         keys of the configuration
    reads_lengths  it is run with each of --lengths
    is_ecoserve    it has the data set's reserve and buffer
    """

    scenario: str
    large: str | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    reads_lengths: bool = False
    is_ecoserve: bool = False


def _ecoserve(scenario: str, *, reads_lengths: bool = True, **config: Any) -> Row:
    return Row(scenario=scenario, config=config, reads_lengths=reads_lengths, is_ecoserve=True)


HOST_KV_TOKENS = 200_000
"""Of rows that copy stopped requests out: more than is ever stopped at a time."""

STOCK = Row(scenario="s0", machine={"radix_cache": False})

ROWS: Mapping[str, Row] = {
    "sglang": STOCK,
    "sarathi": Row(scenario="sarathi"),
    "hygen": Row(scenario="hygen"),
    "cosched": Row(scenario="cosched", reads_lengths=True),
    "eco-orca": Row(scenario="eco-orca", large="cosched.policy.coupled:orca_of_16"),
    "eco-srtf": Row(scenario="eco-srtf", reads_lengths=True),
    "eco-fastserve": Row(scenario="eco-fastserve"),
    "eco-vllm": Row(scenario="eco-vllm", machine={"host_kv_tokens": HOST_KV_TOKENS}),
    "eco-vllm-recompute": Row(scenario="eco-vllm"),
    "eco-fastgen": Row(scenario="eco-fastgen"),
    "eco-multires": Row(scenario="eco-multires", reads_lengths=True),
    "eco-synccoupled": Row(scenario="eco-synccoupled", reads_lengths=True),
    "eco-syncfastgen": Row(scenario="eco-syncfastgen", reads_lengths=True),
    "ecoserve-d": _ecoserve("ecoserve-d"),
    "ecoserve-sd": _ecoserve("ecoserve-sd"),
    "ecoserve-sdo": _ecoserve("ecoserve-sdo"),
    "ecoserve": _ecoserve("ecoserve"),
    "ecoserve-request": _ecoserve("ecoserve", ecoserve={"replan_on": "request"}),
    "ecoserve-sdo-request": _ecoserve("ecoserve-sdo", ecoserve={"replan_on": "request"}),
    "ecoserve-oracle": _ecoserve("ecoserve-oracle", reads_lengths=False, length={"mode": "oracle"}),
    "ecoserve-timeline": _ecoserve("ecoserve-timeline"),
}
"""Rows by name. cosched's policies keep stopped requests in the radix cache and cannot go without
it; the prompts of these data sets share nothing, so that it decides nothing else."""

BESIDE = ("sglang", "sglang-tuned", "sarathi", "hygen")
COUPLED = (
    "eco-orca",
    "eco-srtf",
    "eco-fastserve",
    "eco-vllm",
    "eco-vllm-recompute",
    "eco-fastgen",
    "eco-multires",
    "eco-synccoupled",
    "eco-syncfastgen",
)
PARTS = ("ecoserve-d", "ecoserve-sd", "ecoserve-sdo", "ecoserve", "ecoserve-timeline")
FIGURE_ROWS = {
    "stock": ("sglang", "sglang-tuned"),
    "table": (*BESIDE, *COUPLED, *PARTS),
    "1": (*BESIDE, *COUPLED, *PARTS),
    "10": (
        *BESIDE,
        "eco-orca",
        "eco-vllm",
        "eco-fastgen",
        "ecoserve-sdo",
        "ecoserve",
        "ecoserve-oracle",
        "ecoserve-timeline",
    ),
    "11": ("eco-vllm", "eco-fastgen", *PARTS),
}
FIGURE_ROWS["13"] = FIGURE_ROWS["1"]
FIGURE_ROWS["sustained"] = FIGURE_ROWS["10"]

TUNED = tuple(
    {"chunk_tokens": chunk, "mixed_chunk": mixed, "schedule_conservativeness": conservativeness}
    for conservativeness in (1.0, 0.3)
    for mixed in (True, False)
    for chunk in (256, 512, 2048)
)
"""Settings of stock SGLang that are tried on a saturated queue. Below 0.3 more are stopped, after
which SGLang admits fewer for a while."""

NUM_TRIED = 3
"""`sglang-tuned` is the best at each load of so many: those that served most of that queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is varied of the row `ecoserve`. at: its run with a value."""

    values: tuple[Any, ...]
    at: Callable[[RunSpec, Any], RunSpec]


def _configured(key: str, name: str) -> Callable[[RunSpec, Any], RunSpec]:
    def at(spec: RunSpec, value: Any) -> RunSpec:
        return spec.configured(**{key: {**dict(spec.config).get(key, {}), name: value}})

    return at


def _overrun(spec: RunSpec, value: str) -> RunSpec:
    tokens = HOST_KV_TOKENS if value == "offload" else 0
    spec = replace(spec, machine=replace(spec.machine, host_kv_tokens=tokens))
    return _configured("ecoserve", "overrun")(spec, value)


def _slo_scale(spec: RunSpec, value: float) -> RunSpec:
    assert spec.jct is not None
    return replace(spec, jct=replace(spec.jct, scale=value))


SWEEPS: Mapping[str, Sweep] = {
    "padding": Sweep(
        values=(0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5), at=_configured("length", "padding")
    ),
    "reserve": Sweep(
        values=(0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.1), at=_configured("ecoserve", "reserve")
    ),
    "buffer": Sweep(values=(0.0, 0.05, 0.1, 0.15, 0.2, 0.3), at=_configured("ecoserve", "buffer")),
    "overrun": Sweep(values=("offload", "free", "reserve"), at=_overrun),
    "slo scale": Sweep(values=(0.5, 1.0, 1.5, 2.0, 2.5), at=_slo_scale),
}
"""By what is varied. A new one needs a line here, and its place in a figure."""

FIGURE_SWEEPS = {
    "4": ("padding",),
    "5": ("overrun",),
    "12": ("slo scale", "padding", "reserve", "buffer"),
}

DRAWN = ("JCT s", "output tokens/s", "SSR %")
"""Of sweeps (Fig. 12)."""

UNHURRIED = 1000.0
"""Scale of JCT targets under a saturated queue. All its deadlines would be over soon, and EcoServe
hosts only requests whose deadlines are far off (§3.4)."""

MOST_OF_FLOOD = 0.8
"""Where more of it is served the queue may be empty now and then."""

FORWARD_SIZES = (128, 256, 512, 768, 1024, 2048, 4096, 8192)
"""Of which prefill rates are shown [tokens]."""

LOADS = (0.2, 0.5, 0.8, 1.0, 1.25, 1.5)
"""Of the capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Of stock SGLang on a data set. settings: `TUNED`, what serves most first, which is the
    capacity [requests/s]. duration_s: of its runs."""

    duration_s: float
    unloaded: Unloaded
    capacity: float
    settings: tuple[dict[str, Any], ...]


class Bench:
    """The command's options, and what was measured with them first."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.store = None if args.results is None else ResultStore(args.results)
        self.bases: dict[tuple[int, str], Base] = {}
        self.missing: set[str] = set()
        self.groups: dict[int, list[Lines]] = {}
        self.tuned: dict[tuple[int, str, float], dict[str, Any]] = {}

    def spec(self, row: Row, data: str, page: int, lengths: str | None = None) -> RunSpec:
        """At no rate and for no time yet. ConfigError where the row is not there."""
        args = self.args
        name = row.large if row.large and args.machine in LARGE else row.scenario
        machine = replace(
            MACHINES[args.machine],
            page_size=page,
            max_running_requests=args.rows,
            context_length=4096,
        )
        config = {key: value for key, value in row.config.items() if key != "length"}
        length = LENGTHS[lengths](DATA_SETS[data]) if lengths else {}
        length |= row.config.get("length", {})
        if length:
            config["length"] = length
        if row.is_ecoserve:
            found = DATA_SETS[data]
            given = row.config.get("ecoserve", {})
            config["ecoserve"] = {"reserve": found.reserve, "buffer": found.buffer, **given}
        profile = args.latency_models and args.latency_models / f"{args.machine}.json"
        if profile and profile.exists() and row.scenario != STOCK.scenario:
            config["latency_model"] = str(profile)
        spec = RunSpec(
            scenario=scenario(name),
            machine=replace(machine, **row.machine),
            online=WorkloadSpec(name=data),
            cost=CostSpec(name="kernel-table" if args.data_dir else "roofline"),
            seed=args.seed,
            data_dir=args.data_dir,
            config=tuple(sorted(config.items())),
        )
        config_of(spec)
        return spec

    def base(self, data: str, page: int) -> Base:
        """Measured once: the unloaded machine, and the capacity over `TUNED`."""
        key = (page, data)
        if key not in self.bases:
            settings = TUNED[:: len(TUNED) - 1] if self.args.quick else TUNED
            stock = self.spec(STOCK, data, page)
            specs = [unloaded(stock, num_requests=self.args.unloaded)]
            for setting in settings:
                specs.append(self.flooded(self.stock(setting, data, page), data))
            alone, *floods = self.run(f"{data}, pages of {page}:", specs)
            rates = [self.measured(result).requests_per_s or 0.0 for result in floods]
            flood = flood_of(data, self.args.machine)
            if max(rates) > MOST_OF_FLOOD * flood:
                raise ConfigError(
                    f"{data}: {max(rates):.3g} of {flood:g} requests/s are served, "
                    "so that is no saturated queue: raise DataSet.flood"
                )
            order = sorted(range(len(rates)), key=lambda index: (-rates[index], index))
            self.bases[key] = Base(
                duration_s=self.duration_s(data),
                unloaded=unloaded_of(alone),
                capacity=rates[order[0]],
                settings=tuple(settings[index] for index in order),
            )
        return self.bases[key]

    def duration_s(self, data: str) -> float:
        return float(DATA_SETS[data].stretch * self.args.duration)

    def flooded(self, spec: RunSpec, data: str) -> RunSpec:
        flood = flood_of(data, self.args.machine)
        return saturated(spec, flood, duration_s=self.duration_s(data))

    def measured(self, result: RunResult) -> Measures:
        """Of a run of `flooded`."""
        return measure(result, warmup_s=0.1 * result.spec.duration_s)

    def run(self, label: str, specs: Sequence[RunSpec]) -> list[RunResult]:
        """In their order."""
        jobs, quiet = self.args.jobs, self.args.quiet
        return runs_of(label, specs, num_jobs=jobs, store=self.store, quiet=quiet)

    def rows(self, figure: str, data: str, page: int, load: float) -> dict[str, RunSpec]:
        """The rows of a figure that are there, by what they are called."""
        named = {
            name: ROWS[name] if name in ROWS else with_setting(self.best_setting(data, page, load))
            for name in self._names(figure)
        }
        specs: dict[str, RunSpec] = {}
        for name, row in named.items():
            for lengths in self.args.lengths if row.reads_lengths else (None,):
                self.add(
                    specs, f"{name} ({lengths})" if lengths else name, row, data, page, lengths
                )
        return specs

    def _names(self, figure: str) -> Sequence[str]:
        return self.args.only or FIGURE_ROWS[figure]

    def add(
        self,
        specs: dict[str, RunSpec],
        label: str,
        row: Row,
        data: str,
        page: int,
        lengths: str | None,
    ) -> None:
        """Its run, where the row is there."""
        try:
            specs[label] = self.spec(row, data, page, lengths)
        except ConfigError as error:
            if row.scenario not in self.missing:
                print(f"{label} is left out: {error}", file=sys.stderr)
            self.missing.add(row.scenario)

    def best_setting(self, data: str, page: int, load: float) -> dict[str, Any]:
        """Of stock SGLang: with the least mean normalized latency at the load."""
        base = self.base(data, page)
        key = (page, data, load)
        if key not in self.tuned:
            settings = base.settings[:NUM_TRIED]
            specs = [
                self.loaded(self.stock(setting, data, page), base, load) for setting in settings
            ]
            results = self.run(f"{data}, tuned at {load:g}:", specs)
            latencies = [measure(r).normalized_latency_s or np.inf for r in results]
            self.tuned[key] = settings[int(np.argmin(latencies))]
        return self.tuned[key]

    def stock(self, setting: Mapping[str, Any], data: str, page: int) -> RunSpec:
        return self.spec(with_setting(setting), data, page)

    def loaded(self, spec: RunSpec, base: Base, load: float) -> RunSpec:
        """At a share of the capacity, with targets of JCT."""
        spec = replace(spec, jct=base.unloaded.target(self.args.slo_scale))
        return at_rate(spec, load * base.capacity, duration_s=base.duration_s)


def with_setting(setting: Mapping[str, Any]) -> Row:
    return replace(STOCK, machine={**STOCK.machine, **setting})


Lines = list[dict[str, Any]]


def said(measures: Measures) -> dict[str, Any]:
    """As the tables have it."""
    m = measures
    return {
        "requests/s": m.requests_per_s,
        "output tokens/s": m.output_tokens_per_s,
        "SSR %": percent(m.jct_met_share),
        "JCT s": m.jct_s,
        "normalized ms": ms(m.normalized_latency_s),
        "TTFT s": m.ttft_s,
        "TBT ms": ms(m.tbt_s),
        "p5 / p95": f"{show(ms(m.tbt_p5_s))} / {show(ms(m.tbt_p95_s))}",
        "worst TBT s": m.max_tbt_s,
        "KV use %": percent(m.kv_share),
        "running": m.num_running,
        "forward size": m.forward_tokens,
        "failures %": percent(m.failed_share),
        "stopped % of JCT": percent(m.stopped_share),
        "planning %": percent(m.planning_share),
        "not answered": m.num_open,
    }


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def figure_rates(bench: Bench, figure: str, page: int, loads: Sequence[float]) -> Iterator[Lines]:
    """One table for each data set: each row at each load."""
    for data in bench.args.data_sets:
        base = bench.base(data, page)
        named = [
            (load, name, bench.loaded(spec, base, load))
            for load in loads
            for name, spec in bench.rows(figure, data, page, load).items()
        ]
        results = bench.run(f"figure {figure}, {data}:", [spec for _, _, spec in named])
        yield [
            {
                "data set": data,
                "row": name,
                "page": page,
                "load": load,
                "rate": load * base.capacity,
                **said(measure(result)),
                **({} if figure != "stock" else setting_of(result.spec.machine)),
            }
            for (load, name, _), result in zip(named, results, strict=True)
        ]


def setting_of(machine: Machine) -> dict[str, Any]:
    return {
        "chunk": machine.chunk(),
        "mixed": "yes" if machine.mixed_chunk else "no",
        "conservativeness": machine.schedule_conservativeness,
    }


def figure_table(bench: Bench, page: int) -> Iterator[Lines]:
    """A saturated queue."""
    for data in bench.args.data_sets:
        specs = bench.rows("table", data, page, 1.0)
        if "sglang-tuned" in specs:
            specs["sglang-tuned"] = bench.stock(bench.base(data, page).settings[0], data, page)
        unhurried = bench.base(data, page).unloaded.target(UNHURRIED)
        runs = [
            # Stock SGLang knows no deadlines: its runs are those that found the capacity.
            bench.flooded(
                spec if spec.scenario.name == STOCK.scenario else replace(spec, jct=unhurried), data
            )
            for spec in specs.values()
        ]
        results = bench.run(f"table, {data}, pages of {page}:", runs)
        lines = []
        for name, result in zip(specs, results, strict=True):
            m = bench.measured(result)
            lines.append(
                {
                    "data set": data,
                    "page": page,
                    "row": name,
                    "running": m.num_running,
                    "KV use %": percent(m.kv_share),
                    "requests/s": m.requests_per_s,
                    "output tokens/s": m.output_tokens_per_s,
                    "forward size": m.forward_tokens,
                    "failures %": percent(m.failed_share),
                    "nobody ends %": percent(m.idle_share),
                    "planning %": percent(m.planning_share),
                    "planning p99 ms": ms(m.planning_p99_s),
                }
            )
        yield lines


def figure_decomposed(bench: Bench, page: int) -> Iterator[Lines]:
    """Figure 13: where the time of a request goes."""
    for data in bench.args.data_sets:
        base = bench.base(data, page)
        specs = bench.rows("13", data, page, bench.args.load)
        runs = [bench.loaded(spec, base, bench.args.load) for spec in specs.values()]
        results = bench.run(f"figure 13, {data}:", runs)
        lines = []
        for name, result in zip(specs, results, strict=True):
            m = measure(result)
            lines.append(
                {
                    "data set": data,
                    "page": page,
                    "row": name,
                    "JCT s": m.jct_s,
                    "waiting %": percent(m.waiting_share),
                    "held %": percent(m.held_share),
                    "stopped %": percent(m.stopped_share),
                    "planning %": percent(m.planning_share),
                    "nobody ends %": percent(m.idle_share),
                }
            )
        yield lines


def figure_sweeps(bench: Bench, figure: str, page: int) -> Iterator[Lines]:
    """With noise on the lengths: where they are known, nothing is too short."""
    for data in bench.args.data_sets:
        base = bench.base(data, page)
        specs: dict[str, RunSpec] = {}
        bench.add(specs, "ecoserve", ROWS["ecoserve"], data, page, "oracle-noise")
        if not specs:
            return
        plain = bench.loaded(specs["ecoserve"], base, bench.args.load)
        for what in FIGURE_SWEEPS[figure]:
            sweep = SWEEPS[what]
            runs = [sweep.at(plain, value) for value in sweep.values]
            results = bench.run(f"figure {figure}, {data}, {what}:", runs)
            yield [
                {"data set": data, "page": page, what: value, **said(measure(result))}
                for value, result in zip(sweep.values, results, strict=True)
            ]


def panels(figure: Mapping[str, list[Lines]]) -> list[Panel]:
    """One for each sweep over numbers, of each data set."""
    found: list[Panel] = []
    for lines in (lines for name in FIGURE_SWEEPS for lines in figure.get(name, ())):
        what = next(name for name in SWEEPS if name in lines[0])
        if isinstance(lines[0][what], float):
            title = f"{what}, {lines[0]['data set']}"
            if title not in {panel.title for panel in found}:
                found.append(
                    Panel(
                        title=title,
                        x=what,
                        y="% of the highest",
                        lines={name: shares(lines, what, name) for name in DRAWN},
                    )
                )
    return found


def shares(lines: Lines, what: str, name: str) -> list[tuple[float, float | None]]:
    """A column by what is varied, in percent of its highest."""
    highest = max((line[name] or 0.0 for line in lines), default=0.0)
    return [
        (line[what], 100 * (line[name] or 0.0) / highest if highest else None) for line in lines
    ]


def figure_sustained(bench: Bench, page: int) -> Iterator[Lines]:
    """The highest rate that each row sustains, and what was tried: rate: normalized latency."""
    for data in bench.args.data_sets:
        lines = []
        for name, spec in bench.rows("10", data, page, 1.0).items():
            tried: dict[float, float | None] = {}
            rate = sustained(bench, name, spec, bench.base(data, page), tried)
            said = ", ".join(f"{key:g}: {show(ms(tried[key]))} ms" for key in sorted(tried))
            lines.append(
                {"data set": data, "page": page, "row": name, "sustained rate": rate, "tried": said}
            )
        yield lines


def sustained(
    bench: Bench, name: str, spec: RunSpec, base: Base, tried: dict[float, float | None]
) -> float | None:
    """tried: filled; rate [1/s] -> mean normalized latency [s], None: not all were answered."""

    def latencies(rates: Sequence[float]) -> list[float | None]:
        specs = [bench.loaded(spec, base, rate / base.capacity) for rate in rates]
        results = bench.run(f"{name}, {' and '.join(f'{rate:g}' for rate in rates)}/s:", specs)
        measured = [measure(result) for result in results]
        found = [None if m.num_open else m.normalized_latency_s for m in measured]
        tried.update(zip(rates, found, strict=True))
        return found

    return sustained_rate(
        latencies,
        limit_s=NORMALIZED_LIMIT * base.unloaded.normalized_latency_s,
        low=bench.args.between[0] * base.capacity,
        high=bench.args.between[1] * base.capacity,
        tolerance=bench.args.tolerance,
        num_at_once=bench.args.jobs,
    )


def figure_groups(bench: Bench, page: int) -> Iterator[Lines]:
    """Figures 2 and 6: percentiles of the sizes of groups, and of the KV of those that wait."""
    asked = bench.args.only or ("eco-synccoupled", *PARTS)
    # Stock SGLang keeps no log of decisions.
    names = [name for name in asked if name in ROWS and ROWS[name].scenario != STOCK.scenario]
    for data in bench.args.data_sets:
        base = bench.base(data, page)
        specs: dict[str, RunSpec] = {}
        for name in names:
            bench.add(specs, name, ROWS[name], data, page, bench.args.lengths[0])
        runs = [bench.loaded(spec, base, bench.args.load) for spec in specs.values()]
        found: dict[int, Groups] = dict(
            call_all(groups_of, [(spec, page) for spec in runs], num_jobs=bench.args.jobs)
        )
        lines = [
            {"data set": data, "row": name, "of": what.replace("_", " "), **cdf(values)}
            for index, name in enumerate(specs)
            for what, values in asdict(found[index]).items()
            if values
        ]
        if lines:
            yield lines


def groups_of(spec: RunSpec, page: int) -> Groups:
    """Runs it, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="cosched-groups-") as folder:
        log = Path(folder) / "decisions.jsonl"
        execute(spec.configured(decision_log_mb=4096.0), decision_log=log)
        return read_groups(read_log(log, report=print), block_tokens=max(page, 32))


def cdf(values: Sequence[int]) -> dict[str, Any]:
    points = (5, 25, 50, 75, 90, 95, 99)
    named = zip(points, np.percentile(values, points), strict=True)
    return {"count": len(values)} | {f"p{point}": float(value) for point, value in named}


@dataclass(frozen=True, slots=True)
class Told(Predictor):
    """Predictions that are what the machine takes."""

    cost_model: CostModel
    name: str = "told"

    def predict_s(self, totals: BatchTotals) -> float:
        """Of one prompt."""
        prompt = Prefill(totals.num_new, totals.num_cached)
        return self.cost_model.iteration_s(BatchShape(prefills=[prompt]))

    def describe(self) -> dict[str, object]:
        return self.cost_model.describe()


def figure_forward(bench: Bench) -> Lines:
    """The forward size that saturates the machine, and its prefill rates [tokens/s] by size."""
    told = Told(cost_model_of(bench.spec(STOCK, "sharegpt", 1)))

    def rate(num_tokens: int) -> float:
        totals = BatchTotals()
        totals.add_prefill(num_tokens, 0)
        return num_tokens / told.predict_s(totals)

    rates = {f"{size} tokens: tokens/s": rate(size) for size in FORWARD_SIZES}
    return [{"machine": bench.args.machine, "saturates": target_forward_size(told), **rates}]


def figures(bench: Bench, figure: str) -> Iterator[Lines]:
    if figure == "forward":
        yield figure_forward(bench)
        return
    for page in bench.args.pages:
        match figure:
            case "table":
                yield from figure_table(bench, page)
            case "stock" | "10" | "11":
                yield from figure_rates(bench, figure, page, bench.args.loads)
                if figure == "10":
                    yield from figure_sustained(bench, page)
            case "sustained":
                yield from figure_sustained(bench, page)
            case "1":
                yield from figure_rates(bench, figure, page, [bench.args.load])
            case "13":
                yield from figure_decomposed(bench, page)
            case "2" | "6":
                if page not in bench.groups:  # one run is both
                    bench.groups[page] = [*figure_groups(bench, page)]
                yield from bench.groups[page]
            case _:
                yield from figure_sweeps(bench, figure, page)


def markdown(lines: Lines) -> str:
    """Without the columns that nobody has."""
    names = [name for name in lines[0] if any(line[name] is not None for line in lines)]
    return markdown_rows(names, ([show(line[name]) for name in names] for line in lines))


def run(args: argparse.Namespace) -> dict[str, Any]:
    for name in args.only or ():
        if name not in {*ROWS, "sglang-tuned"}:
            raise ConfigError(f"no row {name!r}; choose from {choices([*ROWS, 'sglang-tuned'])}")
    low, high = args.between
    if not 0 < low <= high:
        raise ConfigError(f"--between {low:g} {high:g}: two shares above 0, the lower one first")
    if args.tolerance <= 0:
        raise ConfigError(f"--tolerance {args.tolerance:g}: it must be above 0")
    if args.plot is not None:
        if not {*FIGURE_SWEEPS} & {*args.figures}:
            raise ConfigError(f"--plot: name one of the figures {choices(FIGURE_SWEEPS)}")
        check_can_draw()
    bench = Bench(args)
    tables: dict[str, list[Lines]] = {}
    for figure in args.figures:
        for lines in figures(bench, figure):
            tables.setdefault(figure, []).append(lines)
            print(f"\nFigure {figure}\n\n{markdown(lines)}", flush=True)
    bases: Lines = [
        {
            "data set": data,
            "page": page,
            "t_p ms": ms(base.unloaded.prompt_s),
            "t_g ms": ms(base.unloaded.token_s),
            "normalized ms": ms(base.unloaded.normalized_latency_s),
            "capacity requests/s": base.capacity,
            **base.settings[0],
        }
        for (page, data), base in bench.bases.items()
    ]
    if bases:
        print(f"\nStock SGLang, unloaded and saturated\n\n{markdown(bases)}")
    if args.plot is not None:
        plot_panels([panels(tables)], args.plot)
    return {"figures": tables, "bases": bases}


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of(__file__, __doc__, jobs=os.cpu_count() or 1)
    known = [
        "stock",
        "table",
        "forward",
        "sustained",
        "1",
        "2",
        "4",
        "5",
        "6",
        "10",
        "11",
        "12",
        "13",
    ]
    parser.add_argument("--figures", nargs="+", choices=known, default=["table", "1", "10", "11"])
    parser.add_argument("--machine", choices=MACHINES, default="opt-13b")
    parser.add_argument("--data-sets", nargs="+", choices=DATA_SETS, default=list(DATA_SETS))
    parser.add_argument("--pages", nargs="+", type=int, default=[32, 1], help="KV page sizes")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="in place of the figure's rows")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=["oracle-noise"])
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS), help="of capacity")
    parser.add_argument("--load", type=float, default=1.0, help="of figures at one load (1)")
    parser.add_argument(
        "--between",
        nargs=2,
        type=float,
        default=[0.1, 2.0],
        metavar=("LOW", "HIGH"),
        help="of capacity: where sustained rates are looked for (0.1 2)",
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="of sustained rates, a share (0.05)"
    )
    parser.add_argument("--slo-scale", type=float, default=2.0, help="of JCT targets (2)")
    parser.add_argument(
        "--duration",
        type=float,
        default=600.0,
        help="s of requests; of some data sets longer (600)",
    )
    parser.add_argument("--rows", type=int, default=512, help="--max-running-requests (512)")
    parser.add_argument("--quick", action="store_true", help="two settings of stock SGLang in all")
    parser.add_argument("--unloaded", type=int, default=100, help="requests of unloaded runs (100)")
    parser.add_argument("--latency-models", type=Path, metavar="DIR")
    parser.add_argument("--data-dir", default=os.environ.get("COSCHED_DATA"), metavar="DIR")
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep runs there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the sweeps of 4, 5 and 12")
    parser.add_argument("--quiet", action="store_true")
    return parser


def main() -> None:
    end(build_parser(), run)


if __name__ == "__main__":
    main()
