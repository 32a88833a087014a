"""A request on which the engine fails, on two ranks of a real server."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine.shutdown import EXIT_CODE
from tests.server.poisoned import FAILS, LEAKS
from tests.serving import start_server

pytestmark = pytest.mark.server

FLAGS = ("--tp", "2", "--cosched-policy", "tests.server.poisoned:Poisoned")
DRAIN = ("--cosched-drain-s", "5")
NUM = 6


def ask(server, rid, index):
    body = {
        "rid": rid,
        "text": f"{index} hello there " * (3 + 2 * index),
        "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True},
        "priority": -1 if index % 2 else 0,
    }
    return httpx.post(f"{server.url}/generate", json=body, timeout=120)


def ask_all(server, turn, *others):
    rids = [(f"{turn}-{index}", index) for index in range(NUM)]
    with ThreadPoolExecutor(NUM + len(others)) as threads:
        replies = list(threads.map(lambda item: ask(server, *item), [*rids, *others]))
    tokens = [tuple(reply.json()["output_ids"]) for reply in replies[:NUM]]
    return tokens, replies[NUM:]


def test_a_failing_request_is_refused_and_a_leak_drains_the_server(tiny_model):
    # Not a fork: the scheduler's parent must be the server, as it is for users.
    with start_server(tiny_model, *FLAGS, *DRAIN) as server:
        expected, _ = ask_all(server, "alone")
        tokens, (reply,) = ask_all(server, "beside", (f"{FAILS}1", 3))
        assert tokens == expected
        assert reply.status_code == 400
        assert "ZeroDivisionError" in reply.text
        info = httpx.get(f"{server.url}/get_server_info", timeout=30).json()
        assert info["internal_states"][0]["cosched"]["failures"] == {"batch": 1}
        assert ask(server, "after", 0).status_code == 200

        ask(server, f"{LEAKS}1", 1)
        assert server.process.wait(60) == EXIT_CODE, server.log()[-4000:]
        assert "KV memory is not consistent" in server.log()
