"""The class and the targets of a request, whatever way it came, on their way to the scheduler."""

from __future__ import annotations

import logging
import re
from contextlib import aclosing
from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM", "WRONG_VALUES"]

WRONG_VALUES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, re.error)
"""What Python raises where code meets a value that it did not expect."""


def _hook() -> Any:
    from cosched.engine.checks import check_input
    from cosched.engine.port.request import pace_checks
    from cosched.errors import RequestError
    from cosched_patches.active import front, limits_of

    logger = logging.getLogger(__name__)

    async def with_class(original: Any, manager: Any, obj: Any, request: Any = None) -> Any:
        has_answered = False
        try:
            front().apply(obj, request)
            check_input(obj, limits_of(manager))
            pace_checks(manager)
            async with aclosing(original(manager, obj, request)) as replies:
                async for reply in replies:
                    has_answered = True
                    front().hear(reply, request)
                    yield reply
        except RequestError as error:
            # The one type that every caller of this method answers with HTTP 400.
            raise ValueError(str(error)) from None
        except WRONG_VALUES as error:
            if has_answered:
                raise
            logger.warning("a request that SGLang cannot read", exc_info=True)
            raise ValueError(f"cannot read this request: {error!r}") from error
        finally:
            # SGLang asks for it once a stream is over, also of one that it could not read.
            if not hasattr(obj, "is_single"):
                obj.is_single = not isinstance(obj.rid, list)

    return with_class


SEAM = Seam(
    target="sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    kind="around",
    signature=("self", "obj", "request"),
    hook=_hook,
    why=(
        "The one place that every request of every endpoint passes. Endpoints lose what their "
        "models lack (``/v1/responses`` drops even ``priority``), and requests that an embedding "
        "program makes come in here. SGLang answers many wrong values (an unknown sampling "
        "parameter, a regular expression that is none, no samples) with 500, because Python "
        "raised something else than ``ValueError`` while it read them; here that becomes 400. "
        "Every field is checked against its bound before anything is tokenized. Where thousands "
        "wait, their clients are looked after less often."
    ),
)
