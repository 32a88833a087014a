"""Features hear of what happens, and their failures cost no other."""

import pytest

from cosched.engine.feature import Feature, Features
from cosched.engine.features import all_features
from cosched.engine.guard import Guard


class Heard(Feature):
    place = "heard"

    def __init__(self):
        self.heard = []

    def on_look(self, view):
        self.heard.append(view)


class Fails(Heard):
    place = "fails"

    def on_look(self, view):
        super().on_look(view)
        raise ZeroDivisionError("on purpose")


class Ends(Fails):
    place, ends = "ends", True


def features_of(*features, is_strict=False):
    guard = Guard(is_strict=is_strict)
    found = Features(guard)
    for feature in features:
        found.add(feature)
    return found, guard


def test_a_hook_that_fails_is_left_out_and_counted():
    fails, ends, heard = Fails(), Ends(), Heard()
    features, guard = features_of(fails, ends, heard)
    for now_s in (1.0, 2.0):
        features.tell(Feature.on_look, now_s)
        features.tell(Feature.on_abandoned)  # none of them defines it
    assert (fails.heard, ends.heard, heard.heard) == ([1.0, 2.0], [1.0], [1.0, 2.0])
    assert guard.failures == {"fails": 2, "ends": 1}
    assert features.get(Heard) is heard and features.get(Feature) is None
    strict, _ = features_of(Ends(), is_strict=True)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            strict.tell(Feature.on_look, 1.0)


def test_every_feature_in_the_folder_is_found_once_and_counts_its_failures_apart():
    names = [kind.__name__ for kind in all_features()]
    places = {kind.place for kind in all_features()}
    assert {"LogDecisions", "MetricsExporter", "StorageReads"} < set(names)
    assert len(places) == len(names) == len(set(names))
