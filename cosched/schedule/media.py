"""Prompts with images, video or sound: how many of their tokens an iteration computes.

The model's encoder computes an image as a whole in the iteration that computes its first token, so
there the time of a prompt has a step. A prompt is cut before an image that does not fit.

Which images run  beside online decodes one that fits the time for prompts. One that does not makes
             the iteration longer, if no other is in it: of an online prompt always, of an offline
             one up to `TimeLimits.media_s`. Offline work stops until chat has made up for it
No starvation  an offline image that is longer waits for an iteration without other work, and lines
             behind it go first (`candidates`). Once its request is urgent (`Slo.deadline_s`; lines
             of batches have one) it runs beside online decodes too, one in an iteration
Limits       policies that admit in the pool's order wait with it; an image that another request
             has left in the engine's cache of encodings counts all the same
"""

from __future__ import annotations

from collections.abc import Callable

from cosched.core.request import Request, num_encoded
from cosched.core.view import View
from cosched.pool.freshness import due_time_s


def tokens_with_media(
    request: Request, num_cached: int, limit: int, tokens: Callable[[int, int], int]
) -> int:
    """Most tokens, up to `limit`, of a prompt with `num_cached` computed ones. tokens: how many of
    so many fit (first argument) beside so many tokens of the encoder (second)."""
    end = num_cached + limit
    ahead = [one for one in request.traits.media if num_cached <= one.begin < end]
    if not ahead:
        return tokens(limit, 0)
    encoded = fitting = 0
    for media, after in zip((None, *ahead), (*ahead, None), strict=True):
        encoded += 0 if media is None else media.num_tokens
        before_next = limit if after is None else after.begin - num_cached
        most = tokens(before_next, encoded)
        fitting = max(fitting, most)
        if most < before_next:
            break
    return fitting


def must_encode(view: View, request: Request, num_cached: int, num_new: int) -> bool:
    """True if a chunk has an image that waits no longer for time: its request is urgent."""
    due_s = due_time_s(request)
    if due_s is None or not num_encoded(request, num_cached, num_new):
        return False
    return due_s <= view.offline_order().urgent_until_s
