"""All seams. Importing this imports SGLang and the engine."""

from __future__ import annotations

from cosched_patches import http, memory, openai_endpoints, scheduler

SEAMS = (*http.SEAMS, *openai_endpoints.SEAMS, *scheduler.SEAMS, *memory.SEAMS)
