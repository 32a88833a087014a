"""Workloads by name: what ``--online`` and ``--offline`` of the commands choose from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cosched.core.request import RequestClass
from cosched.errors import choices
from cosched_traces import builders, inference_perf
from cosched_traces.builders import DURATION_S, Asked, Build
from cosched_traces.errors import WorkloadError
from cosched_traces.files import first_line
from cosched_traces.lengths import Uniform
from cosched_traces.openai_batch import Tokenize
from cosched_traces.sessions import AGENTS, CHATS
from cosched_traces.transform import first_requests
from cosched_traces.workload import Workload

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


MOST_REQUESTS = 1_000_000
"""Of a workload. Each takes about 700 bytes before it is sent."""


@dataclass(frozen=True, slots=True)
class NamedWorkload:
    """A workload of the catalogue.

    classes         the roles it can take, its own first
    max_new_tokens  what clients ask for if a request has no limit: the longest output of the data
                    set; None: the longest of the loaded requests
    files           what it reads, relative to the data folder; each may also be there as .gz
    needs_files     it cannot be generated without a data folder
    in_sessions     its requests are turns of sessions in a closed loop
    """

    classes: tuple[RequestClass, ...]
    max_new_tokens: int | None
    build: Build
    description: str
    files: tuple[str, ...] = ()
    needs_files: bool = False
    in_sessions: bool = False


WORKLOADS = {
    "azure-conv": NamedWorkload(
        (ONLINE, OFFLINE),
        1000,
        builders.trace,
        "Azure LLM inference trace 2023, conversation; sampled to the rate asked for",
        files=("arrivals/azure2023_conv.csv",),
        needs_files=True,
    ),
    "azure-like": NamedWorkload(
        (ONLINE, OFFLINE),
        1000,
        builders.azure_like,
        "generated with the lengths and the minute-to-minute rates of azure-conv",
    ),
    "diurnal": NamedWorkload(
        (ONLINE,),
        1000,
        builders.diurnal,
        (
            "chat over one day run in the duration asked for: 4x from night to midday, and bursts "
            "of 3x within minutes; lengths of azure-conv"
        ),
    ),
    "burst": NamedWorkload(
        (ONLINE,),
        1000,
        builders.burst,
        (
            "chat with one burst: 4x the rate in the sixth in the middle of the duration asked "
            "for; lengths of azure-conv"
        ),
    ),
    "demo-chat": NamedWorkload(
        (ONLINE,),
        64,
        builders.demo_chat,
        "of the demo: 130-430 tokens in, 16-64 out; in two bursts 3x the rate",
    ),
    "demo-job": NamedWorkload(
        (OFFLINE,),
        32,
        builders.demo_job,
        "of the demo: few-shot prompts of 260-760 tokens behind 8 heads, shuffled",
    ),
    "mooncake-synthetic": NamedWorkload(
        (ONLINE, OFFLINE),
        893,
        builders.trace,
        "Mooncake FAST'25 synthetic trace: long prompts, 64 % of blocks shared",
        files=("arrivals/mooncake_fast25_synthetic.jsonl",),
        needs_files=True,
    ),
    "mooncake-arxiv": NamedWorkload(
        (ONLINE, OFFLINE),
        2000,
        builders.trace,
        "first 1,000 requests of Mooncake's arXiv trace: three system prompts for all",
        files=("arrivals/mooncake_arxiv_first1000.jsonl",),
        needs_files=True,
    ),
    "agents": NamedWorkload(
        (ONLINE,),
        8810,
        builders.sessions(builders.recorded),
        "sessions of coding agents: prompts of 59k tokens, 96 % from earlier turns",
        files=("sessions/kv_cache_tester_40.jsonl",),
        needs_files=True,
        in_sessions=True,
    ),
    "agents-like": NamedWorkload(
        (ONLINE,),
        8810,
        builders.sessions(builders.generated(AGENTS)),
        "generated with the lengths, turns and think times of agents",
        in_sessions=True,
    ),
    "multi-turn": NamedWorkload(
        (ONLINE,),
        991,
        builders.sessions(builders.generated(CHATS)),
        "chats of 2-10 turns with ShareGPT lengths and 10-60 s between them",
        in_sessions=True,
    ),
    "sharegpt": NamedWorkload(
        (ONLINE, OFFLINE),
        991,
        builders.chat("sharegpt"),
        "ShareGPT lengths (EcoServe Table 2), Poisson arrivals",
    ),
    "sharegpt-bros": NamedWorkload(
        (ONLINE, OFFLINE),
        2048,
        builders.chat("sharegpt-bros"),
        "ShareGPT lengths (BROS Table 2), Poisson arrivals",
    ),
    "lmsys": NamedWorkload(
        (ONLINE, OFFLINE),
        2048,
        builders.chat("lmsys"),
        "LMSYS-Chat-1M lengths (BROS Table 2), Poisson arrivals",
    ),
    "alpaca": NamedWorkload(
        (ONLINE, OFFLINE),
        292,
        builders.chat("alpaca"),
        "Alpaca lengths (EcoServe Table 2), Poisson arrivals",
    ),
    "bookcorpus": NamedWorkload(
        (OFFLINE, ONLINE),
        1041,
        builders.chat("bookcorpus", max_prompt_tokens=2048),
        "BookCorpus lengths (EcoServe Table 2), prompts of at most 2048 tokens",
    ),
    "bros-offline": NamedWorkload(
        (OFFLINE,),
        128,
        builders.chat("bros-offline"),
        "BROS's best-effort requests: uniform, 512-1024 in and 32-128 out",
    ),
    "arxiv": NamedWorkload(
        (OFFLINE,),
        4056,
        builders.arxiv,
        "arXiv summarization, nothing shared; without a data folder as arxiv-like",
        files=("lengths/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",),
    ),
    "arxiv-like": NamedWorkload(
        (OFFLINE,),
        4056,
        builders.arxiv,
        "generated with the lengths of arxiv",
    ),
    "mmlu": NamedWorkload(
        (OFFLINE,),
        16,
        builders.mmlu,
        "MMLU 5-shot, shuffled: 57 shared prefixes; without a data folder as mmlu-like",
        files=("prompts/mmlu/mmlu_dev.jsonl", "prompts/mmlu/mmlu_test.jsonl"),
    ),
    "mmlu-like": NamedWorkload(
        (OFFLINE,),
        16,
        builders.mmlu,
        "generated with the heads and lengths of mmlu",
    ),
    "documents": NamedWorkload(
        (OFFLINE,),
        150,
        builders.documents,
        "20 questions on each of 100 documents of 6-14k tokens, shuffled",
    ),
    "summaries-and-stories": NamedWorkload(
        (OFFLINE,),
        2000,
        builders.summaries_and_stories,
        "long prompts with short answers, and short ones with long answers, shuffled",
    ),
    "tenants-tiny": NamedWorkload(
        (OFFLINE,),
        300,
        builders.tenants(prompt=Uniform(16, 48), output=Uniform(1, 8), num_lines=100_000),
        "three tenants, of which one comes first with 100,000 lines of a few tokens",
    ),
    "tenants-huge": NamedWorkload(
        (OFFLINE,),
        2000,
        builders.tenants(prompt=Uniform(8_000, 24_000), output=Uniform(500, 2000), num_lines=400),
        "three tenants, of which one comes first with 400 lines of 8-24k tokens and long replies",
    ),
    "loogle-short": NamedWorkload(
        (OFFLINE,),
        50,
        builders.loogle(num_documents=105, num_questions=1951, max_output_tokens=50),
        "LooGLE short-dependency QA: 105 documents, 18.6 questions each, shuffled",
    ),
    "loogle-long": NamedWorkload(
        (OFFLINE,),
        80,
        builders.loogle(num_documents=145, num_questions=1101, max_output_tokens=80),
        "LooGLE long-dependency QA: 145 documents, 7.6 questions each, shuffled",
    ),
    "captions": NamedWorkload(
        (OFFLINE,),
        128,
        builders.image_lines(builders.CAPTIONS),
        "like ServeGen's offline job c: a head of 368 tokens and an image of about 860 each",
    ),
    "balanced-images": NamedWorkload(
        (OFFLINE,),
        1684,
        builders.image_lines(builders.BALANCED_IMAGES),
        "like ServeGen's offline job f: prompts of about 1,110 tokens, most of an image",
    ),
    "pages": NamedWorkload(
        (OFFLINE,),
        800,
        builders.image_lines(builders.PAGES),
        "scanned pages, images of 1,000-4,000 tokens",
    ),
    "interactive-chat": NamedWorkload(
        (ONLINE,),
        1000,
        builders.sessions(inference_perf.chat),
        "inference-perf's chat: 4 turns, 45 s between them, prompts of 4,000 tokens",
        in_sessions=True,
    ),
    "batch-summarization": NamedWorkload(
        (OFFLINE,),
        2000,
        inference_perf.batch_of(inference_perf.summarization),
        "inference-perf's summaries: prompts of 15,000 tokens in two modes, replies of 500",
    ),
    "batch-synthetic-data": NamedWorkload(
        (OFFLINE,),
        8000,
        inference_perf.batch_of(inference_perf.synthetic_data),
        "inference-perf's synthetic data: a head of 2,000 tokens, replies of 4,000",
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
    """A workload of the catalogue, of a trace file (`name` is its path), or of a ServeGen folder of
    clients.

    request_class  None: the workload's own (of a file: online)
    data_dir       folder with the files that some workloads read
    rate           mean rate [req/s]; a file is sampled down to it (HyGen §5.1); None: that of the
                   file, for others 1 (azure-like: 5.53); of sessions, starts [1/s]
    num_sessions   active sessions at a time, in place of a rate
    duration_s     a file is cut or repeated to it; None: as long as the file, else an hour
    num_requests   keep the first N; generate N where offline requests are generated
    tokenize       text to token ids; None: lengths are estimated from the text

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
    """WorkloadError if a workload would have more than `MOST_REQUESTS`."""
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
    """Every request asks for a number of tokens that does not depend on the length of its reply."""
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
    first = first_line(path)
    if '"hash_id_scope"' in first:
        build = builders.sessions(builders.recorded)
        return NamedWorkload((ONLINE,), None, build, f"the sessions of {path}", in_sessions=True)
    if '"custom_id"' in first:
        return NamedWorkload((OFFLINE, ONLINE), None, builders.batch, f"the file {path}")
    return NamedWorkload((ONLINE, OFFLINE), None, builders.trace, f"the file {path}")


def _of_folder(path: Path) -> NamedWorkload:
    description = f"ServeGen's clients of {path}"
    return NamedWorkload((ONLINE, OFFLINE), None, builders.servegen, description)


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
    """The table of workloads in docs/simulation.md, in Markdown."""
    lines = ["| name | role | what it is | limit |", "|---|---|---|---|"]
    for name, named in sorted(WORKLOADS.items()):
        role = "both" if len(named.classes) > 1 else named.classes[0].value
        lines.append(f"| `{name}` | {role} | {named.description} | {named.max_new_tokens} |")
    return "\n".join(lines) + "\n"
