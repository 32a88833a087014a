"""Expected reply lengths of this replica: plans ask, requests that end teach."""

from __future__ import annotations

from cosched.core.estimates import LengthEstimate
from cosched.engine import port
from cosched.engine.guard import Guard
from cosched.engine.tracked import TrackedRequest
from cosched.predict.length_estimator import Belief, LengthConfig, LengthModel
from cosched.predict.length_histogram import Facts
from cosched.wire import hint_of_params


class ReplyLengths:
    """One per scheduler that plans; other ranks get the plan.

    Keeps hashes of prompts and numbers, no tokens, and only in memory.
    """

    def __init__(self, config: LengthConfig, guard: Guard) -> None:
        self.model = LengthModel(config)
        self._guard = guard

    def remaining(self, tracked: TrackedRequest, *, waits: bool = False) -> LengthEstimate:
        """Its remaining output; its limit if the estimate fails. waits: it may be estimated again
        with what was learned since the last call."""
        num_output = tracked.num_output_tokens
        try:  # not `watching`: this is asked of all running requests
            belief = tracked.length or self._belief(tracked)
            return belief.remaining(num_output, waits=waits)
        except Exception as error:
            self._guard.note_or_raise("length", error)
        most = max(tracked.max_new_tokens - num_output, 0)
        return LengthEstimate(most, most)

    def ends(self, tracked: TrackedRequest, num_output: int) -> tuple[int, int, tuple[int, ...]]:
        """For a request with `num_output` tokens: the output at which to estimate again, and until
        then the upper estimate of its whole output and its possible ends (`LengthEstimate.ends`),
        at most `NUM_ENDS`."""
        self.remaining(tracked)
        belief = tracked.length
        if belief is None or not belief.ends:  # the estimate failed
            return num_output + 1, tracked.max_new_tokens, (tracked.max_new_tokens,)
        return belief.until, belief.upper, belief.ends

    def ended(self, tracked: TrackedRequest) -> None:
        """Learn from a request that has ended, unless it was aborted."""
        if self.model.config.learns and not port.is_aborted(tracked.req):
            with self._guard.watching("length"):
                self.model.learn(self._belief(tracked), tracked.num_output_tokens)

    def _belief(self, tracked: TrackedRequest) -> Belief:
        if tracked.length is None:
            tracked.length = self.model.belief(_facts_of(tracked))
        return tracked.length


def _facts_of(tracked: TrackedRequest) -> Facts:
    req = tracked.req
    kind = tracked.prefix_key, tracked.request_class, port.is_constrained(req)
    return Facts(
        rid=tracked.rid,
        kind=kind,
        prompt=req.origin_input_ids,
        limit=tracked.max_new_tokens,
        hint=hint_of_params(getattr(req.sampling_params, "custom_params", None)),
    )
