"""How long a reply gets (docs/predict.md)."""

from cosched.length.beliefs import Belief, LengthModel
from cosched.length.config import LengthConfig
from cosched.length.histogram import Facts

__all__ = ["Belief", "Facts", "LengthConfig", "LengthModel"]
