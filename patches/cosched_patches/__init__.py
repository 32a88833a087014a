"""Where cosched hooks into SGLang.

Three modules of hooks: `http`, `scheduler` and `memory`. The docstring of a hook says what it is
for; the table at the end of its module says which function or method of SGLang it hooks, and the
parameters that it relies on. `cosched_patches.plugin.register` checks and installs them;
``docs/porting.md`` is generated from them. These modules import SGLang, so they are imported
only where the hooks are installed.
"""
