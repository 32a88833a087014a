"""Workloads by name: what ``--online`` and ``--offline`` of the commands choose from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from cosched.core.request import RequestClass
from cosched.errors import choices
from cosched_traces import builders
from cosched_traces.block_traces import read_mooncake_jsonl
from cosched_traces.builders import DURATION_S, Asked, Build
from cosched_traces.csv_traces import read_azure_csv
from cosched_traces.errors import WorkloadError
from cosched_traces.formats import read_trace
from cosched_traces.mmlu import Tokenize
from cosched_traces.rows import numbered_lines
from cosched_traces.session_sets import AGENTS, CHATS
from cosched_traces.transform import first_requests
from cosched_traces.workload import Workload

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


MOST_REQUESTS = 1_000_000
"""Of a workload. Each takes about 700 bytes before it is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWorkload:
    """A workload of the catalogue.

    classes         the roles it can take, its own first
    max_new_tokens  what clients ask for where a request names no limit: the longest output of the
                    data set; None: the longest of the requests that are loaded
    files           what it reads, relative to the data folder; each may also lie there as .gz
    needs_files     without a data folder it cannot be made; else it is then generated
    in_sessions     its requests are turns of sessions: the next is sent when the answer before it
                    has come and been thought about
    """

    classes: tuple[RequestClass, ...]
    description: str
    max_new_tokens: int | None
    build: Build
    files: tuple[str, ...] = ()
    needs_files: bool = False
    in_sessions: bool = False


WORKLOADS = {
    "azure-conv": NamedWorkload(
        classes=(ONLINE, OFFLINE),
        description="Azure LLM inference trace 2023, conversation; sampled to the rate asked for",
        max_new_tokens=1000,
        build=builders.trace(read_azure_csv),
        files=("arrivals/azure2023_conv.csv",),
        needs_files=True,
    ),
    "azure-like": NamedWorkload(
        classes=(ONLINE, OFFLINE),
        description="generated with the lengths and the minute-to-minute rates of azure-conv",
        max_new_tokens=1000,
        build=builders.azure_like,
    ),
    "diurnal": NamedWorkload(
        classes=(ONLINE,),
        description=(
            "chat over one day run in the duration asked for: 4x from night to midday, and bursts "
            "of 3x within minutes; lengths of azure-conv"
        ),
        max_new_tokens=1000,
        build=builders.diurnal,
    ),
    "burst": NamedWorkload(
        classes=(ONLINE,),
        description=(
            "chat with one burst: 4x the rate in the sixth in the middle of the duration asked "
            "for; lengths of azure-conv"
        ),
        max_new_tokens=1000,
        build=builders.burst,
    ),
    "demo-chat": NamedWorkload(
        classes=(ONLINE,),
        description="of the demo: 130-430 tokens in, 16-64 out; in two bursts 3x the rate",
        max_new_tokens=64,
        build=builders.demo_chat,
    ),
    "demo-job": NamedWorkload(
        classes=(OFFLINE,),
        description="of the demo: few-shot prompts of 260-760 tokens behind 8 heads, shuffled",
        max_new_tokens=32,
        build=builders.demo_job,
    ),
    "mooncake-synthetic": NamedWorkload(
        classes=(ONLINE, OFFLINE),
        description="Mooncake FAST'25 synthetic trace: long prompts, 64 % of blocks shared",
        max_new_tokens=893,
        build=builders.trace(read_mooncake_jsonl),
        files=("arrivals/mooncake_fast25_synthetic.jsonl",),
        needs_files=True,
    ),
    "mooncake-arxiv": NamedWorkload(
        classes=(ONLINE, OFFLINE),
        description="first 1,000 requests of Mooncake's arXiv trace: three system prompts for all",
        max_new_tokens=2000,
        build=builders.trace(read_mooncake_jsonl),
        files=("arrivals/mooncake_arxiv_first1000.jsonl",),
        needs_files=True,
    ),
    "agents": NamedWorkload(
        classes=(ONLINE,),
        description="sessions of coding agents: prompts of 59k tokens, 96 % from earlier turns",
        max_new_tokens=8810,
        build=builders.sessions(builders.recorded),
        files=("sessions/kv_cache_tester_40.jsonl",),
        needs_files=True,
        in_sessions=True,
    ),
    "agents-like": NamedWorkload(
        classes=(ONLINE,),
        description="generated with the lengths, turns and think times of agents",
        max_new_tokens=8810,
        build=builders.sessions(builders.generated(AGENTS)),
        in_sessions=True,
    ),
    "multi-turn": NamedWorkload(
        classes=(ONLINE,),
        description="chats of 2-10 turns with ShareGPT lengths and 10-60 s between them",
        max_new_tokens=991,
        build=builders.sessions(builders.generated(CHATS)),
        in_sessions=True,
    ),
    "sharegpt": NamedWorkload(
        classes=(ONLINE, OFFLINE),
        description="ShareGPT lengths (EcoServe Table 2), Poisson arrivals",
        max_new_tokens=991,
        build=builders.chat("sharegpt"),
    ),
    "sharegpt-bros": NamedWorkload(
        classes=(ONLINE, OFFLINE),
        description="ShareGPT lengths (BROS Table 2), Poisson arrivals",
        max_new_tokens=2048,
        build=builders.chat("sharegpt-bros"),
    ),
    "lmsys": NamedWorkload(
        classes=(ONLINE, OFFLINE),
        description="LMSYS-Chat-1M lengths (BROS Table 2), Poisson arrivals",
        max_new_tokens=2048,
        build=builders.chat("lmsys"),
    ),
    "alpaca": NamedWorkload(
        classes=(ONLINE, OFFLINE),
        description="Alpaca lengths (EcoServe Table 2), Poisson arrivals",
        max_new_tokens=292,
        build=builders.chat("alpaca"),
    ),
    "bookcorpus": NamedWorkload(
        classes=(OFFLINE, ONLINE),
        description="BookCorpus lengths (EcoServe Table 2), prompts of at most 2048 tokens",
        max_new_tokens=1041,
        build=builders.chat("bookcorpus", max_prompt_tokens=2048),
    ),
    "bros-offline": NamedWorkload(
        classes=(OFFLINE,),
        description="BROS's best-effort requests: uniform, 512-1024 in and 32-128 out",
        max_new_tokens=128,
        build=builders.chat("bros-offline"),
    ),
    "arxiv": NamedWorkload(
        classes=(OFFLINE,),
        description="arXiv summarization, nothing shared; without a data folder as arxiv-like",
        max_new_tokens=4056,
        build=builders.arxiv,
        files=("lengths/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",),
    ),
    "arxiv-like": NamedWorkload(
        classes=(OFFLINE,),
        description="generated with the lengths of arxiv",
        max_new_tokens=4056,
        build=builders.arxiv,
    ),
    "mmlu": NamedWorkload(
        classes=(OFFLINE,),
        description="MMLU 5-shot, shuffled: 57 shared prefixes; without a data folder as mmlu-like",
        max_new_tokens=16,
        build=builders.mmlu,
        files=("prompts/mmlu/mmlu_dev.jsonl", "prompts/mmlu/mmlu_test.jsonl"),
    ),
    "mmlu-like": NamedWorkload(
        classes=(OFFLINE,),
        description="generated with the heads and lengths of mmlu",
        max_new_tokens=16,
        build=builders.mmlu,
    ),
    "documents": NamedWorkload(
        classes=(OFFLINE,),
        description="20 questions on each of 100 documents of 6-14k tokens, shuffled",
        max_new_tokens=150,
        build=builders.documents,
    ),
    "summaries-and-stories": NamedWorkload(
        classes=(OFFLINE,),
        description="long prompts with short answers, and short ones with long answers, shuffled",
        max_new_tokens=2000,
        build=builders.summaries_and_stories,
    ),
    "loogle-short": NamedWorkload(
        classes=(OFFLINE,),
        description="LooGLE short-dependency QA: 105 documents, 18.6 questions each, shuffled",
        max_new_tokens=50,
        build=builders.loogle(num_documents=105, num_questions=1951, max_output_tokens=50),
    ),
    "loogle-long": NamedWorkload(
        classes=(OFFLINE,),
        description="LooGLE long-dependency QA: 145 documents, 7.6 questions each, shuffled",
        max_new_tokens=80,
        build=builders.loogle(num_documents=145, num_questions=1101, max_output_tokens=80),
    ),
}


def load_workload(
    name: str,
    *,
    seed: int,
    request_class: RequestClass | None = None,
    data_dir: Path | None = None,
    rate: float | None = None,
    num_sessions: int | None = None,
    duration_s: float | None = None,
    num_requests: int | None = None,
    tokenize: Tokenize | None = None,
) -> Workload:
    """A workload of the catalogue, or the trace file that `name` is the path of, or the folder of
    ServeGen's clients.

    request_class  the role it is to play; None: its own (of a file: online)
    data_dir       the folder with the files that some workloads read
    rate           mean rate [req/s]; a file is sampled down to it (HyGen §5.1); None: a file's own,
                   for others 1 (azure-like: 5.53); of a workload in sessions, starts [1/s]
    num_sessions   of a workload in sessions, how many are under way at a time, in place of a rate
    duration_s     a file is cut to it, or repeated; None: as long as the file, else an hour
    num_requests   keep the first so many; where requests are generated offline, make so many
    tokenize       text to token ids, for workloads of text; None: lengths estimated from the text

    Offline sets arrive at 0, so rate and duration are errors there. Raises `WorkloadError`.
    """
    path = Path(name)
    if name in WORKLOADS:
        named = WORKLOADS[name]
        files = _find_files(name, named, data_dir)
    elif path.exists():
        named, files = _of_folder(path) if path.is_dir() else _of_file(path), (path,)
        name = path.name.split(".")[0]
    else:
        raise WorkloadError(f"no workload and no file {name!r}; choose from {choices(WORKLOADS)}")
    role = request_class or named.classes[0]
    if role not in named.classes:
        raise WorkloadError(f"{name} is {named.classes[0].value} only")
    if role is OFFLINE and (rate is not None or duration_s is not None):
        raise WorkloadError(f"{name}: offline requests arrive at 0; they have no rate or duration")
    if num_sessions is not None and not named.in_sessions:
        raise WorkloadError(f"{name} is not in sessions; it has a rate")
    if num_sessions is not None and rate is not None:
        raise WorkloadError(f"{name}: a rate of starts or a number under way, not both")
    for what, value in (
        ("rate", rate),
        ("num_sessions", num_sessions),
        ("duration_s", duration_s),
        ("num_requests", num_requests),
    ):
        if value is not None and not value > 0:
            raise WorkloadError(f"{name}: {what} {value} is not above 0")
    asked = Asked(
        name=name,
        request_class=role,
        seed=seed,
        files=files,
        rate=rate,
        num_sessions=num_sessions,
        duration_s=duration_s,
        num_requests=num_requests,
        tokenize=tokenize,
    )
    _check_size(asked)
    workload = named.build(asked)
    if num_requests is not None and len(workload.requests) > num_requests:
        workload = first_requests(workload, num_requests)
    return _with_limits(workload, named.max_new_tokens)


def _check_size(asked: Asked) -> None:
    """WorkloadError where a workload would have more requests than one run can hold."""
    num_requests: float = max(asked.num_requests or 0, asked.num_sessions or 0)
    made = ""
    if asked.rate is not None:
        duration_s = asked.duration_s or DURATION_S
        made = f"{asked.rate:g} requests/s for {duration_s:g} s are "
        num_requests = max(num_requests, asked.rate * duration_s)
    if num_requests > MOST_REQUESTS:
        raise WorkloadError(
            f"{asked.name}: {made}{num_requests:,.0f} requests; a run has at most {MOST_REQUESTS:,}"
        )


def _with_limits(workload: Workload, max_new_tokens: int | None) -> Workload:
    """Every request asks for a number of tokens, which says nothing of how long its reply is."""
    if max_new_tokens is None:
        max_new_tokens = max((r.num_output_tokens for r in workload.requests), default=None)
    requests = tuple(
        replace(request, max_new_tokens=max_new_tokens)
        if request.max_new_tokens is None
        else request
        for request in workload.requests
    )
    return replace(workload, requests=requests)


def _of_file(path: Path) -> NamedWorkload:
    first = next((line for _, line in islice(numbered_lines(path), 1)), "")
    if '"hash_id_scope"' in first:
        return NamedWorkload(
            classes=(ONLINE,),
            description=f"the sessions of {path}",
            max_new_tokens=None,
            build=builders.sessions(builders.recorded),
            in_sessions=True,
        )
    batch = '"custom_id"' in first
    return NamedWorkload(
        classes=(OFFLINE,) if batch else (ONLINE, OFFLINE),
        description=f"the file {path}",
        max_new_tokens=None,
        build=builders.batch if batch else builders.trace(read_trace),
    )


def _of_folder(path: Path) -> NamedWorkload:
    return NamedWorkload(
        classes=(ONLINE, OFFLINE),
        description=f"ServeGen's clients of {path}",
        max_new_tokens=None,
        build=builders.servegen,
    )


def _find_files(name: str, named: NamedWorkload, data_dir: Path | None) -> tuple[Path, ...]:
    if data_dir is None:
        if named.needs_files:
            raise WorkloadError(f"{name} reads {named.files[0]} of a data folder; name the folder")
        return ()
    return tuple(_find_file(name, data_dir, relative) for relative in named.files)


def _find_file(name: str, data_dir: Path, relative: str) -> Path:
    for path in (data_dir / relative, data_dir / f"{relative}.gz"):
        if path.is_file():
            return path
    raise WorkloadError(f"{name}: neither {relative} nor {relative}.gz in {data_dir}")


def workload_table() -> str:
    """The table of workloads in docs/workloads.md, in Markdown."""
    lines = ["| name | role | what it is | limit | reads |", "|---|---|---|---|---|"]
    for name, named in sorted(WORKLOADS.items()):
        roles = " or ".join(role.value for role in named.classes)
        files = ", ".join(f"`{file}`" for file in named.files)
        lines.append(
            f"| `{name}` | {roles} | {named.description} | {named.max_new_tokens} | {files} |"
        )
    return "\n".join(lines) + "\n"
