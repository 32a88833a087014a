"""Generated offline sets, with given prefix sharing or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cosched.core.request import RequestClass
from cosched_traces.errors import WorkloadError
from cosched_traces.lengths import Lengths, Tokens
from cosched_traces.seeds import key_base, rng_of
from cosched_traces.workload import Segment, TraceRequest, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroups:
    """Groups of requests that share a prefix within the group: documents with questions, subjects
    with worked examples.

    num_groups           heads
    requests_per_group   one number for all groups, or one for each
    shared               tokens of a group's head
    unique               tokens of a request after the head
    output               tokens it generates
    """

    num_groups: int
    requests_per_group: int | Sequence[int]
    shared: Lengths
    unique: Lengths
    output: Lengths

    def workload(
        self,
        name: str,
        *,
        seed: int,
        num_requests: int | None = None,
        request_class: RequestClass = RequestClass.OFFLINE,
    ) -> Workload:
        """The requests, shuffled, all at 0; only the first `num_requests` if given."""
        counts = self._counts()
        group_of = np.repeat(np.arange(self.num_groups), counts)
        heads = self.shared.sample(rng_of(seed, name, "shared"), self.num_groups).tolist()
        unique = self.unique.sample(rng_of(seed, name, "unique"), len(group_of)).tolist()
        output = self.output.sample(rng_of(seed, name, "output"), len(group_of)).tolist()
        places = rng_of(seed, name, "order").permutation(len(group_of))
        head_keys, own_keys = key_base(name, seed, "heads"), key_base(name, seed, "own")
        requests = []
        for place in places[:num_requests].tolist():
            group = int(group_of[place])
            requests.append(
                TraceRequest(
                    rid=f"{name}-{place}",
                    request_class=request_class,
                    arrival_s=0.0,
                    num_output_tokens=output[place],
                    segments=(
                        Segment(head_keys + group, heads[group]),
                        Segment(own_keys + place, unique[place]),
                    ),
                )
            )
        note = f"generated {len(requests)} of {self.num_groups} groups, shuffled, {seed=}"
        return Workload(name=name, requests=tuple(requests), notes=(note,))

    def _counts(self) -> Sequence[int]:
        if isinstance(self.requests_per_group, int):
            return [self.requests_per_group] * self.num_groups
        if len(self.requests_per_group) != self.num_groups:
            raise WorkloadError(
                f"{len(self.requests_per_group)} numbers of requests for {self.num_groups} groups"
            )
        return self.requests_per_group


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLines:
    """Lines with an image each: a head that all share, the image, and text after it.

    head    tokens of the head
    image   tokens of an image; each line has its own
    unique  tokens of the text after it
    output  tokens that a line generates
    """

    head: int
    image: Lengths
    unique: Lengths
    output: Lengths

    def workload(self, name: str, *, seed: int, num_requests: int) -> Workload:
        images, unique, output = (
            lengths.sample(rng_of(seed, name, what), num_requests).tolist()
            for what, lengths in (
                ("image", self.image),
                ("unique", self.unique),
                ("output", self.output),
            )
        )
        head_key, image_keys, own_keys = (
            key_base(name, seed, what) for what in ("head", "images", "own")
        )
        requests = tuple(
            TraceRequest(
                rid=f"{name}-{index}",
                request_class=RequestClass.OFFLINE,
                arrival_s=0.0,
                num_output_tokens=output[index],
                segments=(
                    Segment(head_key, self.head),
                    Segment(image_keys + index, images[index], encoded=True),
                    Segment(own_keys + index, unique[index]),
                ),
            )
            for index in range(num_requests)
        )
        note = f"generated {num_requests} lines with an image each, {seed=}"
        return Workload(name=name, requests=requests, notes=(note,))


def independent_requests(
    name: str,
    lengths: Iterable[tuple[int, int]],
    *,
    seed: int,
    request_class: RequestClass = RequestClass.OFFLINE,
    arrivals_s: Sequence[float] | None = None,
) -> Workload:
    """Requests of (prompt, output) tokens that share nothing; all at 0 without arrivals."""
    base = key_base(name, seed, "own")
    pairs = [(int(prompt), int(output)) for prompt, output in lengths]
    times = [0.0] * len(pairs) if arrivals_s is None else arrivals_s
    requests = tuple(
        TraceRequest(
            rid=f"{name}-{index}",
            request_class=request_class,
            arrival_s=time,
            num_output_tokens=output,
            segments=(Segment(base + index, prompt),),
        )
        for index, ((prompt, output), time) in enumerate(zip(pairs, times, strict=True))
    )
    note = f"generated {len(requests)} requests, {seed=}"
    return Workload(name=name, requests=requests, notes=(note,))


def length_pairs(
    prompt: Lengths, output: Lengths, *, size: int, seed: int, max_total_tokens: int | None = None
) -> list[tuple[int, int]]:
    """(prompt, output) lengths, drawn independently.

    A pair above `max_total_tokens` exchanges its prompt with that of another pair, as in sets
    filtered by context length, which keeps both distributions. Pairs that cannot be exchanged in
    1,000 rounds are cut.
    """
    rng = rng_of(seed, "pairs")
    prompts, outputs = prompt.sample(rng, size), output.sample(rng, size)
    if max_total_tokens is not None:
        _exchange(prompts, outputs, max_total_tokens, rng)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def _exchange(prompts: Tokens, outputs: Tokens, limit: int, rng: np.random.Generator) -> None:
    """Changes both in place."""
    for _ in range(1000):
        too_long = prompts + outputs > limit
        over = np.flatnonzero(too_long)
        others = np.flatnonzero(~too_long)
        size = min(len(over), len(others))
        if not size:
            break
        over, partners = over[:size], rng.choice(others, size=size, replace=False)
        fits = (prompts[partners] + outputs[over] <= limit) & (
            prompts[over] + outputs[partners] <= limit
        )
        one, other = over[fits], partners[fits]
        prompts[one], prompts[other] = prompts[other], prompts[one]
    over = np.flatnonzero(prompts + outputs > limit)
    outputs[over] = np.minimum(outputs[over], limit - 1)
    prompts[over] = np.minimum(prompts[over], limit - outputs[over])
