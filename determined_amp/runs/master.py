"""Logs in to a Determined master, and turns every failure into one sentence."""

from __future__ import annotations

from determined.common import api
from determined.common.api import authentication, certs, errors

from determined_amp.amp.errors import UserError, one_line

# Seconds to wait for the first answer: the address may be wrong.
_FIRST_ANSWER = 10

# What Determined's bindings raise if an answer does not look like a master's.
NONSENSE = (
    *(
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        ValueError,
        RecursionError,
    ),
    AssertionError,
)


class MasterError(UserError):
    """A master cannot be used: the address is wrong, the login fails, or it refuses a
    request.
    """


def log_in(address: str) -> api.Session:
    """A session with the master at `address`, as the user of `det user login` or of
    DET_USER.

    It never asks for a password: a report may run unattended.

    Raises:
        MasterError: if no master answers, or the login fails.
    """
    try:
        url = api.canonicalize_master_url(address)
    except ValueError:  # its message would repeat a password
        raise MasterError(
            "the master's address is not of the form http://HOST:PORT; it may hold no "
            "user, password, query or fragment"
        ) from None
    try:
        return _session(url)
    except (errors.UnauthenticatedException, errors.ForbiddenException) as error:
        raise MasterError(
            f"{url}: the login was refused; log in with `det -m {url} user login "
            "USER`, or set DET_USER and DET_PASS"
        ) from error
    except errors.APIException as error:
        raise MasterError(
            f"{url}: answers with error {error.status_code}; allowed: a Determined "
            "master that works"
        ) from error
    except errors.BadRequestException as error:
        # what Determined makes of a timeout, too
        raise MasterError(
            f"{url}: no master answers there: {one_line(error)}"
        ) from error
    except NONSENSE as error:  # no JSON is an OSError of requests, too
        raise not_a_master(url) from error
    except (errors.CorruptTokenCacheException, OSError) as error:
        raise MasterError(
            f"{url}: cannot be used: {one_line(error)}; allowed: a connection that is "
            "trusted, such as by DET_MASTER_CERT_FILE with its certificate"
        ) from error


def _session(url: str) -> api.Session:
    certificate = certs.default_load(url)
    first = api.UnauthSession(url, certificate, max_retries=0)
    if "clusterId" not in first.get("/api/v1/master", timeout=_FIRST_ANSWER).json():
        raise not_a_master(url)
    # Determined reads DET_USER and DET_PASS, and asks for a password if none is given;
    # an empty one counts as given.
    return authentication.login_with_cache(url, None, "", certificate)


def not_a_master(url: str) -> MasterError:
    """The error for an address where something other than a master answers."""
    return MasterError(f"{url}: what answers there is not a Determined master")
