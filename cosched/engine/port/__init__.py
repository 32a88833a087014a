"""What cosched knows of SGLang's insides, as small functions. The rest of the engine asks these.

``docs/porting.md`` says how to move to another version of SGLang.
"""

from __future__ import annotations

from cosched.engine.port.batch import *  # noqa: F403
from cosched.engine.port.decode_role import *  # noqa: F403
from cosched.engine.port.memory import *  # noqa: F403
from cosched.engine.port.memory_kinds import memories_of as memories_of
from cosched.engine.port.request import *  # noqa: F403
from cosched.engine.port.scheduler import *  # noqa: F403
from cosched.engine.port.stages import *  # noqa: F403
from cosched.engine.port.states import *  # noqa: F403
