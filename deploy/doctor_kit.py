"""Preflight of a site's kit: its files, certificates, key and weights, and the way to the server."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import stat
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from deploy.doctor_finding import Finding, error, ok, warning
from deploy.doctor_machine import check_clock, skew_s
from deploy.kit import file_sha256

RENEW_DAYS = 30
TIMEOUT_S = 10.0
KNOCK = "/v1/fleet/activate-node"
"""Asked for with a heartbeat every 0 s, which no SuperLink grants: it looks up the key first, then says 400, and
nothing is done; the SuperLink's log has a line about it."""
NEW_KIT = "ask the operator for a new kit of this site"


def check_files(folder: Path, sha256: Mapping[str, str]) -> Finding:
    """The kit's files against the digests in its list (path below the kit -> SHA-256 in hex)."""
    missing = sorted(name for name in sha256 if not (folder / name).is_file())
    changed = sorted(name for name in sha256 if name not in missing and file_sha256(folder / name) != sha256[name])
    if missing or changed:
        words = [f"missing {', '.join(missing)}"] * bool(missing) + [f"changed {', '.join(changed)}"] * bool(changed)
        return error("kit-files", f"the kit is not as it was made: {'; '.join(words)}", NEW_KIT)
    return ok("kit-files", f"all {len(sha256)} files of the kit are as they were made")


def check_versions(wanted: Mapping[str, str], here: Mapping[str, str]) -> Finding:
    """Versions of the app and of Flower that the kit was made with, against those of this machine."""
    if other := [
        f"{what} {here.get(what)} (kit: {version})" for what, version in wanted.items() if here.get(what) != version
    ]:
        fix = "update the checkout and its dependencies, or ask for a newer kit"
        return error("kit-versions", f"other versions than the federation's: {', '.join(other)}", fix)
    return ok("kit-versions", "the versions of the app and of Flower are the federation's")


def check_same_site(named: Mapping[str, str]) -> Finding:
    """Everything that names the site names the same one. ``named``: what names it -> the name, "" for none."""
    names = {name for name in named.values() if name}
    if len(names) > 1:
        said = "; ".join(f"{what}: {name}" for what, name in named.items() if name)
        return error("kit-site", f"the kit is for another site ({said})", "use the kit that was made for this site")
    return ok("kit-site", f"everything is for the site {next(iter(names), 'of no name')}")


def check_certificate(what: str, certificate: x509.Certificate, authority: x509.Certificate, now: datetime) -> Finding:
    """Dates and issuer of a certificate. ``now`` with its time zone."""
    code = f"certificate-{what}"
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return error(code, f"the {what} certificate was not issued by this federation's authority", NEW_KIT)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        return error(code, f"the {what} certificate is valid from {begin:%Y-%m-%d %H:%M} UTC only", "check the clock")
    if now > end:
        return error(code, f"the {what} certificate expired on {end:%Y-%m-%d}", "ask the operator to renew it")
    if end - now < timedelta(days=RENEW_DAYS):
        left = (end - now).days
        return warning(code, f"the {what} certificate expires in {left} days", "ask the operator to renew it")
    return ok(code, f"the {what} certificate is valid until {end:%Y-%m-%d}")


def read_certificate(path: Path) -> x509.Certificate:
    """A PEM certificate. Raises ValueError and OSError."""
    return x509.load_pem_x509_certificate(path.read_bytes())


def common_name(certificate: x509.Certificate) -> str:
    """The subject's common name, "" where it has none."""
    found = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def check_key(private: bytes, mode: int, public: bytes) -> list[Finding]:
    """The site's key for SuperNode authentication against the public half that the operator registers.

    ``private``: PEM or OpenSSH text without passphrase; ``mode``: of its file; ``public``: OpenSSH or PEM text.
    """
    findings = []
    if stat.S_IMODE(mode) & 0o077:
        findings.append(error("key-mode", "other users of this machine can read the private key", "chmod 600 the key"))
    try:
        key = _private(private)
        known = _public_bytes(public)
    except (ValueError, TypeError):
        return [*findings, error("key", "the private or the public key cannot be read", NEW_KIT)]
    if not isinstance(key, EllipticCurvePrivateKey):
        return [*findings, error("key", "the private key is not an elliptic-curve key", NEW_KIT)]
    if _openssh(key.public_key()) != known:
        sentence = "the private key does not belong to the public key that the server was given"
        return [*findings, error("key", sentence, NEW_KIT)]
    return [*findings, ok("key", "the private key belongs to the public key that the server was given")]


def _private(text: bytes) -> object:
    if b"OPENSSH" in text:
        return serialization.load_ssh_private_key(text, None)
    return serialization.load_pem_private_key(text, None)


def _public_bytes(text: bytes) -> bytes:
    load = (
        serialization.load_pem_public_key if text.lstrip().startswith(b"-----") else serialization.load_ssh_public_key
    )
    return _openssh(load(text))


def _openssh(key: object) -> bytes:
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return key.public_bytes(*form).split()[1]  # type: ignore[attr-defined]


def check_weights(path: Path, sha256: str) -> Finding:
    """A file of frozen or initial weights against the federation's digest."""
    if not path.is_file():
        return error(
            "weights", "the weights file is missing", "copy it from the operator; weights never travel in a run"
        )
    if (found := file_sha256(path)) != sha256.lower():
        sentence = f"the weights file has SHA-256 {found[:12]}..., the federation's has {sha256.lower()[:12]}..."
        return error("weights", sentence, "copy the file again, it must be the same at every site")
    return ok("weights", f"the weights file has SHA-256 {found[:12]}..., as in the federation")


def server_findings(
    address: str,
    *,
    authority: Path | None = None,
    client: tuple[Path, Path] | None = None,
    private_key: bytes | None = None,
) -> list[Finding]:
    """Name, port, TLS and clock of the server at ``host:port``, and whether it knows this site; stops at a failure.

    ``authority``: the federation's CA, None for a server without TLS; ``client``: certificate and key to show;
    ``private_key``: the site's, as in `check_key`, to sign one request with that changes nothing.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return [error("server-address", f"the server's address is {address!r}, expected host:port", NEW_KIT)]
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError:
        return [error("server-name", f"the name {host} is not known here", "ask your network's administrators")]
    try:
        socket.create_connection(found[0][4][:2], timeout=TIMEOUT_S).close()
    except OSError:
        sentence = f"nothing answers at {address}"
        return [error("server-port", sentence, f"let this machine dial out to {address} (TCP); is the server up?")]
    reached = ok("server-port", f"{address} can be reached")
    try:
        opener = _opener(authority, client)
        base = f"{'https' if authority else 'http'}://{address}"
        status, clock = _health(opener, base)
        fit = status < 400 and clock.level != "error"  # a wrong clock spoils the signature
        key = [_admission(opener, base, private_key)] if private_key is not None and fit else []
    except (urllib.error.URLError, http.client.HTTPException, OSError) as problem:
        return [reached, _unanswered(problem)]
    findings = [reached, ok("server-tls", "the server's certificate is of this federation")] if authority else [reached]
    findings.append(clock)
    if status in (400, 401, 403):  # 400: nginx, of a certificate that is missing, expired or another authority's
        return [*findings, error("server-member", "the server does not know this site's certificate", NEW_KIT)]
    if status >= 500:
        sentence = f"the proxy answers but the SuperLink behind it does not (HTTP {status})"
        return [*findings, error("server-health", sentence, "ask the operator whether the server is up")]
    return [*findings, *key]


def clock_finding(address: str, authority: Path | None, client: tuple[Path, Path] | None) -> Finding | None:
    """The clock alone, of a server as in `server_findings`; None where the server gives no answer."""
    try:
        return _health(_opener(authority, client), f"{'https' if authority else 'http'}://{address}")[1]
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return None


def _health(opener: urllib.request.OpenerDirector, base: str) -> tuple[int, Finding]:
    """Status of a server and what its ``Date`` says of the clock here.

    Read before the question is sent: a slow network then never makes this clock look ahead.
    """
    ours = datetime.now(UTC)
    status, date = _asked(opener, urllib.request.Request(f"{base}/health"))
    if date is None:
        fix = "compare this machine's clock with the server's by hand"
        return status, warning("clock", "the server does not say what time it is", fix)
    return status, check_clock(skew_s(ours, parsedate_to_datetime(date)))


def _opener(authority: Path | None, client: tuple[Path, Path] | None) -> urllib.request.OpenerDirector:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if authority is not None:
        context = ssl.create_default_context(cafile=str(authority))
        if client is not None:
            context.load_cert_chain(str(client[0]), str(client[1]))
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


def _asked(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> tuple[int, str | None]:
    """Status and ``Date`` of an answer; a refusal is an answer too, and it says the time."""
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.headers.get("Date")
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.headers.get("Date")


def _admission(opener: urllib.request.OpenerDirector, base: str, private_key: bytes) -> Finding:
    """Whether the SuperLink itself would let the site's SuperNode in."""
    try:
        request = _knock(base, private_key)
    except (ImportError, ValueError, TypeError):  # each has a finding of its own
        return warning("server-key", "the site's key could not be shown to the server", "mend what else is found here")
    status, _ = _asked(opener, request)
    if status == 400:
        return ok("server-key", "the server lets this site's key in")
    if status in (401, 403):
        return error("server-key", "the server does not know this site's key", NEW_KIT)
    if status == 412:
        sentence = "the SuperLink does not know this site's key, it was not registered"
        return error("server-key", sentence, "ask the operator to run python -m deploy.register on the server")
    sentence = f"the server does not say whether it knows this site's key (HTTP {status})"
    return warning("server-key", sentence, "it is seen at the first start; is the server of the federation's version?")


def _knock(base: str, private_key: bytes) -> urllib.request.Request:
    """The first request of a SuperNode, signed as Flower does it, but for a heartbeat that is never granted."""
    from flwr.common.constant import TIMESTAMP_HEADER  # in here: where Flower is missing, the other checks still run
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    key = _private(private_key)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve key")
    public, now = public_key_to_bytes(key.public_key()), datetime.now(UTC).isoformat()
    headers = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(public).decode(),
        TIMESTAMP_HEADER: now,
        FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(sign_message(key, now.encode())).decode(),
        "content-type": "application/protobuf",
        "accept": "application/protobuf",
    }
    body = ActivateNodeRequest(public_key=public, heartbeat_interval=0).SerializeToString()
    return urllib.request.Request(f"{base}{KNOCK}", data=body, headers=headers, method="POST")


def _unanswered(problem: Exception) -> Finding:
    """Why a server whose port is open gave no answer."""
    reason = problem.reason if isinstance(problem, urllib.error.URLError) else problem
    if isinstance(reason, ssl.SSLError):
        return _tls(reason)
    return error("server", "the port gives no answer of HTTP", "is it the right port, and does it speak TLS?")


def _tls(problem: ssl.SSLError) -> Finding:
    if isinstance(problem, ssl.SSLCertVerificationError):
        sentence = f"the server's certificate is refused: {problem.verify_message}"
        return error("server-tls", sentence, "is it the right server, is the clock right? else " + NEW_KIT)
    sentence = f"no TLS with the server ({problem.reason or 'the connection was cut'})"
    return error("server-tls", sentence, "does the server speak TLS, and does it accept this site's certificate?")
