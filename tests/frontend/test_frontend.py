"""What SGLang's frontend sends through cosched's endpoints, against a server that only listens."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cosched.core.wire import OFFLINE_PRIORITY
from cosched.errors import ConfigError
from cosched.frontend import OfflineEndpoint, offline  # before sglang

import sglang as sgl  # isort: skip


class Listener(ThreadingHTTPServer):
    """Keeps the body of each ``/generate``; answers ``x``, with made-up log probabilities."""

    daemon_threads = True
    request_queue_size = 200  # run_batch opens up to 96 connections at once

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = []
        self.gate = threading.Event()
        self.gate.set()
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def priorities(self):
        """Distinct priorities of what came, for a program's many requests."""
        return {body.get("priority") for body in self.bodies}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer({"model_path": "none", "is_generation": True})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "null")
        self.server.bodies.append(body)
        self.server.gate.wait(10)
        one = {
            "text": "x",
            "meta_info": {
                "prompt_tokens": 4,
                # The first token of a prompt follows nothing; SGLang's choices rely on the None.
                "input_token_logprobs": [
                    [None if "input_ids" in body else -0.5, 1, "a"],
                    [-0.5, 2, "b"],
                ],
                "output_token_logprobs": [],
            },
        }
        batch = body.get("text") or body.get("input_ids")
        result = [one] * len(batch) if isinstance(batch, list) else one
        if body.get("stream"):
            self.send(f"data: {json.dumps(result)}\n\ndata: [DONE]\n\n", "text/event-stream")
        else:
            self.answer(result)

    def answer(self, value):
        self.send(json.dumps(value), "application/json")

    def send(self, text, content_type):
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def listener():
    server = Listener()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def endpoint(listener):
    return sgl.RuntimeEndpoint(listener.url)


@pytest.fixture(autouse=True)
def no_default_backend():
    yield
    sgl.set_default_backend(None)


@sgl.function
def ask(s, question):
    s += "A common beginning, long enough to be cached ahead of a batch of programs: " + question
    s += sgl.gen("answer", max_tokens=2)


@sgl.function
def everything(s, question):
    s += "Q: " + question
    s += sgl.gen("first", max_tokens=2)
    s += sgl.select("choice", choices=["yes", "no"])
    s += sgl.select(
        "unconditional",
        choices=["yes", "no"],
        choices_method=sgl.unconditional_likelihood_normalized,
    )
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += f"part {i}"
        fork += sgl.gen("part", max_tokens=2)
    s += "".join(fork["part"] for fork in forks)
    s += sgl.gen("number", dtype=int)


def run_to_end(streaming_state):
    for _ in streaming_state.text_iter():
        pass


KINDS = {"single", "batch", "stream", "token ids", "nothing new"}


def kinds(bodies):
    """Which of the ways to call ``/generate`` occurred."""
    found = set()
    for body in bodies:
        found.add("batch" if isinstance(body.get("text"), list) else "single")
        found |= {"stream"} if body.get("stream") else set()
        found |= {"token ids"} if "input_ids" in body else set()
        found |= {"nothing new"} if body["sampling_params"]["max_new_tokens"] == 0 else set()
    return found


def test_all_requests_of_an_offline_endpoint_carry_the_priority(listener):
    backend = OfflineEndpoint(listener.url)
    assert isinstance(backend, sgl.RuntimeEndpoint)
    everything.run(question="why", backend=backend).sync()
    run_to_end(everything.run(question="how", backend=backend, stream=True))
    backend.cache_prefix("a prefix")
    assert kinds(listener.bodies) == KINDS
    assert listener.bodies[-1] == {
        "text": "a prefix",
        "sampling_params": {"max_new_tokens": 0},
        "priority": OFFLINE_PRIORITY,
    }
    assert listener.priorities == {OFFLINE_PRIORITY}


def test_only_the_priority_is_added(listener, endpoint):
    def bodies(backend):
        listener.bodies.clear()
        everything.run(question="why", backend=backend).sync()
        backend.cache_prefix("a prefix")
        return sorted(json.dumps(body, sort_keys=True) for body in listener.bodies)

    plain = [json.loads(body) for body in bodies(endpoint)]
    marked = [json.loads(body) for body in bodies(OfflineEndpoint(listener.url))]
    assert [body | {"priority": OFFLINE_PRIORITY} for body in plain] == marked


@pytest.mark.parametrize("generator_style", [False, True])
@pytest.mark.parametrize("num_threads", ["auto", 1])
def test_run_batch(listener, num_threads, generator_style):
    states = ask.run_batch(
        [{"question": str(i)} for i in range(20)],
        backend=OfflineEndpoint(listener.url),
        num_threads=num_threads,
        generator_style=generator_style,
    )
    assert [state["answer"] for state in states] == ["x"] * 20
    # One more: the common beginning.
    assert len(listener.bodies) == 21
    assert listener.priorities == {OFFLINE_PRIORITY}


class TestBlock:
    BATCH = tuple({"question": str(i)} for i in range(5))

    def test_default_backend(self, listener, endpoint):
        sgl.set_default_backend(endpoint)
        with offline():
            ask.run_batch(self.BATCH)
            ask.run(question="alone").sync()
        assert listener.priorities == {OFFLINE_PRIORITY}
        listener.bodies.clear()
        ask.run_batch(self.BATCH)
        assert listener.priorities == {None}

    def test_backend_of_ones_own(self, listener, endpoint):
        with offline(endpoint) as twin:
            ask.run_batch(self.BATCH, backend=endpoint)
            ask.run_batch(self.BATCH, backend=twin)
            ask.cache(backend=endpoint)
            ask.cache(backend=twin)
        assert listener.priorities == {OFFLINE_PRIORITY}
        listener.bodies.clear()
        ask.cache(backend=endpoint)
        ask.run(question="after", backend=endpoint).sync()
        assert listener.priorities == {None}

    def test_runtime(self, listener, endpoint):
        class Runtime:  # sgl.Runtime starts a server; what counts is that it has an endpoint
            def __init__(self, endpoint):
                self.endpoint = endpoint

            def cache_prefix(self, prefix):
                self.endpoint.cache_prefix(prefix)

        runtime = Runtime(endpoint)
        with offline(runtime):
            ask.run_batch(self.BATCH, backend=runtime)
            ask.cache(backend=runtime)
        assert listener.priorities == {OFFLINE_PRIORITY}
        assert vars(runtime) == {"endpoint": endpoint}

    def test_leaves_no_trace_and_asks_the_server_nothing(self, listener, endpoint):
        before = dict(vars(endpoint))
        with pytest.raises(KeyError), offline(endpoint):
            raise KeyError
        assert vars(endpoint) == before
        assert listener.bodies == []

    def test_a_program_stays_offline_after_the_block(self, listener, endpoint):
        listener.gate.clear()
        with offline(endpoint):
            state = everything.bind(question="why").run(backend=endpoint, stream=True)
        listener.gate.set()
        run_to_end(state)
        assert kinds(listener.bodies) == KINDS
        assert listener.priorities == {OFFLINE_PRIORITY}

    def test_a_program_that_already_runs_stays_online(self, listener, endpoint):
        listener.gate.clear()
        state = everything.run(question="why", backend=endpoint, stream=True)
        with offline(endpoint):
            listener.gate.set()
            run_to_end(state)
        assert listener.priorities == {None}

    def test_other_endpoints_stay_online(self, listener, endpoint):
        with offline(endpoint):
            ask.run_batch(self.BATCH, backend=sgl.RuntimeEndpoint(listener.url))
        assert listener.priorities == {None}

    def test_nested_and_overlapping(self, listener, endpoint):
        def priorities():
            listener.bodies.clear()
            ask.run(question="?", backend=endpoint).sync()
            return listener.priorities

        before = dict(vars(endpoint))
        first, second = offline(endpoint), offline(endpoint)
        first.__enter__()
        twin = second.__enter__()
        first.__exit__(None, None, None)
        assert priorities() == {OFFLINE_PRIORITY}
        with offline(twin), offline(endpoint):
            assert priorities() == {OFFLINE_PRIORITY}
        assert priorities() == {OFFLINE_PRIORITY}
        second.__exit__(None, None, None)
        assert priorities() == {None}
        with offline(twin):
            pass
        assert vars(endpoint) == before

    def test_many_threads_at_once(self, listener, endpoint):
        failures = []

        def work():
            for _ in range(10):
                with offline(endpoint):
                    listener_priority = endpoint.endpoint
                    if not isinstance(listener_priority, OfflineEndpoint):
                        failures.append(listener_priority)
                    ask.run(question="?", backend=endpoint).sync()

        before = dict(vars(endpoint))
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert listener.priorities == {OFFLINE_PRIORITY}
        assert vars(endpoint) == before

    @pytest.mark.parametrize("backend", [None, "http://localhost:30000", object()])
    def test_needs_an_endpoint(self, backend):
        with pytest.raises(ConfigError, match="needs a RuntimeEndpoint or a Runtime, found"):
            with offline(backend):
                pass
