"""Functions that make the workloads of the catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cosched.core.request import RequestClass
from cosched_traces.arrival_times import (
    RateCurve,
    arrival_times,
    constant_rate,
    correlated_rate,
    diurnal_rate,
    with_bursts,
)
from cosched_traces.datasets import DATASETS
from cosched_traces.errors import WorkloadError
from cosched_traces.formats import SERVEGEN_REPLY_TOKENS, SERVEGEN_TEXT_TOKENS, read_trace
from cosched_traces.lengths import Fixed, Quantiles, Uniform
from cosched_traces.mmlu import generate_mmlu, read_mmlu
from cosched_traces.offline_sets import (
    ImageLines,
    PrefixGroups,
    independent_requests,
    length_pairs,
)
from cosched_traces.openai_batch import Tokenize, estimated_tokens, read_openai_batch
from cosched_traces.seeds import seed_for
from cosched_traces.servegen import read_servegen
from cosched_traces.session_traces import read_sessions_jsonl
from cosched_traces.sessions import Sessions, SessionSet, keep_under_way, start_at
from cosched_traces.transform import (
    at_once,
    period_s,
    repeat,
    sample_to_rate,
    shuffle,
    with_arrivals,
)
from cosched_traces.workload import Workload

DURATION_S = 3600.0
NUM_SESSIONS = 8
CHAT_RATE = 1.0
AZURE_RATE = 5.53  # of the trace itself
CHAT_REQUESTS = 10_000
ARXIV_REQUESTS = 28_257  # as the file has
ARXIV_MAX_TOKENS = 4096  # the file's own filter
QUESTIONS_PER_DOCUMENT = 20
DEMO_GROUPS = 8
_REPLY_TOKENS = 256
"""Of a line of a batch file without a limit."""
DEMO_JOB_REQUESTS = 800
DEMO_BURSTS = ((0.25, 0.35), (0.65, 0.75))
"""Of `demo_chat`: parts [a, b) of the duration in which three times as many requests come."""
DEMO_BURST_FACTOR = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Parameters of a workload; None: the workload's default.

    files   those that the workload names, found in the data folder; empty without a folder
    """

    name: str
    request_class: RequestClass
    seed: int
    files: tuple[Path, ...] = ()
    rate: float | None = None
    num_sessions: int | None = None
    duration_s: float | None = None
    num_requests: int | None = None
    tokenize: Tokenize | None = None

    @property
    def own_seed(self) -> int:
        return seed_for(self.seed, self.name)

    @property
    def offline(self) -> bool:
        return self.request_class is RequestClass.OFFLINE


Build = Callable[[Asked], Workload]


def trace(asked: Asked) -> Workload:
    """A trace file, repeated or cut to the duration and sampled to the rate, if they are given. A
    file without arrivals is shuffled and arrives as a Poisson process. Offline: all at 0."""
    workload = read_trace(asked.files[0], name=asked.name, request_class=asked.request_class)
    if asked.offline:
        return at_once(workload, asked.request_class)
    if not workload.requests or workload.requests[-1].arrival_s == 0:
        times = arrival_times(_poisson_curve(asked), seed=asked.own_seed)
        return with_arrivals(shuffle(workload, seed=asked.seed), times)
    if asked.duration_s is not None:
        workload = repeat(workload, asked.duration_s)
    if asked.rate is not None:
        window_s = asked.duration_s or period_s(workload)
        workload = sample_to_rate(workload, asked.rate, seed=asked.seed, duration_s=window_s)
    return workload


def chat(dataset: str, *, max_prompt_tokens: int | None = None) -> Build:
    """Lengths of a dataset; online a Poisson process of the rate, offline all at 0."""

    def build(asked: Asked) -> Workload:
        curve = _poisson_curve(asked)
        return _with_lengths(asked, dataset, curve, max_prompt_tokens=max_prompt_tokens)

    return build


def sessions(sessions_of: Callable[[Asked], Sessions]) -> Build:
    """Sessions in a closed loop: starts as a Poisson process of the rate, or a fixed number of
    active sessions (default: `NUM_SESSIONS`)."""

    def build(asked: Asked) -> Workload:
        begun = sessions_of(asked)
        if asked.rate is not None:
            times = arrival_times(_poisson_curve(asked), seed=asked.own_seed)
            return start_at(asked.name, begun, times)
        return keep_under_way(
            asked.name,
            begun,
            num_sessions=asked.num_sessions or NUM_SESSIONS,
            duration_s=asked.duration_s or DURATION_S,
            seed=asked.own_seed,
        )

    return build


def recorded(asked: Asked) -> Sessions:
    """The requests of the file, again and again."""
    read = read_sessions_jsonl(asked.files[0], name=asked.name)
    return Sessions(supply=read.supply(seed=asked.own_seed), notes=read.notes)


def generated(kind: SessionSet) -> Callable[[Asked], Sessions]:
    def sessions_of(asked: Asked) -> Sessions:
        return Sessions(supply=kind.supply(asked.name, seed=asked.own_seed))

    return sessions_of


def azure_like(asked: Asked) -> Workload:
    """Rates that wander as in the Azure trace, Poisson within the minute, its lengths."""
    curve = correlated_rate(
        asked.rate or AZURE_RATE, duration_s=asked.duration_s or DURATION_S, seed=asked.own_seed
    )
    return _with_lengths(asked, "azure", curve)


def diurnal(asked: Asked) -> Workload:
    """One day in the duration; bursts of two minutes, 36 per day or one in 20 minutes, whichever is
    fewer."""
    duration_s = asked.duration_s or DURATION_S
    tide = diurnal_rate(asked.rate or CHAT_RATE, duration_s=duration_s, day_s=duration_s)
    every_s = max(duration_s / 36, 1200.0)
    curve = tide
    if duration_s >= every_s:
        curve = with_bursts(tide, seed=asked.own_seed, every_s=every_s)
    return _with_lengths(asked, "azure", curve)


def burst(asked: Asked) -> Workload:
    """A Poisson process with four times the rate in the sixth in the middle; the mean is kept."""
    duration_s = asked.duration_s or DURATION_S
    rates = [1.0] * 12
    rates[5:7] = [4.0, 4.0]
    curve = RateCurve(step_s=duration_s / len(rates), rates=tuple(rates))
    return _with_lengths(asked, "azure", curve.scaled_to(asked.rate or CHAT_RATE))


def demo_chat(asked: Asked) -> Workload:
    """A Poisson process with three times the rate in two bursts; the mean is kept."""
    duration_s = asked.duration_s or DURATION_S
    centres = [(step + 0.5) / 20 for step in range(20)]
    in_burst = [any(a <= centre < b for a, b in DEMO_BURSTS) for centre in centres]
    rates = tuple(DEMO_BURST_FACTOR if burst else 1.0 for burst in in_burst)
    curve = RateCurve(step_s=duration_s / len(rates), rates=rates)
    return _with_lengths(asked, "demo-chat", curve.scaled_to(asked.rate or CHAT_RATE))


def demo_job(asked: Asked) -> Workload:
    """Eight heads of worked examples of 230-690 tokens, and a question of 30-70 behind one of them;
    replies of 32."""
    num_requests = asked.num_requests or DEMO_JOB_REQUESTS
    groups = PrefixGroups(
        num_groups=DEMO_GROUPS,
        requests_per_group=-(-num_requests // DEMO_GROUPS),
        shared=Uniform(230, 690),
        unique=Uniform(30, 70),
        output=Fixed(32),
    )
    return groups.workload(asked.name, seed=asked.seed, num_requests=num_requests)


def arxiv(asked: Asked) -> Workload:
    """The lengths of the file, shuffled, or without a file lengths of their distribution."""
    if asked.files:
        read = read_trace(
            asked.files[0], name=asked.name, request_class=asked.request_class, format="lengths"
        )
        return shuffle(read, seed=asked.seed)
    lengths = DATASETS["arxiv"]
    name = "arxiv-like"
    pairs = length_pairs(
        lengths.prompt_lengths,
        lengths.output_lengths,
        size=asked.num_requests or ARXIV_REQUESTS,
        seed=seed_for(asked.seed, name),
        max_total_tokens=ARXIV_MAX_TOKENS,
    )
    return independent_requests(name, pairs, seed=asked.seed)


def mmlu(asked: Asked) -> Workload:
    if asked.files:
        dev, test = asked.files
        return read_mmlu(
            dev,
            test,
            seed=asked.seed,
            num_requests=asked.num_requests,
            tokenize=asked.tokenize,
        )
    return generate_mmlu(seed=asked.seed, num_requests=asked.num_requests)


def documents(asked: Asked) -> Workload:
    """20 questions of 30-60 tokens on each document of 6,000-14,000 tokens, answers of 50-150
    tokens, shuffled: near Echo §2.3, where document QA has prompts of 9,865 tokens on average.
    2,000 requests on 100 documents, or `num_requests` on a twentieth as many."""
    num_requests = asked.num_requests or 100 * QUESTIONS_PER_DOCUMENT
    groups = PrefixGroups(
        num_groups=-(-num_requests // QUESTIONS_PER_DOCUMENT),
        requests_per_group=QUESTIONS_PER_DOCUMENT,
        shared=Uniform(6000, 14_000),
        unique=Uniform(30, 60),
        output=Uniform(50, 150),
    )
    return groups.workload(asked.name, seed=asked.seed, num_requests=num_requests)


_SERVEGEN_IMAGES = Quantiles(
    probabilities=(0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 1),
    points=tuple(
        tokens - SERVEGEN_TEXT_TOKENS for tokens in (989, 1003, 1054, 1116, 1164, 1174, 1207, 2184)
    ),
)
"""Prompts of the first 150 lines of ServeGen's ``trace_f.jsonl``, less an assumed text."""

CAPTIONS = ImageLines(
    head=368,
    image=_SERVEGEN_IMAGES,
    unique=Uniform(36, 84),
    output=Fixed(SERVEGEN_REPLY_TOKENS),
)
"""Image captioning, by the first 50 lines of ServeGen's ``trace_c.jsonl`` (Alibaba Model Studio): a
head of 23 blocks, one image, 36 to 84 more tokens. Not published, and assumed: the tokens of the
image (those of f) and the reply."""

BALANCED_IMAGES = ImageLines(
    head=1,
    image=_SERVEGEN_IMAGES,
    unique=Fixed(SERVEGEN_TEXT_TOKENS - 1),
    output=Quantiles(
        probabilities=(0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.98, 1),
        points=(347, 376, 416, 450, 495, 560, 629, 1684),
    ),
)
"""As ServeGen's ``trace_f.jsonl``. Assumed: how much of a prompt is text, and that nothing but its
first token is shared."""

PAGES = ImageLines(
    head=64,
    image=Uniform(1000, 4000),
    unique=Uniform(20, 60),
    output=Uniform(100, 800),
)
"""Scanned pages to be read: an A4 page at 150 dpi has 2,772 tokens of 28 x 28 pixels."""


def image_lines(kind: ImageLines) -> Build:
    """2,000 lines, or `num_requests`."""

    def build(asked: Asked) -> Workload:
        num_requests = asked.num_requests or 2000
        return kind.workload(asked.name, seed=asked.seed, num_requests=num_requests)

    return build


def summaries_and_stories(asked: Asked) -> Workload:
    """Compute-bound and memory-bound work: a third are prompts of 6,000-10,000 tokens with answers
    of 32-96, two thirds prompts of 100-300 tokens with answers of 1,000-2,000, which take an A100
    about as long. 1,200 requests, or `num_requests`, shuffled; nothing is shared."""
    num_requests = asked.num_requests or 1200
    num_summaries = -(-num_requests // 3)
    kinds = (
        (Uniform(6000, 10_000), Uniform(32, 96), num_summaries),
        (Uniform(100, 300), Uniform(1000, 2000), num_requests - num_summaries),
    )
    pairs = [
        pair
        for prompt, output, size in kinds
        for pair in length_pairs(prompt, output, size=size, seed=asked.own_seed)
    ]
    return shuffle(independent_requests(asked.name, pairs, seed=asked.seed), seed=asked.seed)


def tenants(*, prompt: Uniform, output: Uniform, num_lines: int) -> Build:
    """The job of a hostile tenant, `num_requests` or `num_lines` lines, before those of two others:
    `alice` with 300 lines and `bob` with 100, prompts of 500-1,500 tokens and answers of 100-300.
    Nothing is shared."""

    def build(asked: Asked) -> Workload:
        jobs = {
            "mallory": (prompt, output, asked.num_requests or num_lines),
            "alice": (Uniform(500, 1500), Uniform(100, 300), 300),
            "bob": (Uniform(500, 1500), Uniform(100, 300), 100),
        }
        names = [name for name, (_, _, size) in jobs.items() for _ in range(size)]
        pairs = [
            pair
            for prompts, outputs, size in jobs.values()
            for pair in length_pairs(prompts, outputs, size=size, seed=asked.own_seed)
        ]
        made = independent_requests(asked.name, pairs, seed=asked.seed)
        requests = [replace(r, tenant=n) for r, n in zip(made.requests, names, strict=True)]
        return replace(made, requests=tuple(requests))

    return build


def loogle(*, num_documents: int, num_questions: int, max_output_tokens: int) -> Build:
    """LooGLE's documents (over 24k tokens on average) with its numbers of questions. Questions of
    10-40 tokens and the answers' range are read off the samples in LooGLE's repository."""

    def build(asked: Asked) -> Workload:
        each, rest = divmod(num_questions, num_documents)
        groups = PrefixGroups(
            num_groups=num_documents,
            requests_per_group=[each + (group < rest) for group in range(num_documents)],
            shared=DATASETS["loogle"].prompt_lengths,
            unique=Uniform(10, 40),
            output=Uniform(2, max_output_tokens),
        )
        return groups.workload(asked.name, seed=asked.seed, num_requests=asked.num_requests)

    return build


def servegen(asked: Asked) -> Workload:
    """The requests of the clients of a folder, at their own rates by default; offline, those of an
    hour at 0."""
    workload = read_servegen(
        asked.files[0],
        seed=asked.seed,
        duration_s=asked.duration_s or DURATION_S,
        rate=asked.rate,
        name=asked.name,
        request_class=asked.request_class,
    )
    return at_once(workload, asked.request_class) if asked.offline else workload


def batch(asked: Asked) -> Workload:
    """An OpenAI batch file; without a tokenizer its tokens are estimated. Online its lines arrive
    in turn, again and again, as a Poisson process."""
    workload = read_openai_batch(
        asked.files[0],
        asked.tokenize or estimated_tokens,
        name=asked.name,
        default_max_tokens=_REPLY_TOKENS,
        request_class=asked.request_class,
    )
    lines = workload.requests
    if not lines:
        raise WorkloadError(f"{asked.files[0]}: the file has no lines")
    if asked.offline:
        return workload
    requests = tuple(
        replace(
            lines[index % len(lines)],
            rid=f"{lines[index % len(lines)].rid}-{index // len(lines)}",
            arrival_s=time_s,
        )
        for index, time_s in enumerate(arrival_times(_poisson_curve(asked), seed=asked.own_seed))
    )
    return workload.changed(requests, f"{len(lines)} lines arrive {len(requests)} times")


def _poisson_curve(asked: Asked) -> RateCurve:
    return constant_rate(asked.rate or CHAT_RATE, duration_s=asked.duration_s or DURATION_S)


def _with_lengths(
    asked: Asked, dataset: str, curve: RateCurve, *, max_prompt_tokens: int | None = None
) -> Workload:
    """Requests with a dataset's lengths along the curve; offline `num_requests` of them at 0."""
    lengths = DATASETS[dataset]
    arrivals_s = None if asked.offline else arrival_times(curve, seed=asked.own_seed)
    if arrivals_s is not None and not arrivals_s:
        raise WorkloadError(
            f"{asked.name}: no request arrives at {curve.mean:g} req/s in {curve.duration_s:g} s"
        )
    size = (asked.num_requests or CHAT_REQUESTS) if arrivals_s is None else len(arrivals_s)
    pairs = length_pairs(
        lengths.prompt_lengths, lengths.output_lengths, size=size, seed=asked.own_seed
    )
    if max_prompt_tokens is not None:
        pairs = [(min(prompt, max_prompt_tokens), output) for prompt, output in pairs]
    return independent_requests(
        asked.name,
        pairs,
        seed=asked.seed,
        request_class=asked.request_class,
        arrivals_s=arrivals_s,
    )
