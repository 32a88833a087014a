"""How long a response gets (docs/lengths.md)."""

from cosched.length.beliefs import Belief, LengthModel
from cosched.length.config import MODES, LengthConfig
from cosched.length.facts import Facts

__all__ = ["MODES", "Belief", "Facts", "LengthConfig", "LengthModel"]
