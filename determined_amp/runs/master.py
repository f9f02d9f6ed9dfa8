"""Logs in to a Determined master, and turns every failure into one sentence."""

from __future__ import annotations

from determined.common import api
from determined.common.api import authentication, certs, errors

from determined_amp.amp.errors import UserError, one_line

# Seconds to wait for the first answer: the address may be wrong.
_FIRST_ANSWER = 10


def log_in(address: str) -> api.Session:
    """A session with the master at `address`, as the user of `det user login` or of
    DET_USER.

    It never asks for a password: a report may run unattended.

    Raises:
        UserError: if no master answers, or the login fails.
    """
    try:
        url = api.canonicalize_master_url(address)
    except ValueError:  # its message would repeat a password
        raise UserError(
            "the master's address is not of the form http://HOST:PORT; it may hold no "
            "user, password, query or fragment"
        ) from None
    try:
        certificate = certs.default_load(url)
        first = api.UnauthSession(url, certificate, max_retries=0)
        answer = first.get("/api/v1/master", timeout=_FIRST_ANSWER).json()
        if "clusterId" not in answer:
            raise LookupError("its answer has no clusterId")  # noqa: TRY301
        # Determined reads DET_USER and DET_PASS, and asks for a password if none is
        # given; an empty one counts as given.
        return authentication.login_with_cache(url, None, "", certificate)
    except (errors.UnauthenticatedException, errors.ForbiddenException) as error:
        raise UserError(
            f"{url}: the login was refused; log in with `det -m {url} user login "
            "USER`, or set DET_USER and DET_PASS"
        ) from error
    except Exception as error:  # from a proxy, a certificate or an odd answer
        status = getattr(error, "status_code", None)
        why = one_line(error) if status is None else f"error {status}"
        raise UserError(
            f"{url}: no Determined master answers there: {why}; allowed: "
            "the address of one that works, with DET_MASTER_CERT_FILE if its "
            "certificate is its own"
        ) from error
