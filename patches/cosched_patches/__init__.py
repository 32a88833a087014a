"""Where cosched hooks into SGLang: one small module per seam.

Each module defines ``SEAM``: the target, how it is hooked, the signature it was written for, why it
is needed, and the upstream issue that asks for it. `cosched_patches.plugin.register` installs and
checks them; ``docs/sglang_seams.md`` is generated from them.
"""
