"""All seams. Importing this imports SGLang and the engine."""

from __future__ import annotations

from cosched_patches import http, memory, scheduler

SEAMS = (*http.SEAMS, *scheduler.SEAMS, *memory.SEAMS)
