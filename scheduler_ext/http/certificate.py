"""The server's TLS context, and its renewal when the certificate files change."""

from __future__ import annotations

import _ssl
import asyncio
import contextlib
import ctypes
import logging
import ssl
from pathlib import Path

from scheduler_ext.http.tls import TlsObject
from vcuda import plain_file
from vcuda.tls import no_password

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 2.0
_GONE_LOOKS = 5  # so many in a row a file may be missing: it is being replaced
HTTP_2 = "h2"  # the name by which a client offers it
_CHAIN_BYTES = 8 * 1024  # of a client's certificates; three are 6 KiB. However small, each takes OpenSSL 0.14 ms
_GET_MOST, _SET_MOST, _USUAL_MOST = 50, 51, 100 * 1024  # SSL_CTRL_…_MAX_CERT_LIST of openssl/ssl.h, and what it is
_SET_GROUPS = 92  # SSL_CTRL_SET_GROUPS_LIST
# Of key exchange, 0.2 ms each. OpenSSL would take others, too: one of `ffdhe8192` stops the loop for 124 ms, and who
# asks for it has no work: the same ClientHello will do each time. P-384 takes 2.5 ms.
_GROUP, _GROUPS = "prime256v1", b"X25519:P-256"


class BadCertificate(Exception):
    """The certificate and key can't be used; the message names them and says why."""


def bound_work(context: ssl.SSLContext) -> bool:
    """Bound what OpenSSL does for a client before anybody is known, on a fresh context: groups and chains.

    Certificates of a client are taken up to 8 KiB: 100 take the loop 35 ms. Python's ssl can't say that, and of groups
    (before 3.15) one only. So OpenSSL is told, by the pointer that a context of CPython begins with. False where that
    can't be, for `_ssl` is no library of its own, or it is no fresh context: then P-256 is the only group,
    and chains are not bounded.
    """
    context.set_ecdh_curve(_GROUP)
    try:
        control = ctypes.CDLL(_ssl.__file__).SSL_CTX_ctrl
    except (AttributeError, OSError):
        return False
    control.argtypes, control.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_void_p), ctypes.c_long
    pointer = ctypes.c_void_p.from_address(id(context) + object.__basicsize__)
    if control(pointer, _GET_MOST, 0, None) != _USUAL_MOST:
        return False
    control(pointer, _SET_MOST, _CHAIN_BYTES, None)
    return bool(control(pointer, _SET_GROUPS, 0, _GROUPS))


def _shake_hands(server: ssl.SSLContext, trusted: bytes | None = None) -> bytes:
    """With a client in memory that trusts everybody, or that certificate: the server's, in DER.

    Raises ssl.SSLError if that can't be done.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    if trusted is not None:
        trusting.verify_mode = ssl.CERT_REQUIRED
        trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        trusting.load_verify_locations(cadata=trusted)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, side = trusting.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for each in (client, side, client, side, client, side):  # two turns each are enough for TLS 1.2
        with contextlib.suppress(ssl.SSLWantReadError):
            each.do_handshake()
    return client.getpeercert(binary_form=True) or b""


class ServerCertificate:
    """A certificate chain and its key, in PEM files. Raises BadCertificate if they can't be used at the start.

    `client_ca`: file with the certificates that sign those of clients. Who sends one must prove that it is his; who
    sends none can still ask for what is open to all. `http2`: who sends one and offers it gets it.
    """

    def __init__(self, chain: str, key: str, client_ca: str | None = None, *, http2: bool = False) -> None:
        self._chain, self._key, self._client_ca = chain, key, client_ca
        self._protocols = [HTTP_2, "http/1.1"] if http2 and client_ca else ["http/1.1"]
        self.asks_clients = client_ca is not None
        with contextlib.suppress(OSError):
            self._seen = self._fingerprint()
        self.context = self._fresh()  # of what the files said when they last changed; one context never changes

    def _fresh(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.num_tickets = (
            0  # Go's clients here resume no session: two tickets for each connection would be for nothing
        )
        context.set_alpn_protocols(self._protocols)
        context.sslobject_class = TlsObject
        if not bound_work(context) and self._client_ca is not None:
            _log.warning("here OpenSSL can't be told to take less than 100 KB of a client's certificates")
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        for path in map(Path, filter(None, (self._chain, self._key, self._client_ca))):
            try:
                plain_file.read(path)  # OpenSSL would wait for a pipe's end
            except OSError as error:
                raise BadCertificate(f"{path} cannot be used as certificate or key: {error.strerror}") from error
        try:
            context.load_cert_chain(self._chain, self._key, no_password)
            shown = _shake_hands(context)
        except (OSError, ssl.SSLError) as error:
            raise BadCertificate(f"certificate {self._chain} with key {self._key} cannot be used: {error}") from error
        try:
            _shake_hands(context, shown)
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error
            _log.warning("clients may refuse certificate %s: %s", self._chain, why)
        if self._client_ca is None:
            return
        try:
            context.load_verify_locations(self._client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
        except (OSError, ssl.SSLError) as error:
            raise BadCertificate(f"client CA {self._client_ca} cannot be used: {error}") from error
        if not context.cert_store_stats()["x509_ca"]:
            _log.warning(
                "client CA %s holds no authority: it lets in only a certificate that is in it and signed itself",
                self._client_ca,
            )

    def _fingerprint(self) -> tuple[tuple[int, int], ...]:
        """Raises OSError where a file is missing."""
        found = [Path(file).stat() for file in filter(None, (self._chain, self._key, self._client_ca))]
        return tuple((status.st_mtime_ns, status.st_ino) for status in found)

    async def keep_fresh(self) -> None:
        """Look for changed files until cancelled, and make `context` anew when they are whole."""
        said: object = None
        missing = 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                found = self._fingerprint()
            except OSError as error:
                missing += 1
                if missing == _GONE_LOOKS:
                    _log.warning("certificate files cannot be read: %s; what was in use before stays so", error)
                continue
            missing = 0
            if found == self._seen:
                continue
            try:
                # A new one: OpenSSL would keep an old certificate whose key is of another kind, and old clients' CAs.
                self.context = self._fresh()
            except BadCertificate as error:
                if said != (found, str(error)):
                    said = found, str(error)
                    _log.warning("%s; what was in use before stays so, and it is tried again every 2 s", error)
                continue
            self._seen = found
            _log.info("the certificate was reloaded")
