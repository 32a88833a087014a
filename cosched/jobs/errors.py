"""What can stop a job as a whole. A wrong line stops nothing: it is a line of the error file."""

from __future__ import annotations

from cosched.errors import CoschedError

__all__ = ["JobError", "JobFileError", "ServerGoneError"]


class JobError(CoschedError):
    """A job cannot start or go on."""


class JobFileError(JobError):
    """A file of the job cannot be read, written or trusted."""


class ServerGoneError(JobError):
    """The server died, or answered nothing for longer than allowed."""
