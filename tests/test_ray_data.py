"""The stage of Ray Data, with two replicas that are no engines."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from cosched.errors import CoschedError
from tests.batch.api import line
from tests.fake_server import FakeServer, Reply, answer
from tests.request_lines import error_of

ray = pytest.importorskip("ray", reason="the stage needs Ray Data (cosched[ray])")
pytest.importorskip("pyarrow")

from cosched.ray_data import _Answerer, _key_of, _parsed, finished_keys, main, read  # noqa: E402
from cosched.ray_data import answer as answer_all  # noqa: E402


def echo(asked):
    if asked.body["prompt"] == "refuse":
        return Reply.of({"error": {"message": "no"}}, status=400)
    return answer(asked, delay_s=0.01)


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
    with FakeServer(echo) as first, FakeServer(echo) as second:
        yield (first, second), [first.base_url, second.base_url]


def counted(*replicas):
    """How often each prompt was sent."""
    return Counter(prompt for one in replicas for prompt in one.prompts())


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
    counts = answer_all(read(source), **options).to_pandas().sum()
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
    assert {name: error_of(one)["code"] for name, one in errors.items()} == {
        None: "invalid_json_line", "refused": "http_400",
    }  # fmt: skip
    assert errors[None]["line"] is None
    first, second = replicas
    assert first.asked and second.asked and max(counted(first, second).values()) == 1
    assert max(first.max_waiting, second.max_waiting) <= 8
    # Of 12 heads in the input one after the other, each replica has few at a time.
    for one in replicas:
        heads = [prompt[:400] for prompt in one.prompts()]
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
    counts = answer_all(read(source), **options).to_pandas().sum()
    assert counts["answered"] + counts["failed"] == 602 - num_left
    assert counted(first, second).total() == 602 - num_left
    assert Counter(one["custom_id"] for one in records(out)) == Counter(told.keys())


def test_lines_of_a_replica_that_is_gone_go_to_the_other(two, tmp_path):
    (first, second), urls = two
    taken = []

    def die_after_40(asked):
        if len(taken) >= 40:
            return Reply(status=503)
        taken.append(asked)
        return echo(asked)

    first.behave = die_after_40
    source = write(tmp_path / "in.jsonl", [line(f"c{n}") for n in range(200)])
    options = {"in_flight": 8, "lines_per_block": 25, "max_wait_s": 1.0}
    blocks = answer_all(read(source), replicas=urls, out=str(tmp_path / "out"), **options)
    assert blocks.to_pandas().sum()["answered"] == 200
    assert len({one["custom_id"] for one in records(tmp_path / "out")}) == 200
    assert len(taken) == 40 and len(second.asked) == 160


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


def table_of(count):
    import pyarrow as pa

    lines = [json.dumps(line(f"c{n}")).encode() for n in range(count)]
    return pa.table({"key": [_key_of(_parsed(one, 10**6), one) for one in lines], "data": lines})


def answerer(replicas, out, *, in_flight=4):
    return _Answerer(
        replicas=replicas,
        next_ticket=lambda: ray.put(0),
        out=str(out),
        in_flight=in_flight,
        max_line_bytes=10**6,
        max_wait_s=5.0,
        api_key=None,
    )


def test_a_block_that_ray_repeats_sends_what_has_no_result(two, tmp_path):
    (first, _), urls = two
    finished_keys(str(tmp_path))  # makes the folders

    async def run():
        return [block async for block in answerer(urls, tmp_path)(table_of(30))]

    [counts] = asyncio.run(run())
    assert counts["answered"] == [30] and len(first.asked) == 30
    [path] = (tmp_path / "answers").glob("*.jsonl")
    kept = path.read_bytes().splitlines(keepends=True)[:20]
    path.write_bytes(b"".join(kept) + b'{"id": "cut')
    [counts] = asyncio.run(run())
    assert counts["answered"] == [10] and len(first.asked) == 40
    assert len({one["custom_id"] for one in records(tmp_path)}) == 30


def test_a_line_that_cannot_be_answered_cancels_its_block(two, tmp_path):
    """No line may be sent after that: Ray repeats the block, and would send it twice."""
    (first, _), urls = two
    finished_keys(str(tmp_path))

    async def run():
        one_by_one = answerer(urls[:1], tmp_path, in_flight=1)
        send = one_by_one._send

        async def fail_at_c3(request):
            if request.custom_id == "c3":
                raise ZeroDivisionError
            return await send(request)

        one_by_one._send = fail_at_c3
        with pytest.raises(ZeroDivisionError):
            [block async for block in one_by_one(table_of(9))]
        await asyncio.sleep(0.5)

    asyncio.run(run())
    assert first.prompts() == ["c0", "c1", "c2"] and len(records(tmp_path)) == 3


def test_an_unusable_folder_is_reported(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(CoschedError, match="out"):
        finished_keys(str(tmp_path / "out"))
