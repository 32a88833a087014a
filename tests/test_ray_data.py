"""The stage of Ray Data, with two replicas that are no engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from cosched.errors import CoschedError
from tests.batch.api import line, serving

ray = pytest.importorskip("ray", reason="the stage needs Ray Data (cosched[ray])")
pytest.importorskip("pyarrow")

from cosched.ray_data import _Answerer, _key_of, _parsed, answer, finished_keys, main, read  # noqa: E402


class Replica:
    """Echoes prompts. Each is asked at most `most` at a time; after `dies_after` it refuses all."""

    def __init__(self, *, delay_s=0.01, dies_after=None):
        self.delay_s, self.dies_after = delay_s, dies_after
        self.asked, self.order = Counter(), []
        self.now = self.most = 0
        self.app = FastAPI()
        self.app.add_api_route("/v1/completions", self.complete, methods=["POST"])

    async def complete(self, request: Request):
        prompt = (await request.json())["prompt"]
        if self.dies_after is not None and len(self.order) >= self.dies_after:
            return JSONResponse({}, status_code=503)
        self.asked[prompt] += 1
        self.order.append(prompt)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.delay_s)
        self.now -= 1
        if prompt == "refuse":
            return JSONResponse({"error": {"message": "no"}}, status_code=400)
        choice = {"index": 0, "text": f"to {prompt}", "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return {"id": "r", "choices": [choice], "usage": usage}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """On this machine alone."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture
def two():
    with contextlib.ExitStack() as stack:
        replicas = [Replica(), Replica()]
        yield replicas, [stack.enter_context(serving(one)) for one in replicas]


def records(out, name="answers"):
    return [
        json.loads(text)
        for path in (out / name).glob("*.jsonl")
        for text in path.read_text().splitlines()
    ]


def write(path, entries):
    texts = [one if isinstance(one, str) else json.dumps(one) for one in entries]
    path.write_text("\n".join(texts) + "\n")
    return str(path)


HEADS = [f"{head:02d}" * 200 for head in range(12)]


def test_a_data_set_is_answered_once_in_prefix_order_and_a_restart_resumes(two, tmp_path):
    replicas, urls = two
    lines = [line(f"c{n}", f"{HEADS[n % 12]} {n}") for n in range(600)]
    lines[100:100] = ["{broken", line("refused", "refuse")]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out"
    options = {"replicas": urls, "out": str(out), "in_flight": 8, "lines_per_block": 50}
    counts = answer(read(source), **options).to_pandas().sum()
    assert (counts["answered"], counts["failed"]) == (600, 2)
    assert counts["completion_tokens"] == 1200
    told = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in records(out)}
    assert told == {
        one["custom_id"]: f"to {one['body']['prompt']}"
        for one in lines
        if one not in lines[100:102]
    }
    assert len(records(out)) == 600
    errors = {one["custom_id"]: one for one in records(out, "errors")}
    assert {name: one["error"]["code"] for name, one in errors.items()} == {
        None: "invalid_json", "refused": "http_400",
    }  # fmt: skip
    assert errors[None]["line"] is None
    first, second = replicas
    assert first.asked and second.asked and max((first.asked + second.asked).values()) == 1
    assert max(first.most, second.most) <= 8
    # Of 12 heads in the input one after the other, each replica has few at a time.
    for one in replicas:
        heads = [prompt[:400] for prompt in one.order]
        windows = [set(heads[start : start + 24]) for start in range(0, len(heads), 24)]
        assert sum(map(len, windows)) / len(windows) < 5, windows

    # As after a kill: some results are gone, and one is cut in the middle.
    paths = sorted((out / "answers").glob("*.jsonl"))
    paths[0].unlink()
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:-10])
    num_left = len(finished_keys(str(out)))
    assert num_left < 602 and whole.startswith(paths[1].read_bytes())
    for one in replicas:
        one.asked.clear()
    counts = answer(read(source), **options).to_pandas().sum()
    assert counts["answered"] + counts["failed"] == 602 - num_left
    assert (first.asked + second.asked).total() == 602 - num_left
    assert Counter(one["custom_id"] for one in records(out)) == Counter(told.keys())


def test_lines_of_a_replica_that_is_gone_go_to_the_other(tmp_path):
    replicas = [Replica(dies_after=40), Replica()]
    source = write(tmp_path / "in.jsonl", [line(f"c{n}") for n in range(200)])
    with serving(replicas[0]) as first, serving(replicas[1]) as second:
        blocks = answer(
            read(source),
            replicas=[first, second],
            out=str(tmp_path / "out"),
            in_flight=8,
            lines_per_block=25,
            max_wait_s=1.0,
        )
        assert blocks.to_pandas().sum()["answered"] == 200
    assert len({one["custom_id"] for one in records(tmp_path / "out")}) == 200
    assert len(replicas[0].order) == 40 and len(replicas[1].order) == 160


def test_the_command_takes_parquet(two, tmp_path, capsys):
    import pyarrow as pa
    from pyarrow import parquet

    _, urls = two
    source, out = tmp_path / "in.parquet", tmp_path / "out"
    rows = [line(f"c{n}") for n in range(60)]
    rows[3]["body"]["stop"] = ["x"]
    parquet.write_table(pa.Table.from_pylist(rows), source)
    call = ["-i", str(source), "-o", str(out), "--base-url", f"{urls[0]}/v1", "--base-url", urls[1]]
    main(call)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["answered"], told["failed"]) == (60, 0)
    assert len(records(out)) == 60
    main(call)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["answered"] == 0


def test_a_block_that_ray_repeats_sends_what_has_no_result(two, tmp_path):
    import pyarrow as pa

    (first, _), urls = two
    finished_keys(str(tmp_path))  # makes the folders
    lines = [json.dumps(line(f"c{n}")).encode() for n in range(30)]
    table = pa.table({"key": [_key_of(_parsed(one, 10**6), one) for one in lines], "data": lines})

    async def run():
        answerer = _Answerer(
            replicas=urls,
            next_ticket=lambda: ray.put(0),
            out=str(tmp_path),
            in_flight=4,
            max_line_bytes=10**6,
            max_wait_s=5.0,
            api_key=None,
        )
        return [block async for block in answerer(table)]

    [counts] = asyncio.run(run())
    assert counts["answered"] == [30] and first.asked.total() == 30
    [path] = (tmp_path / "answers").glob("*.jsonl")
    kept = path.read_bytes().splitlines(keepends=True)[:20]
    path.write_bytes(b"".join(kept) + b'{"id": "cut')
    [counts] = asyncio.run(run())
    assert counts["answered"] == [10] and first.asked.total() == 40
    assert len({one["custom_id"] for one in records(tmp_path)}) == 30


def test_a_line_that_cannot_be_answered_cancels_its_block(two, tmp_path):
    """No line may be sent after that: Ray repeats the block, and would send it twice."""
    import pyarrow as pa

    (first, _), urls = two
    finished_keys(str(tmp_path))
    lines = [json.dumps(line(f"c{n}")).encode() for n in range(9)]
    table = pa.table({"key": [_key_of(_parsed(one, 10**6), one) for one in lines], "data": lines})

    class Gone(Exception):
        pass

    async def run():
        answerer = _Answerer(
            replicas=urls[:1],
            next_ticket=lambda: ray.put(0),
            out=str(tmp_path),
            in_flight=1,
            max_line_bytes=10**6,
            max_wait_s=5.0,
            api_key=None,
        )
        send = answerer._send

        async def fail_at_c3(request):
            if request.custom_id == "c3":
                raise Gone
            return await send(request)

        answerer._send = fail_at_c3
        with pytest.raises(Gone):
            [block async for block in answerer(table)]
        await asyncio.sleep(0.5)

    asyncio.run(run())
    assert set(first.asked) == {"c0", "c1", "c2"} and len(records(tmp_path)) == 3


def test_an_unusable_folder_is_reported(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(CoschedError, match="out"):
        finished_keys(str(tmp_path / "out"))
