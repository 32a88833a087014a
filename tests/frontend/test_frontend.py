"""What SGLang's frontend sends through cosched's endpoints, against a server that only listens."""

from __future__ import annotations

import itertools
import json
import threading

import pytest

from cosched.errors import ConfigError
from cosched.frontend import OfflineEndpoint, offline  # before sglang
from cosched.wire import OFFLINE_PRIORITY

import sglang as sgl  # isort: skip

from tests.batch.api import until
from tests.fake_server import FakeServer, Reply


class Listener(FakeServer):
    """Keeps the body of each ``/generate``; answers ``x``, with made-up log probabilities."""

    def __init__(self):
        super().__init__(self.generate)
        self.gate = threading.Event()
        self.gate.set()

    @property
    def bodies(self):
        return [asked.body for asked in self.asked]

    @property
    def priorities(self):
        """Distinct priorities of what came, for a program's many requests."""
        return {body.get("priority") for body in self.bodies}

    def get(self, path):
        return Reply.of({"model_path": "none", "is_generation": True})

    def generate(self, asked):
        self.gate.wait(120)
        # The first token of a prompt follows nothing; SGLang's choices rely on the None.
        first = None if "input_ids" in asked.body else -0.5
        probabilities = [[first, 1, "a"], [-0.5, 2, "b"]]
        meta = {"prompt_tokens": 4, "input_token_logprobs": probabilities}
        one = {"text": "x", "meta_info": {**meta, "output_token_logprobs": []}}
        batch = asked.body.get("text") or asked.body.get("input_ids")
        result = [one] * len(batch) if isinstance(batch, list) else one
        if not asked.body.get("stream"):
            return Reply.of(result)
        events = f"data: {json.dumps(result)}\n\ndata: [DONE]\n\n".encode()
        return Reply(body=events, headers={"content-type": "text/event-stream"})


@pytest.fixture
def listener():
    with Listener() as server:
        yield server
        server.gate.set()


@pytest.fixture
def endpoint(listener):
    return sgl.RuntimeEndpoint(listener.base_url)


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


def test_an_offline_endpoint_adds_the_priority_to_all_requests_and_nothing_else(listener, endpoint):
    def bodies(backend):
        listener.asked.clear()
        everything.run(question="why", backend=backend).sync()
        run_to_end(everything.run(question="how", backend=backend, stream=True))
        backend.cache_prefix("a prefix")
        assert kinds(listener.bodies) == KINDS
        return sorted(json.dumps(body, sort_keys=True) for body in listener.bodies)

    plain = [json.loads(body) for body in bodies(endpoint)]
    marked = [json.loads(body) for body in bodies(OfflineEndpoint(listener.base_url))]
    assert [body | {"priority": OFFLINE_PRIORITY} for body in plain] == marked


@pytest.mark.parametrize("generator_style", [False, True])
@pytest.mark.parametrize("num_threads", ["auto", 1])
def test_run_batch(listener, num_threads, generator_style):
    states = ask.run_batch(
        [{"question": str(i)} for i in range(20)],
        backend=OfflineEndpoint(listener.base_url),
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
        listener.asked.clear()
        ask.run_batch(self.BATCH)
        assert listener.priorities == {None}

    def test_backend_of_ones_own(self, listener, endpoint):
        with offline(endpoint) as twin:
            ask.run_batch(self.BATCH, backend=endpoint)
            ask.run_batch(self.BATCH, backend=twin)
            ask.cache(backend=endpoint)
            ask.cache(backend=twin)
        assert listener.priorities == {OFFLINE_PRIORITY}
        listener.asked.clear()
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

    def test_a_program_stays_of_the_class_in_which_it_began(self, listener, endpoint):
        listener.gate.clear()
        with offline(endpoint):
            state = everything.bind(question="why").run(backend=endpoint, stream=True)
        listener.gate.set()
        run_to_end(state)
        assert kinds(listener.bodies) == KINDS
        assert listener.priorities == {OFFLINE_PRIORITY}
        listener.asked.clear()
        listener.gate.clear()
        state = everything.run(question="why", backend=endpoint, stream=True)
        with offline(endpoint):
            listener.gate.set()
            run_to_end(state)
            ask.run_batch(self.BATCH, backend=sgl.RuntimeEndpoint(listener.base_url))
        assert listener.priorities == {None}

    def test_nested_and_overlapping(self, listener, endpoint):
        def priorities():
            listener.asked.clear()
            ask.run(question="?", backend=endpoint).sync()
            return listener.priorities

        before = dict(vars(endpoint))
        with pytest.raises(KeyError), offline(endpoint):
            raise KeyError
        assert vars(endpoint) == before and not listener.bodies
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


@sgl.function
def answer_about(s, question, document):
    s += document + question
    s += sgl.gen("answer", max_tokens=2)


@pytest.mark.parametrize("as_they_come", [False, True])
def test_programs_with_one_document_run_together_and_answers_are_as_asked(listener, as_they_come):
    documents = [f"document {n} " * 40 for n in range(4)]
    arguments = [{"question": f"question {n}", "document": documents[n % 4]} for n in range(24)]
    states = answer_about.run_batch(
        arguments,
        backend=OfflineEndpoint(listener.base_url),
        num_threads=1,
        generator_style=as_they_come,
    )
    found = [state.text() for state in states]
    assert found == [f"{one['document']}{one['question']}x" for one in arguments]
    asked = [body["text"].split()[1] for body in listener.bodies]
    assert sum(a != b for a, b in itertools.pairwise(asked)) == 3
    assert len(asked) == 24


def test_as_many_programs_run_at_once_as_the_frontend_says(listener, monkeypatch):
    monkeypatch.setattr("cosched.frontend.PROGRAMS_AT_ONCE", 20)
    listener.gate.clear()
    arguments = [{"question": f"question {n}", "document": "document"} for n in range(30)]
    backend = OfflineEndpoint(listener.base_url)
    thread = threading.Thread(
        target=answer_about.run_batch, args=(arguments,), kwargs={"backend": backend}
    )
    thread.start()
    until(lambda: listener.num_waiting == 20)
    listener.gate.set()
    thread.join()
    assert listener.max_waiting == 20 and len(listener.asked) == 30
