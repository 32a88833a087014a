"""What forecasts would have said of a job that was simulated: its records, through the real code.

    python -m cosched.simulate ... --records job.jsonl
    python -m tests.batch.replay job.jsonl:4056 ...    # reply limit of its lines [tokens]

prints the error of the forecast end of each job, by the share of the job's time that has passed.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from pathlib import Path
from statistics import fmean

from cosched.batch.forecast import forecasts_of
from cosched.batch.rate import EndedLine, RateMeter, RunningLine, WorkProgress
from cosched.core.batch import BatchShape, Prefill
from cosched.core.request import RequestClass
from cosched.core.shares import share_of
from cosched.lab.cost_models.registry import make_cost_model
from cosched.lab.metrics.records import read_records
from tests.batch.stand_in import Clock
from tests.batch.test_store import batch_of

SHARES = (1 / 3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
HIGH_WATERMARK = 100_000
STEP_S = 1.0
CHUNK = 1024


def num_bytes(record):
    """Of its line: some four bytes a token, and what is around the prompt."""
    return 4 * record.num_prompt_tokens + 150


def num_tokens(record, now_s):
    return bisect_right(record.token_times, now_s)


def errors(records, *, cost_model, limit, shares=SHARES, window_s=86400.0):
    """Error of the forecast end of a job at shares of its time, by its whole time; None: no
    forecast yet. Lines are sent as the feeder does, in the order of the records."""
    lines = [one for one in records if one.request_class is RequestClass.OFFLINE]
    online = [one for one in records if one.request_class is RequestClass.ONLINE]
    iterations = sorted({at for one in records for at in one.token_times or ()})
    makespan_s = max(one.finish_s for one in lines)

    def seconds(decodes, prefills=()):
        return cost_model.iteration_s(BatchShape(prefills=prefills, decodes=decodes))

    def progress(now_s):
        chats = [
            one.num_prompt_tokens + num_tokens(one, now_s)
            for one in online
            if one.token_times and one.token_times[0] <= now_s < one.token_times[-1]
        ]
        running = [one for one in lines if one.first_token_s <= now_s < one.finish_s]
        contexts = [one.num_prompt_tokens + num_tokens(one, now_s) for one in running]
        decodes = [*chats, *contexts[::4]]
        decode_s = seconds(decodes)
        token_s = (seconds(decodes, [Prefill(CHUNK, 0)]) - decode_s) / CHUNK
        prompts = sum(
            one.num_prompt_tokens
            for one in online
            if one.first_token_s is not None and one.first_token_s <= now_s
        )
        return WorkProgress(
            running=[
                RunningLine(one.num_prompt_tokens, num_tokens(one, now_s), limit) for one in running
            ],
            num_iterations=bisect_right(iterations, now_s),
            num_online=prompts,
            prefill_token_s=token_s,
            decode_s=decode_s,
        )

    clock = Clock()
    start_s = clock.now_s
    meter = RateMeter(clock)
    ends = sorted(lines, key=lambda one: one.finish_s)
    num_ended, found = 0, []
    for share in shares:
        while True:
            clock.now_s += STEP_S
            now_s = clock.now_s - start_s
            while num_ended < len(ends) and ends[num_ended].finish_s <= now_s:
                one = ends[num_ended]
                ended = EndedLine(one.num_prompt_tokens, one.num_output_tokens)
                meter.finished(ended, num_bytes=num_bytes(one))
                num_ended += 1
            left = [one for one in lines if one.finish_s > now_s]
            begun = [one for one in left if one.first_token_s <= now_s]
            others = [one for one in left if one.first_token_s > now_s]
            sent = [*begun, *others[: max(HIGH_WATERMARK - len(begun), 0)]]
            meter.progressed(progress(now_s))
            meter.look(len(sent))
            if now_s >= share * makespan_s:
                break
        rate = meter.rate()
        if rate is None:
            found.append(None)
            continue
        batch = batch_of(
            num_bytes=sum(map(num_bytes, lines)),
            expires_at=window_s,
            total=len(lines),
            completed=num_ended,
            input_tokens=sum(one.num_prompt_tokens for one in ends[:num_ended]),
            output_tokens=sum(one.num_output_tokens for one in ends[:num_ended]),
        )
        told = forecasts_of(
            [batch],
            now=now_s,
            sizes={batch.id: [num_bytes(one) for one in sent]},
            meter=meter,
            rate=rate,
            num_servers=1,
            share=lambda owner, tenant: share_of((owner, tenant), {}),
            margin_s=0.0,
        )[batch.id]
        found.append((now_s + told.finish_s) / makespan_s - 1)
    return makespan_s, found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("jobs", nargs="+", metavar="FILE:LIMIT")
    parser.add_argument("--gpu", default="A100-80")
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    name = "kernel-table" if arguments.data_dir else "roofline"
    cost_model = make_cost_model(
        name, model="Llama-3.1-8B", gpu=arguments.gpu, data_dir=arguments.data_dir
    )
    print("| job | time | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |")
    print("|---|---|" + "---|" * len(SHARES))
    rows = []
    for job in arguments.jobs:
        path, limit = job.rsplit(":", 1)
        records = list(read_records(Path(path)))
        makespan_s, found = errors(records, cost_model=cost_model, limit=int(limit))
        cells = " | ".join("-" if one is None else f"{one:+.0%}" for one in found)
        print(f"| {Path(path).stem} | {makespan_s:.0f} s | {cells} |", flush=True)
        rows.append(found)
    within = [
        fmean(row[i] is not None and abs(row[i]) <= 0.1 for row in rows) for i in range(len(SHARES))
    ]
    print("| within 10 % | | " + " | ".join(f"{one:.0%}" for one in within) + " |")
    always = sum(all(one is not None and abs(one) <= 0.1 for one in row) for row in rows)
    print(f"{always} of {len(rows)} jobs within 10 % all the time")


if __name__ == "__main__":
    main()
