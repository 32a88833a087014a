"""Named workloads, and files in their place."""

import gzip
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from cosched.core.request import RequestClass
from cosched_traces.catalogue import WORKLOADS, load_workload
from cosched_traces.docs import PATH, with_tables
from cosched_traces.errors import RowError, WorkloadError
from cosched_traces.formats import (
    FORMATS,
    SERVEGEN_IMAGE_TOKENS,
    SERVEGEN_REPLY_TOKENS,
    SERVEGEN_TEXT_TOKENS,
    read_trace,
)
from cosched_traces.trace_summary import shared_ratio
from tests.traces.conftest import ROOT
from tests.traces.samples import (
    AZURE_HEADER,
    BURSTGPT_HEADER,
    lengths_of,
    rids_of,
    summarize,
    write,
    write_jsonl,
)

GENERATED = sorted(name for name, named in WORKLOADS.items() if not named.needs_files)
ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


def azure_folder(tmp_path, count=100, gap_s=1.0):
    folder = tmp_path / "arrivals"
    folder.mkdir()
    start = datetime(2023, 11, 16)
    rows = [f"{start + timedelta(seconds=i * gap_s)},{10 + i},{1 + i}" for i in range(count)]
    write(folder / "azure2023_conv.csv", AZURE_HEADER, *rows)
    return tmp_path


@pytest.mark.parametrize("name", GENERATED)
def test_generated_workloads_follow_what_is_asked(name):
    role = WORKLOADS[name].classes[0]
    asked = {"rate": 2.0, "duration_s": 600.0} if role is ONLINE else {"num_requests": 300}
    made = load_workload(name, seed=4, **asked)
    assert made == load_workload(name, seed=4, **asked)
    assert made != load_workload(name, seed=5, **asked)
    # Without the file it is no `arxiv` or `mmlu` that a report would show.
    assert made.name == (f"{name}-like" if name in ("arxiv", "mmlu") else name)
    assert len(set(rids_of(made))) == len(made.requests)
    assert {r.request_class for r in made.requests} == {role}
    assert all(p >= 1 and o >= 1 for p, o in lengths_of(made))
    if role is ONLINE:
        starts = [r for r in made.requests if r.after is None]
        assert len(starts) == pytest.approx(1200, rel=0.1)
        assert WORKLOADS[name].in_sessions == (len(starts) < len(made.requests))
        assert 0 <= made.requests[0].arrival_s <= made.requests[-1].arrival_s < 600
    else:
        assert len(made.requests) == 300
        assert made.requests[-1].arrival_s == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"rate": 1e9, "duration_s": 1.0}, "1e+09 requests/s for 1 s are 1,000,000,000 requests"),
        ({"rate": 1000.0}, "1000 requests/s for 3600 s are 3,600,000 requests"),
        ({"num_requests": 10**7}, "azure-like: 10,000,000 requests"),
    ],
)
def test_more_requests_than_memory_holds_are_refused_before_they_are_made(asked, said):
    with pytest.raises(WorkloadError) as refused:
        load_workload("azure-like", seed=0, **asked)
    assert said in str(refused.value) and "at most 1,000,000" in str(refused.value)


@pytest.mark.parametrize("name", GENERATED)
def test_clients_ask_for_the_most_that_the_data_set_has(name):
    made = load_workload(name, seed=4, num_requests=300).requests
    [limit] = {r.max_new_tokens for r in made}
    assert limit == WORKLOADS[name].max_new_tokens >= max(r.num_output_tokens for r in made)


def test_azure_like_has_the_statistics_of_the_trace():
    made = summarize(load_workload("azure-like", seed=1))
    assert made.mean_rate == pytest.approx(5.53, rel=0.03)
    assert made.mean_prompt_tokens == pytest.approx(1154.7, rel=0.04)
    assert made.mean_output_tokens == pytest.approx(211.1, rel=0.04)
    assert made.max_prompt_tokens <= 14_050
    assert made.max_output_tokens <= 1000


def test_a_trace_is_sampled_repeated_and_cut(tmp_path):
    folder = azure_folder(tmp_path)
    whole = load_workload("azure-conv", seed=0, data_dir=folder)
    assert len(whole.requests) == 100
    sampled = load_workload("azure-conv", seed=0, data_dir=folder, rate=0.5, duration_s=60)
    assert len(sampled.requests) == 30
    assert set(rids_of(sampled)) <= set(rids_of(whole)[:60])
    longer = load_workload("azure-conv", seed=0, data_dir=folder, duration_s=250)
    assert len(longer.requests) == 250
    assert shared_ratio(longer) == 0
    few = load_workload("azure-conv", seed=0, data_dir=folder, num_requests=7)
    assert len(few.requests) == 7
    offline = load_workload("azure-conv", seed=0, data_dir=folder, request_class=OFFLINE)
    assert {(r.arrival_s, r.request_class) for r in offline.requests} == {(0, OFFLINE)}
    with pytest.raises(WorkloadError, match="needs 120 requests, the trace has 60"):
        load_workload("azure-conv", seed=0, data_dir=folder, rate=2, duration_s=60)
    # A packed file is found too.
    plain = folder / "arrivals" / "azure2023_conv.csv"
    plain.with_name("azure2023_conv.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert load_workload("azure-conv", seed=0, data_dir=folder).requests == whole.requests


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("documnets", {}, r"no workload and no file 'documnets'; choose from agents, agents-like,"),
        ("azure-conv", {}, r"azure-conv reads arrivals/azure2023_conv.csv of a data folder"),
        ("documents", {"rate": 1}, "documents: offline requests arrive at 0"),
        ("documents", {"request_class": ONLINE}, "documents is offline only"),
        ("diurnal", {"request_class": OFFLINE}, "diurnal is online only"),
        ("sharegpt", {"rate": 0}, "sharegpt: rate 0 is not above 0"),
        ("sharegpt", {"rate": 1e-9}, "no request arrives at 1e-09 req/s in 3600 s"),
        ("documents", {"num_requests": 0}, "num_requests 0 is not above 0"),
        ("sharegpt", {"num_sessions": 3}, "sharegpt is not in sessions; it has a rate"),
        ("multi-turn", {"num_sessions": 0}, "multi-turn: num_sessions 0 is not above 0"),
        ("multi-turn", {"num_sessions": 3, "rate": 1}, "a rate of starts or a number under way"),
        ("multi-turn", {"request_class": OFFLINE}, "multi-turn is online only"),
        ("agents", {}, r"agents reads sessions/kv_cache_tester_40.jsonl of a data folder"),
        ("mmlu", {"data_dir": Path(".")}, r"mmlu: neither prompts/mmlu/mmlu_dev.jsonl nor"),
    ],
)
def test_what_cannot_be_is_said(name, asked, reason):
    with pytest.raises(WorkloadError, match=reason):
        load_workload(name, seed=0, **asked)


SAMPLES = {
    "azure": (AZURE_HEADER, "2023-11-16 18:15:46,5,6", "2023-11-16 18:15:47,5,6"),
    "burstgpt": (BURSTGPT_HEADER, "5,GPT-4,5,6,11,API log", "6,GPT-4,5,6,11,API log"),
    "vidur": ("arrived_at,num_prefill_tokens,num_decode_tokens", "0.0,5,6", "1.0,5,6"),
    "splitwise": ("arrival_timestamp,prompt_size,token_size", "0.0,5,6", "1.0,5,6"),
    "lengths": ("num_prefill_tokens,num_decode_tokens", "5,6", "5,6"),
    "mooncake": tuple(
        f'{{"timestamp": {t}, "input_length": 5, "output_length": 6, "hash_ids": [{t}]}}'
        for t in (0, 1000)
    ),
    "servegen-batch": ('{"request_id": 0, "type": "text", "input_length": 5, "output_length": 6}',)
    * 2,
    "servegen-prompts": (
        '{"request_id": 0, "type": "text", "input_length": 5, "hash_ids": [7], "img_ids": []}',
    )
    * 2,
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_shows_in_the_first_line(tmp_path, name):
    path = write(tmp_path / "trace.gz", *SAMPLES[name])
    lengths = [(5, SERVEGEN_REPLY_TOKENS if name == "servegen-prompts" else 6)] * 2
    assert lengths_of(read_trace(path)) == lengths
    loaded = load_workload(str(path), seed=0, request_class=OFFLINE)
    assert lengths_of(loaded) == lengths
    assert rids_of(loaded) == ["trace-0", "trace-1"]


def test_prompts_of_servegen_share_blocks_of_16_tokens(tmp_path):
    rows = ('{"request_id": 0, "input_length": 40, "hash_ids": [1, 2, 3]}',)
    rows += ('{"request_id": 1, "input_length": 34, "hash_ids": [1, 2, 4]}',)
    one, other = read_trace(write(tmp_path / "t.jsonl", *rows)).requests
    assert [segment.num_tokens for segment in one.segments] == [16, 16, 8]
    assert one.segments[:2] == other.segments[:2] and one.segments[2] != other.segments[2]
    bad = write(tmp_path / "b.jsonl", '{"request_id": 0, "input_length": 40, "hash_ids": [1]}')
    with pytest.raises(RowError, match="blocks of 16 tokens make 3"):
        read_trace(bad)


def test_images_of_servegen_are_encoded(tmp_path):
    """Job c names the images of a line, job f has lines whose prompts are mostly an image."""
    rows = [
        f'{{"request_id": {n}, "type": "multimodal", "input_length": 34, "hash_ids": [1, 2, {n}],'
        f' "img_ids": ["img_{image}"]}}'
        for n, image in ((3, 1), (4, 2), (5, 1))
    ]
    one, other, again = read_trace(write(tmp_path / "c.jsonl", *rows)).requests
    assert [media[1:] for media in one.media] == [(34, SERVEGEN_IMAGE_TOKENS)]
    assert one.media == again.media != other.media
    row = '{"request_id": 0, "type": "multimodal", "input_length": 1134, "output_length": 495}'
    (balanced,) = read_trace(write(tmp_path / "f.jsonl", row)).requests
    assert balanced.num_prompt_tokens == 1134
    assert [media[1:] for media in balanced.media] == [(SERVEGEN_TEXT_TOKENS, 878)]


def test_workloads_of_inference_perf_have_its_statistics():
    chat = load_workload("interactive-chat", seed=0, num_sessions=40, duration_s=600)
    jobs = [load_workload(f"batch-{n}", seed=0) for n in ("summarization", "synthetic-data")]
    means = [
        [sum(pair) / len(pair) for pair in zip(*lengths_of(made), strict=True)]
        for made in (chat, *jobs)
    ]
    published = [[4000, 300], [15_500, 500], [2500, 4250]]
    assert means == [pytest.approx(mean, rel=0.1) for mean in published]
    heads = {request.segments[0] for made in jobs for request in made.requests}
    assert sorted(head.num_tokens for head in heads) == [500, 2000]


def test_other_files_are_refused_with_what_is_known(tmp_path):
    path = write(tmp_path / "x.csv", "a,b", "1,2")
    with pytest.raises(WorkloadError, match=r"no known format, it begins 'a,b.*BurstGPT"):
        read_trace(path)


def test_a_file_of_lengths_arrives_as_a_poisson_process(tmp_path):
    rows = [f"{10 + i},{i + 1}" for i in range(200)]
    path = write(tmp_path / "l.csv", "num_prefill_tokens,num_decode_tokens", *rows)
    made = load_workload(str(path), seed=0, rate=1, duration_s=100)
    assert len(made.requests) == pytest.approx(100, abs=35)
    assert lengths_of(made) != sorted(lengths_of(made))
    assert 0 < made.requests[-1].arrival_s < 100


def test_a_batch_file_needs_no_tokenizer_and_its_lines_can_be_chats(tmp_path):
    body = {"prompt": "abcd", "max_tokens": 2}
    rows = [{"custom_id": name, "url": "/v1/completions", "body": body} for name in "ab"]
    path = str(write_jsonl(tmp_path / "b.jsonl", *rows))
    assert lengths_of(load_workload(path, seed=0)) == [(1, 2), (1, 2)]
    made = load_workload(path, seed=0, tokenize=lambda text: list(text.encode()))
    assert lengths_of(made) == [(4, 2), (4, 2)]
    assert made.requests[0].request_class is OFFLINE
    chats = load_workload(path, seed=0, request_class=ONLINE, rate=2, duration_s=20).requests
    assert len(chats) == pytest.approx(40, abs=20) and 0 < chats[-1].arrival_s < 20
    assert [chat.rid for chat in chats[:3]] == ["a-0", "b-0", "a-1"]
    path = str(write(tmp_path / "empty.jsonl", '{"custom_id": 1}'))
    with pytest.raises(WorkloadError, match="custom_id is not a text"):
        load_workload(path, seed=0)


def test_the_tables_of_the_page_are_current():
    page = (ROOT / PATH).read_text(encoding="utf-8")
    assert page == with_tables(page), "run python -m cosched_traces.docs"
