"""Hooks in SGLang's endpoints of OpenAI's API: what their replies say"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import ValidationError

from cosched.limits import validation
from cosched.server.owned_ids import OwnedDict
from cosched_patches.seam import Seam, after, around

_SERVING = "sglang.srt.entrypoints.openai"


def metadata_of_strings(metadata: dict[str, Any], *_: Any, **__: Any) -> dict[str, str]:
    """``metadata`` of replies is a map of strings for OpenAI's clients. Versions of the weights are
    nested in it in stock, which clients that validate replies refuse; here as JSON."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
    }


def all_output_tokens(
    params: dict[str, Any],
    request: Any,
    default_max_tokens: int | None = None,
    *_: Any,
    **__: Any,
) -> dict[str, Any]:
    """``max_output_tokens`` of /v1/responses is the number of tokens. Stock takes two off, and
    refuses a limit of 1."""
    asked = request.max_output_tokens
    if asked is None:
        return params
    most = asked if default_max_tokens is None else min(asked, default_max_tokens)
    return {**params, "max_new_tokens": most}


def own_responses(_: None, serving: Any, *__: Any, **___: Any) -> None:
    """With ``--enable-response-store`` responses belong to the API key that made them. In stock
    every client that learns an id reads the response, continues and cancels it.

    ``cached_tokens`` needs ``--enable-cache-report``, as on the other endpoints."""
    for name in ("response_store", "msg_store", "background_tasks"):
        setattr(serving, name, OwnedDict())
    manager = serving.tokenizer_manager
    serving.enable_prompt_tokens_details = manager.server_args.enable_cache_report


def parse_required_calls(original: Any, serving: Any, request: Any) -> bool:
    """Tool calls are parsed where ``tool_choice`` requires them or names a function: SGLang's
    grammar then allows only calls, as JSON. Stock returns them as text unless the server has a
    ``--tool-call-parser``."""
    is_required = request.tool_choice == "required" or not isinstance(request.tool_choice, str)
    if serving.tool_call_parser or not request.tools or not is_required:
        return bool(original(serving, request))
    return not request._response_parser_json_response_format


def keep_served_name(original: Any, manager: Any, model_path: str, load_format: str) -> None:
    """A model keeps the name that the operator gave it. In stock it has that of its folder after an
    update of the weights from disk; lines of batches that name the model would be refused."""
    name = manager.served_model_name
    is_given = name != manager.model_path
    original(manager, model_path, load_format)
    if is_given:
        manager.served_model_name = name


def word_error(original: Any, serving: Any, message: str, *args: Any, **kwargs: Any) -> Any:
    """Messages of errors are one line. Stock passes on what libraries print: a schema that a tool's
    does not fit, errors of every form that a message may have."""
    error = sys.exception()
    if isinstance(error, ValidationError):
        message = validation.summary(error.errors(), None)
    return original(serving, validation.one_line(message), *args, **kwargs)


SEAMS: tuple[Seam, ...] = (
    around(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._update_model_path_info",
        "self, model_path, load_format",
        keep_served_name,
    ),
    after(
        "sglang.srt.utils.weight_versions.build_endpoint_weight_version_metadata",
        "meta_info",
        metadata_of_strings,
    ),
    after(
        f"{_SERVING}.protocol.ResponsesRequest.to_sampling_params",
        "self, default_max_tokens, default_params, stop, tool_call_constraint",
        all_output_tokens,
    ),
    after(
        f"{_SERVING}.serving_responses.OpenAIServingResponses.__init__",
        "self, tokenizer_manager, template_manager, enable_prompt_tokens_details, tool_server",
        own_responses,
    ),
    around(
        f"{_SERVING}.serving_chat.OpenAIServingChat._tool_call_parsing_active",
        "self, request",
        parse_required_calls,
    ),
    around(
        f"{_SERVING}.serving_base.OpenAIServingBase.create_error_response",
        "self, message, err_type, status_code, param",
        word_error,
    ),
)
