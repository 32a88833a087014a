"""What the endpoints of this server can do: by the kind of its model, and by SGLang's own request
models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang.srt.entrypoints.openai import protocol

from cosched.errors import RequestError
from cosched.wire import MAX_TOKENS_KEY

_TEXT_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_EMBEDDING_URLS = ("/v1/embeddings",)
_CLASSIFIER_URLS = ("/v1/classify",)
_CLASSIFIER = re.compile("Classification|Reward")
"""In the architecture of a model that classifies. Of others SGLang calls an embedding a class."""
_OF_BOTH_URLS = ("/v1/rerank", "/v1/score")
_TEXT_ROUTES = frozenset(
    {
        *_TEXT_URLS,
        *("/api/chat", "/api/generate", "/generate", "/invocations"),
    }
)
"""Routes that generate text."""

_MODELS: Mapping[str, tuple[Any, ...]] = {
    "/v1/chat/completions": (protocol.ChatCompletionRequest,),
    "/v1/completions": (protocol.CompletionRequest,),
    "/v1/embeddings": (protocol.EmbeddingRequest,),
    "/v1/responses": (protocol.ResponsesRequest,),
}
"""Endpoints whose fields OpenAI defines -> SGLang's models of their bodies."""

_WITHOUT_EFFECT = frozenset(
    {
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "stream_options", "user", "verbosity"),
    }
)
"""Fields of OpenAI's that SGLang does not read and that change no more than price, speed or style
of a reply."""

_HARMLESS = {"/v1/responses": frozenset({"ignore_eos"})}
"""The same, of SGLang's own fields on endpoints that do not read them."""

_UNREAD = {"/v1/completions": frozenset({"best_of", "suffix"})}
"""Fields in SGLang's models that nothing reads, although replies should depend on them."""

_TOOLS = frozenset({"custom", "function"})


def urls_of(manager: Any) -> tuple[str, ...]:
    """The endpoints, of those that batches may have, that the model of SGLang's tokenizer manager
    has."""
    if manager.is_generation:
        return (*_TEXT_URLS, *_OF_BOTH_URLS)
    is_classifier = _CLASSIFIER.search(manager.model_config.hf_config.architectures[0])
    return (*_EMBEDDING_URLS, *(_CLASSIFIER_URLS if is_classifier else ()), *_OF_BOTH_URLS)


def check_route(route: str, manager: Any) -> None:
    """RequestError for an endpoint that the model does not have: SGLang would fail in its forward
    pass, or in the chat template that an embedding model lacks."""
    if route in _TEXT_ROUTES and not manager.is_generation:
        wrong = "generates text, and this is an embedding model"
    elif route in _EMBEDDING_URLS and manager.is_generation:
        wrong = "is for embedding models (--is-embedding), and this model generates text"
    elif route in _CLASSIFIER_URLS and route not in urls_of(manager):
        wrong = "is for models that classify, which this one does not"
    else:
        return
    raise RequestError(route, f"{wrong}; choose from {', '.join(urls_of(manager))}")


def fields_by_url() -> dict[str, frozenset[str]]:
    """Endpoint -> the fields that its bodies may have."""
    found = {}
    for url, models in _MODELS.items():
        names = {
            name
            for model in models
            for field, info in model.model_fields.items()
            for name in (field, info.alias)
            if name
        }
        unread, harmless = _UNREAD.get(url, frozenset()), _HARMLESS.get(url, frozenset())
        found[url] = frozenset(names) - unread | harmless | _WITHOUT_EFFECT
    return found


def usable_tools(app: Any) -> frozenset[str]:
    """Types of tools that ``/v1/responses`` can call; empty: SGLang decides. Its schema lets all of
    OpenAI's types pass."""
    serving = getattr(app.state, "openai_serving_responses", None)
    if serving is None or serving.use_harmony or serving._translates_tools:
        return frozenset()
    return frozenset() if serving.tool_call_parser == "muse" else _TOOLS


def limit_reply(obj: Any, num_prompt_tokens: int, manager: Any) -> None:
    """A request without ``max_tokens`` gets the default of the model, which only demo models have
    in their generation config; otherwise it may fill the context, as in stock."""
    most = getattr(manager.model_config.hf_generation_config, MAX_TOKENS_KEY, None)
    params = obj.sampling_params
    if most is None or not isinstance(params, dict) or params.get("ignore_eos"):
        return
    left = manager.model_config.context_len - num_prompt_tokens - 1
    if params.get("max_new_tokens", 0) is None and left > 0:
        params["max_new_tokens"] = min(most, left)


def served_name(manager: Any) -> str:
    name: str = manager.served_model_name
    return name
