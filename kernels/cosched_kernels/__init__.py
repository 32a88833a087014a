"""Attention that reads a shared prefix once: the plan, the Triton kernels, plain-torch references.

``docs/architecture.md`` says how they fit together. Nothing here knows SGLang; the backend that
does is `cosched.engine.port.shared_prefix`.
"""
