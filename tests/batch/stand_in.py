"""A server with the routes, the store and the feeder of batches, and a stand-in for the engine."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from cosched.batch.batch_records import Offer
from cosched.batch.message_batches import add_message_routes
from cosched.batch.routes import add_routes
from cosched.batch.service import BatchService
from cosched.limits.bounds import Scope


class Clock:
    now_s = 1_000_000.0

    def __call__(self):
        return self.now_s


class StandIn:
    """What the engine was asked, and what it answers: `delay_s` after, an echo of the prompt; 400
    where the prompt is "refuse", 503 at first where it is "busy", and nothing as long as `is_held`
    or to requests after the first `num_answered`."""

    def __init__(self, config, *, delay_s=0.01, clock=time.time, keys=None, tracer=None):
        self.delay_s = delay_s
        self.asked = Counter()
        self.order = []
        self.deadlines = {}
        self.traceparents = {}
        self.usage = {"prompt_tokens": 3, "completion_tokens": 2}
        self.hung_up = 0
        self.note = None  # a file to which each prompt is written
        self.is_held = False
        self.num_answered = None
        self.is_paused = False
        self.models_asked = []
        self.refusal = "not this one"
        self.names, self.adapters = ["m"], []
        self.offer = Offer()
        self.num_in_flight = 0
        self.most_in_flight = 0
        self.service = BatchService(config, clock=clock, keys=keys, tracer=tracer)

        @asynccontextmanager
        async def lifespan(app):
            async with self.service.feeding(
                app,
                api_key="secret",
                state=self.state,
                is_paused=lambda: self.is_paused,
                scope=Scope(keeps_seeds=False),
            ):
                yield

        self.app = FastAPI(lifespan=lifespan)
        self.app.add_api_route("/health", self.health)
        self.app.add_api_route("/v1/models", self.models)
        self.app.add_api_route("/server_info", self.info)
        self.app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        self.app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        self.app.add_api_route("/v1/embeddings", self.embed, methods=["POST"])
        self.app.add_api_route("/v1/responses", self.respond, methods=["POST"])
        self.app.add_api_route("/v1/messages", self.message, methods=["POST"])
        isolates = config.isolates(api_key="secret")
        for add in (add_routes, add_message_routes):
            add(self.app, self.service, isolate_keys=isolates, offer=lambda: self.offer)

    def state(self, deadline_s, *payer):
        return {"own": True, "deadline_s": deadline_s}

    async def info(self):
        return {"internal_states": [{"cosched": {"policy": "hygen"}}]}

    async def health(self):
        return {}

    async def models(self):
        cards = [{"id": name, "parent": None} for name in self.names]
        return {"data": cards + [{"id": name, "parent": "m"} for name in self.adapters]}

    async def complete(self, request: Request):
        body = json.loads(await request.body())
        assert body["service_tier"] == "flex"
        prompt = body["prompt"]
        self.models_asked.append(body.get("model"))
        await self.run(request, prompt)
        if prompt == "busy" and self.asked[prompt] == 1:
            return JSONResponse({}, status_code=503)
        if prompt == "refuse":
            message = self.refusal
            return JSONResponse({"error": {"message": message}}, status_code=400)
        choice = {"index": 0, "text": f"to {prompt}", "finish_reason": "stop"}
        return {"id": "r", "choices": [choice], "usage": self.usage}

    async def message(self, request: Request):
        body = json.loads(await request.body())
        prompt = body["messages"][-1]["content"]
        await self.run(request, prompt)
        if prompt == "refuse":
            error = {"type": "invalid_request_error", "message": self.refusal}
            return JSONResponse({"type": "error", "error": error}, status_code=400)
        usage = {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 2}
        return {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": f"to {prompt}"}],
            "model": body["model"],
            "stop_reason": "end_turn",
            "usage": usage,
        }

    async def run(self, request, prompt):
        assert request.state.own and request.headers["authorization"] == "Bearer secret"
        self.asked[prompt] += 1
        self.order.append(prompt)
        self.deadlines[prompt] = request.state.deadline_s
        self.traceparents[prompt] = request.headers.get("traceparent")
        if self.note is not None:
            os.write(self.note, f"{prompt}\n".encode())
        number = len(self.order)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            await asyncio.sleep(self.delay_s)
            while self.is_held or number > (self.num_answered or number):
                if await request.is_disconnected():
                    self.hung_up += 1
                    break
                # However many are held, they wake the loop equally often.
                await asyncio.sleep(max(0.01, self.num_in_flight / 5000))
        finally:
            self.num_in_flight -= 1

    async def chat(self, request: Request):
        body = json.loads(await request.body())
        assert body["service_tier"] == "flex"
        content = body["messages"][-1]["content"]
        text = content if isinstance(content, str) else content[0]["text"]
        await self.run(request, text)
        if text == "refuse":
            return JSONResponse({"error": {"message": "not this one"}}, status_code=400)
        message = {"role": "assistant", "content": f"to {text}"}
        return {
            "id": "r",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {**self.usage, "total_tokens": 5},
        }

    async def embed(self, request: Request):
        body = json.loads(await request.body())
        vector = {"object": "embedding", "index": 0, "embedding": [float(len(body["input"]))]}
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        return {"object": "list", "data": [vector], "model": body["model"], "usage": usage}

    async def respond(self, request: Request):
        body = json.loads(await request.body())
        assert body["service_tier"] == "flex"
        usage = {
            "input_tokens": 3,
            "output_tokens": 2,
            "total_tokens": 5,
            "device_seconds": 0.5,
            "input_tokens_details": {"cached_tokens": 1},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {
            "id": "r",
            "object": "response",
            "created_at": 1,
            "status": "completed",
            "model": body.get("model", "m"),
            "output": [],
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }
