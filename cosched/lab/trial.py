"""Try cosched on your machine and model, beside stock SGLang, in ten minutes.

Three servers are started, one after the other: stock SGLang, stock SGLang with priorities
(--enable-priority-scheduling) and cosched. Each replays the same chat beside the same batch, stock
and cosched also chat alone. At first stock SGLang is asked how much chat it bears, unless the chat
is a trace or --rate is given. --out gets the page (trial.md) with the command to deploy, or why
not; a picture, all figures (trial.json), the requests of each phase and the servers' logs.
Interrupted, the same command continues: finished phases are kept.

    cosched trial                                   # a small model with random weights, on a CPU
    cosched trial --model-path MODEL [any flag of cosched serve]
    cosched trial --model-path MODEL --chat trace.csv --batch in.jsonl
    cosched trial --base-url http://HOST:30000 --rate 2 --batch in.jsonl

With --base-url nothing is started: a server that runs is measured with its offline work paused,
then with the work going on, through POST /cosched/offline; at the end its limits are as before.

Prompts are token ids of the lengths and shared prefixes of the workload; a request asks for as many
tokens as its reply has.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from cosched.cli import (
    Count,
    JsonOption,
    NewFile,
    NewFolder,
    Positive,
    Seed,
    Share,
    Words,
    new_app,
    run,
    run_async,
)
from cosched.config import SloConfig
from cosched.errors import ConfigError
from cosched.files import write_whole
from cosched.lab.benchmark.admin_client import running_state
from cosched.lab.benchmark.live import LiveTarget
from cosched.lab.benchmark.trial_phases import (
    KEPT,
    Kept,
    OwnTrial,
    RunningTrial,
    TrialLoad,
    write_json,
)
from cosched.lab.metrics.figure import check_can_draw
from cosched.lab.metrics.table import print_rows
from cosched.lab.simulation.options import DataDir, data_dir_of
from cosched.lab.trial_page import TrialPage
from cosched.versions import versions

_RESERVED = ("--model", "--host", "--port", "--api-key", "--admin-api-key", "--cosched-policy")
_GIVEN = (
    *("model_path", "base_url", "chat", "rate", "load", "batch", "batch_requests", "concurrency"),
    *("ttft_ms", "tpot_ms", "minutes", "seed"),
)
"""Options that must be the same where a trial continues."""

app = new_app("trial", __doc__, usage="Usage: cosched trial [OPTIONS] [any flag of cosched serve]")
main = partial(run, "trial")


@app.default
@dataclass(kw_only=True)
class TrialOptions(JsonOption):
    flags: Words = field(default=(), kw_only=False)
    model_path: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """the model; default: a small one with random weights, which is made"""
    base_url: Annotated[str | None, Parameter(metavar="URL")] = None
    """a cosched server that runs, in place of --model-path"""
    api_key: Annotated[str | None, Parameter(metavar="KEY")] = None
    """its key"""
    admin_api_key: Annotated[str | None, Parameter(metavar="KEY")] = None
    """its operator's key"""
    chat: Annotated[str | None, Parameter(metavar="NAME|FILE")] = None
    """a trace, a file of requests (JSONL) or a workload (docs/simulation.md); default: azure-like,
    for the small model demo-chat"""
    rate: Positive | None = None
    """mean requests per second of chat; default: a trace's own, else --load"""
    load: Share | None = None
    """the same as a share of what stock SGLang bears, which is measured; default: 0.3"""
    batch: Annotated[str | None, Parameter(metavar="NAME|FILE")] = None
    """a file for `cosched batch` or a workload; default: documents, for the small model demo-job;
    with --base-url: the server's own offline work"""
    batch_requests: Count | None = None
    """only the first of them"""
    concurrency: Count | None = None
    """requests of the batch in flight; default: 256, for the small model 64"""
    ttft_ms: Annotated[Positive | None, Parameter(name="--cosched-slo-ttft-ms")] = None
    """TTFT target of chat; default: the server's, which is 1000"""
    tpot_ms: Annotated[Positive | None, Parameter(name="--cosched-slo-tpot-ms")] = None
    """TPOT target of chat; default: the server's, which is 50"""
    minutes: Positive = 10.0
    """how long all may take, once the model is in the file cache"""
    seed: Seed = 0
    """seed of arrivals and prompts"""
    data_dir: DataDir = None
    """folder with traces; default: $COSCHED_DATA"""
    out: NewFolder = Path("out/trial")
    """the folder for all that is written"""
    write: NewFile | None = None
    """the page; default: trial.md in --out"""
    plot: NewFile | None = None
    """the picture; default: trial.png in --out"""

    def __call__(self) -> int:
        check_can_draw()
        self._check()
        kept = self._kept()
        load = TrialLoad(
            chat=self.chat or ("demo-chat" if self._is_demo else "azure-like"),
            batch=self.batch or self._default_batch(),
            batch_requests=self.batch_requests,
            concurrency=self.concurrency or (64 if self._is_demo else 256),
            rate=self.rate,
            load=self.load,
            minutes=self.minutes,
            seed=self.seed,
            data_dir=data_dir_of(self.data_dir),
            out=self.out,
        )
        if self.base_url is None:
            trial: OwnTrial | RunningTrial = OwnTrial(
                load, kept, model_path=self.model_path, flags=self.flags
            )
        else:
            trial = self._running(load, kept)
        self.out.mkdir(parents=True, exist_ok=True)
        run_async(trial.measure())
        trial.keep()
        return self._finish(trial)

    @property
    def _is_demo(self) -> bool:
        return self.model_path is None and self.base_url is None

    def _default_batch(self) -> str | None:
        if self.base_url is not None:
            return None
        return "demo-job" if self._is_demo else "documents"

    def _running(self, load: TrialLoad, kept: Kept) -> RunningTrial:
        target = LiveTarget(
            base_url=self.base_url or "", api_key=self.api_key, admin_api_key=self.admin_api_key
        )
        state = run_async(running_state(target, has_batch=load.batch is not None))
        kept.ttft_ms = self.ttft_ms or state["slo"]["ttft_ms"]
        kept.tpot_ms = self.tpot_ms or state["slo"]["tpot_ms"]
        return RunningTrial(load, kept, target, state)

    def _check(self) -> None:
        """ConfigError when options contradict each other."""
        if self.base_url is None:
            if self.api_key or self.admin_api_key:
                raise ConfigError("--api-key and --admin-api-key are for the server of --base-url")
            for name in (flag.partition("=")[0] for flag in self.flags):
                if name in _RESERVED:
                    raise ConfigError(f"{name} is set by the trial itself: leave it out")
            if self.rate is not None and self.load is not None:
                raise ConfigError(f"--rate {self.rate:g} and --load {self.load:g}: name one")
            return
        if given := [*(["--model-path"] if self.model_path else []), *self.flags]:
            raise ConfigError(f"--base-url names a server that runs: leave out {given[0]}")
        if self.rate is None or self.load is not None:
            raise ConfigError(
                "--base-url: name --rate, the requests per second of chat, without --load: what a "
                "server bears is not tried on one that others use"
            )

    def _asked(self) -> dict[str, Any]:
        return {"flags": list(self.flags)} | {name: getattr(self, name) for name in _GIVEN}

    def _kept(self) -> Kept:
        """ConfigError where --out holds a trial with other options."""
        path, asked, slo = self.out / KEPT, self._asked(), SloConfig()
        if not path.exists():
            return Kept(
                asked=asked,
                ttft_ms=self.ttft_ms or slo.ttft_ms,
                tpot_ms=self.tpot_ms or slo.tpot_ms,
            )
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=Kept)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is not of a trial: {error}; remove it") from None
        for name, now in asked.items():
            if (before := kept.asked.get(name)) != now:
                raise ConfigError(
                    f"{self.out} holds a trial with {_option(name)} {_shown(before)}, now "
                    f"{_shown(now)}: continue it with the same options, name another --out, or "
                    "remove the folder"
                )
        return kept

    def _finish(self, trial: OwnTrial | RunningTrial) -> int:
        kept, made_with = trial.kept, versions()
        page = TrialPage(
            results=trial.results(),
            about=trial.about(),
            command=trial.command(),
            made_by=f"`{self._command()}`: {kept.wall_s / 60:.1f} minutes, seed {self.seed}, "
            f"cosched {made_with['commit'] or made_with['cosched']}, SGLang {made_with['sglang']}.",
        )
        written, drawn = self.write or self.out / "trial.md", self.plot or self.out / "trial.png"
        self.save(drawn, lambda path: page.draw(path, has_bursts=trial.load.chat == "demo-chat"))
        picture = os.path.relpath(drawn.absolute(), written.absolute().parent)
        self.save(written, lambda path: write_whole(path, page.text(picture)))
        figures = {"program": "trial", "kept": msgspec.to_builtins(kept), **page.to_dict()}
        self.save(self.out / "trial.json", lambda path: write_json(path, figures))
        print_rows(page.rows())
        print(f"{page.verdict()}\npage: {written}\npicture: {drawn}")
        return self.finish(figures)

    def _command(self) -> str:
        """This command, without folders and keys."""
        words = ["cosched", "trial"]
        for name in _GIVEN:
            value = getattr(self, name)
            if value != getattr(type(self), name):
                words += [_option(name), f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join([*words, *self.flags])


def _option(name: str) -> str:
    name = name.replace("_", "-")
    return f"--cosched-slo-{name}" if name in ("ttft-ms", "tpot-ms") else f"--{name}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return shlex.join(value) or "none"
    return "not given" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
