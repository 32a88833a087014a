"""kill -9 at random moments, again and again: every line ends up in the outputs exactly once."""

from __future__ import annotations

import random
import time
from collections import Counter

from tests.batch.api import line
from tests.batch.jsonl.conftest import Batch
from tests.fake_server import Reply, answer
from tests.request_lines import error_of

NUM_KILLS = 6
NUM_LINES = 400
SEED = 20240611


def make_lines(rng):
    """Good lines, lines that the server refuses, broken lines, duplicates."""
    lines = []
    for number in range(NUM_LINES):
        kind = rng.random()
        if kind < 0.03:
            lines.append("{broken")
        elif kind < 0.06 and lines:
            lines.append(line(f"a{rng.randrange(number)}"))
        else:
            lines.append(line(f"a{number}", rng.choice(["ok", "refuse"])))
    return lines


def behave(asked):
    if asked.body["prompt"] == "refuse":
        return Reply(status=400, delay_s=0.02)
    return answer(asked, delay_s=0.05)


def kill_at_a_random_moment(batch, rng):
    """Half of the kills hit the start (reading back), half hit the sending."""
    process = batch.start("--concurrency", "16", "--max-wait", "20")
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0.0, 0.8))
    else:
        enough = size(batch) + rng.randrange(1, 20_000)
        deadline_s = time.monotonic() + 120
        while size(batch) < enough and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
    process.kill()
    process.communicate()


def size(batch):
    return sum(path.stat().st_size for path in (batch.out, batch.errors) if path.exists())


def test_no_line_is_lost_or_repeated(batch):
    rng = random.Random(SEED)
    batch.write(make_lines(rng))
    batch.server.behave = behave
    sizes = []
    for _ in range(NUM_KILLS):
        kill_at_a_random_moment(batch, rng)
        sizes.append(size(batch))
    assert len(set(sizes)) > NUM_KILLS / 4, f"the kills hit no different moments: {sizes}"
    report = batch.run(code=1)

    seen = Counter(record["id"] for record in batch.answers() + batch.failures())
    assert set(seen.values()) == {1}
    assert len(seen) == NUM_LINES
    assert report["counts"]["answered"] + report["counts"]["failed"] == NUM_LINES
    answered = Counter(record["custom_id"] for record in batch.answers())
    assert set(answered.values()) == {1}
    # A job that was never interrupted says the same about every line.
    again = Batch(batch.folder, batch.server, out="again.jsonl")
    again.run("--concurrency", "64", code=1)
    assert outcomes(batch) == outcomes(again)


def outcomes(batch):
    good = {record["id"]: (record["custom_id"], "answered") for record in batch.answers()}
    bad = {r["id"]: (r["custom_id"], error_of(r)["code"], r["line"]) for r in batch.failures()}
    assert not good.keys() & bad.keys()
    return good | bad
