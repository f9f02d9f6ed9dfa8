"""Logs in to a Determined master, and turns every failure into one sentence."""

from __future__ import annotations

import os

from determined.common import api
from determined.common.api import authentication, certs, errors

from determined_amp.config.errors import UserError, one_line

# Seconds to wait for the first answer: the address may be wrong.
_FIRST_ANSWER = 10

# Status codes of a proxy whose master is away.
_AWAY = (502, 503, 504)


class MasterError(UserError):
    """A master cannot be used: the address is wrong, the login fails, or it refuses a request."""


def log_in(address: str) -> api.Session:
    """A session with the master at `address`, as the user of `det user login` or of DET_USER.

    It never asks for a password, because nobody may be there to answer.

    Raises:
        MasterError: if no master answers, or the login fails.
    """
    try:
        url = api.canonicalize_master_url(address)
    except ValueError:  # its message would repeat a password
        raise MasterError(
            "the master's address is not of the form http://HOST:PORT; it may hold no user, "
            "password, query or fragment"
        ) from None
    _find_master(url)
    try:
        # Determined asks for a password only if none is given; an empty one counts as given.
        password = os.environ.get("DET_PASS", "")
        return authentication.login_with_cache(url, None, password, certs.default_load(url))
    except (errors.UnauthenticatedException, errors.ForbiddenException) as error:
        raise MasterError(
            f"{url}: the login was refused; log in with `det -m {url} user login USER`, "
            "or set DET_USER and DET_PASS"
        ) from error
    except (errors.BadRequestException, errors.CorruptTokenCacheException, OSError) as error:
        raise MasterError(f"{url}: the login failed: {one_line(error)}") from error


def _find_master(url: str) -> None:
    try:
        session = api.UnauthSession(url, certs.default_load(url), max_retries=0)
        answer = session.get("/api/v1/master", timeout=_FIRST_ANSWER)
        is_master = "clusterId" in answer.json()
    except ValueError:  # not JSON
        is_master = False
    except errors.BadRequestException as error:
        if is_away(error):
            raise MasterError(f"{url}: no master answers there") from error
        is_master = False
    except OSError as error:
        raise MasterError(
            f"{url}: no trusted connection; DET_MASTER_CERT_FILE may name its certificate: "
            f"{one_line(error)}"
        ) from error
    if not is_master:
        raise MasterError(f"{url}: what answers there is not a Determined master")


def is_away(error: Exception) -> bool:
    """Whether the error of a request means that no master answered, so a retry may help."""
    if isinstance(error, errors.APIException):
        return error.status_code in _AWAY
    # Determined turns a timeout into a bare BadRequestException.
    bare = type(error) is errors.BadRequestException
    return bare or isinstance(error, (errors.MasterNotFoundException, OSError))
