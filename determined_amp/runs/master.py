"""Logs in to a Determined master, and turns every failure into one sentence."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from determined.common import api
from determined.common.api import authentication, certs, errors

from determined_amp.amp.errors import UserError, one_line
from determined_amp.amp.patched import patched

# Seconds to wait for the first answer: the address may be wrong.
_FIRST_ANSWER = 10

# Seconds that a master may be silent in any later request.
ANSWER = 20

# What Determined's bindings raise if an answer does not look like a master's.
NONSENSE = (LookupError, TypeError, AttributeError, ValueError)


class MasterError(UserError):
    """A master cannot be used: the address is wrong, the login fails, or it refuses a request."""


class MasterAwayError(MasterError):
    """No master answers now, so a retry may help."""


def _with_limit(request: Callable[..., Any]) -> Callable[..., Any]:
    """`api.BaseSession._do_request` with a time limit; without one it waits for ever."""
    signature = inspect.signature(request)

    def limited(*given: Any, **named: Any) -> Any:
        call = signature.bind(*given, **named)
        call.arguments["timeout"] = call.arguments["timeout"] or ANSWER
        return request(*call.args, **call.kwargs)

    return limited


class _Session(api.Session):
    _do_request = _with_limit(api.Session._do_request)


def log_in(address: str) -> api.Session:
    """A session with the master at `address`, as the user of `det user login` or of DET_USER.

    It never asks for a password: a report may run unattended.

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
        limited = _with_limit(api.BaseSession._do_request)
        with patched(api.BaseSession, "_do_request", limited):
            login = authentication.login_with_cache(url, None, password, certs.default_load(url))
    except (errors.UnauthenticatedException, errors.ForbiddenException) as error:
        raise MasterError(
            f"{url}: the login was refused; log in with `det -m {url} user login USER`, "
            "or set DET_USER and DET_PASS"
        ) from error
    except (errors.BadRequestException, errors.CorruptTokenCacheException, OSError) as error:
        kind = MasterAwayError if is_away(error) else MasterError
        raise kind(f"{url}: the login failed: {one_line(error)}") from error
    except NONSENSE as error:
        raise not_a_master(url) from error
    return _Session(login.master, login.username, login.token, login.cert)


def _find_master(url: str) -> None:
    try:
        session = api.UnauthSession(url, certs.default_load(url), max_retries=0)
        answer = session.get("/api/v1/master", timeout=_FIRST_ANSWER).json()
    except ValueError as error:  # not JSON
        raise not_a_master(url) from error
    except errors.BadRequestException as error:
        if is_away(error):
            status = getattr(error, "status_code", None)
            said = "no master answers there"
            if status:
                said = f"the master answers with error {status}; try again when it works"
            raise MasterAwayError(f"{url}: {said}") from error
        raise not_a_master(url) from error
    except OSError as error:
        raise MasterError(
            f"{url}: no trusted connection; DET_MASTER_CERT_FILE may name its certificate: "
            f"{one_line(error)}"
        ) from error
    if not isinstance(answer, dict) or "clusterId" not in answer:
        raise not_a_master(url)


def not_a_master(url: str) -> MasterError:
    """The error for an address where something other than a master answers."""
    return MasterError(f"{url}: what answers there is not a Determined master")


def is_away(error: Exception) -> bool:
    """Whether a request got no answer, or an error of the server, so a retry may help."""
    if isinstance(error, errors.APIException):
        return int(error.status_code) >= 500
    # Determined turns a timeout into a bare BadRequestException.
    bare = type(error) is errors.BadRequestException
    return bare or isinstance(error, (errors.MasterNotFoundException, MasterAwayError, OSError))
