"""Errors that stop a job. A wrong line stops nothing: it becomes a line of the error file."""

from __future__ import annotations

from cosched.errors import CoschedError


class JobFileError(CoschedError):
    """A file of the job cannot be read, written or trusted."""


class DiskError(JobFileError):
    """An output could not be written during a job, which resumes when it can be."""


class ServerRefusedError(CoschedError):
    """The server cannot do this job, now or later: another kind of server, or other settings."""

    exit_code = 1


class QuotaError(ServerRefusedError):
    """The client's quota is full until some of its batches end or some of its files are deleted."""


class ServerGoneError(CoschedError):
    """The server died, or answered nothing for longer than allowed."""

    exit_code = 1


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error a user can act on. When the server dies, all requests fail; one error is enough."""
    error: BaseException = group.subgroup(CoschedError) or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
