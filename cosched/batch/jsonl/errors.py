"""What can stop a job as a whole. A wrong line stops nothing: it is a line of the error file."""

from __future__ import annotations

from cosched.errors import CoschedError


class JobError(CoschedError):
    """A job cannot start or go on."""


class JobFileError(JobError):
    """A file of the job cannot be read, written or trusted."""


class DiskError(JobFileError):
    """An output could not be written in the middle of a job, which goes on when it can be."""


class ServerRefusedError(JobError):
    """The server cannot do this job, now or later: it is none, another one, or set up otherwise."""

    exit_code = 1


class QuotaError(ServerRefusedError):
    """The server takes nothing more from this client before something of its is done or deleted."""


class ServerGoneError(JobError):
    """The server died, or answered nothing for longer than allowed."""

    exit_code = 1
