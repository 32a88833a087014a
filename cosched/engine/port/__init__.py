"""What cosched knows of SGLang's insides, as small functions.

`common` holds for every supported version. What differs stands under the same names in one module
per version; the one for the installed version is chosen here, once. The rest of the engine asks
these functions and knows no version. ``docs/porting.md`` says how to add one.
"""

from __future__ import annotations

from sglang.version import __version__

from cosched.engine.port.common import *  # noqa: F403  # its __all__, and the chosen version's
from cosched.versions import nearest_sglang

VERSION = nearest_sglang(__version__)
"""The supported version whose module speaks for the installed one."""

if VERSION == "0.5.21":
    from cosched.engine.port.sglang_0_5_21 import *  # noqa: F403
else:
    from cosched.engine.port.sglang_0_5_23 import *  # noqa: F403
