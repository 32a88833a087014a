"""What bodies of requests ask for beyond the bounds of their fields."""

from __future__ import annotations

from cosched.limits.bodies import without_effect
from cosched.limits.bounds import ANY_MODEL, Scope


def test_a_seed_has_an_effect_only_where_tokens_are_drawn_by_it():
    at_random = Scope(keeps_seeds=False)
    assert without_effect({"seed": 1}, at_random) == ("seed",)
    assert without_effect({"seed": 1, "temperature": 0}, at_random) == ()
    assert without_effect({"seed": 1}, ANY_MODEL) == ()
    assert without_effect({}, at_random) == ()
