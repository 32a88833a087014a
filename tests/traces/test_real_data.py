"""Real traces read as their sources describe them. Skipped where they are not."""

import pytest

from cosched_traces.catalogue import WORKLOADS, load_workload
from cosched_traces.formats import read_trace
from cosched_traces.mmlu import generate_mmlu
from cosched_traces.trace_summary import shared_ratio
from tests.traces.samples import summarize


def test_azure_conversation(data_dir):
    made = summarize(read_trace(data_dir / "arrivals/azure2023_conv.csv"))
    assert made.num_requests == 19_366
    assert made.span_s == pytest.approx(3501.7, abs=0.1)
    assert made.mean_rate == pytest.approx(5.53, abs=0.005)
    assert made.mean_prompt_tokens == pytest.approx(1154.7, abs=0.05)
    assert made.mean_output_tokens == pytest.approx(211.1, abs=0.05)
    assert (made.max_prompt_tokens, made.max_output_tokens) == (14_050, 1000)


@pytest.mark.parametrize(
    ("name", "rows", "span_s", "prompt", "output"),
    [
        ("mooncake_fast25_synthetic", 3993, 1022.0, 15_325, 149),
        ("mooncake_arxiv_first1000", 1000, 177.1, 9792, 199),
    ],
)
def test_mooncake(data_dir, name, rows, span_s, prompt, output):
    made = summarize(read_trace(data_dir / f"arrivals/{name}.jsonl.gz"))
    assert made.num_requests == rows
    assert made.span_s == pytest.approx(span_s, abs=0.1)
    assert made.mean_prompt_tokens == pytest.approx(prompt, abs=1)
    assert made.mean_output_tokens == pytest.approx(output, abs=1)
    assert made.shared_ratio > 0.3


@pytest.mark.parametrize(
    ("name", "rows", "prompt", "output"),
    [
        ("sharegpt_8k_filtered_stats_llama2_tokenizer", 30_731, 2340, 439),
        ("bwb_stats_llama2_tokenizer_filtered_v2", 33_768, 1067, 1613),
        ("arxiv_summarization_stats_llama2_tokenizer_filtered_v2", 28_257, 2588, 291),
        ("sharegpt_val_10k_llama2", 10_000, 246, 326),
    ],
)
def test_lengths(data_dir, name, rows, prompt, output):
    made = summarize(read_trace(data_dir / f"lengths/{name}.csv.gz", format="lengths"))
    assert made.num_requests == rows
    assert made.mean_prompt_tokens == pytest.approx(prompt, abs=0.6)
    assert made.mean_output_tokens == pytest.approx(output, abs=0.6)


def test_mmlu_and_its_stand_in(data_dir):
    real, made = load_workload("mmlu", seed=0, data_dir=data_dir), generate_mmlu(seed=0)
    heads = {r.segments[0] for r in real.requests}
    assert (len(real.requests), len(heads)) == (14_042, 57)
    assert sorted(h.num_tokens for h in heads) == sorted(
        h.num_tokens for h in {r.segments[0] for r in made.requests}
    )
    assert summarize(real).mean_prompt_tokens == pytest.approx(757.5, abs=0.1)
    assert summarize(made).mean_prompt_tokens == pytest.approx(757.5, rel=0.01)
    assert shared_ratio(made) == pytest.approx(shared_ratio(real), abs=0.005)


@pytest.mark.parametrize("name", [name for name, named in WORKLOADS.items() if named.files])
def test_named_workloads_find_their_files(data_dir, name):
    made = load_workload(name, seed=0, data_dir=data_dir, num_requests=100)
    assert len(made.requests) == 100
