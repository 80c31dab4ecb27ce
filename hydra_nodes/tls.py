"""TLS 1.3 below a session, where a folder with certificates is given: what travels cannot be read on its way.

Both sides show a certificate that the deployment's own authority has signed. Names in certificates are not compared,
since nodes are called by addresses that change: whoever holds a certificate of that authority is a node. The secret is
proved as well, and the session's keys are bound to both certificates (as tls-server-end-point of RFC 5929), so that
nobody can sit between two nodes with two connections of its own.
"""

from __future__ import annotations

import hashlib
import ssl
import threading
from pathlib import Path

from hydra_engine.errors import ConfigError
from hydra_nodes.session import SessionError

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"  # as in a Kubernetes secret of cert-manager
_READ_BYTES = 1 << 18


class TlsFiles:
    """The certificate, the key and the authority of this node, for both roles. Makes a `Layer` for each connection when
    it is called with True for the server's side."""

    def __init__(self, folder: Path) -> None:
        """Reads the files once. Raises ConfigError."""
        try:
            text = (folder / CERTIFICATE).read_text()
            end = text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
            self._own = ssl.PEM_cert_to_DER_cert(text[text.index(ssl.PEM_HEADER) : end])
            self._contexts = {is_server: _context(folder, is_server) for is_server in (False, True)}
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(
                f"the folder of --cluster-tls ({folder}) needs {CERTIFICATE}, {KEY} and {AUTHORITY} in PEM: {problem}",
                param="cluster_tls",
            ) from error
        self._check(folder)

    def _check(self, folder: Path) -> None:
        """Connects the files with themselves, as another node of the deployment would. Raises ConfigError."""
        near, far = self(False), self(True)
        try:
            for _ in range(2):
                far.unwrap(near.take_outgoing())
                near.unwrap(far.take_outgoing())
        except SessionError as error:
            cause = error.__cause__
            why = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else str(error)
            raise ConfigError(
                f"{CERTIFICATE} in the folder of --cluster-tls ({folder}) is refused by other nodes ({why}); sign it "
                f"with the key of {AUTHORITY}",
                param="cluster_tls",
            ) from error

    def __call__(self, is_server: bool) -> TlsLayer:
        return TlsLayer(self._contexts[is_server], is_server, self._own)


def _context(folder: Path, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0  # nothing is resumed
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password=_refuse_password)
    context.load_verify_locations(folder / AUTHORITY)
    return context


def _refuse_password() -> str:
    raise ValueError(f"{KEY} is encrypted, and nobody is there to be asked for its password")


class TlsLayer:
    """A `Layer` (`session.py`): TLS of one connection. Any thread may call any method."""

    def __init__(self, context: ssl.SSLContext, is_server: bool, own: bytes) -> None:
        self.is_ready = False
        self._is_server = is_server
        self._own = own
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._lock = threading.Lock()  # OpenSSL's objects are not for two threads
        self._advance()

    @property
    def binding(self) -> bytes:
        theirs = self._tls.getpeercert(binary_form=True) or b""
        ends = (theirs, self._own) if not self._is_server else (self._own, theirs)
        return b"".join(hashlib.sha256(end).digest() for end in ends)  # the server's first

    def wrap(self, data: bytes) -> bytes:
        with self._lock:
            view = memoryview(data)
            try:
                while view:
                    view = view[self._tls.write(view) :]
            except ssl.SSLError as error:
                raise _problem(error) from error
            return self._outgoing.read()

    def unwrap(self, data: bytes | bytearray | memoryview) -> bytes:
        with self._lock:
            self._incoming.write(data)
            if not self.is_ready:
                self._advance()
            pieces: list[bytes] = []
            try:
                while self.is_ready and (piece := self._tls.read(_READ_BYTES)):
                    pieces.append(piece)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError as error:
                raise SessionError("the other side has ended TLS") from error
            except ssl.SSLError as error:
                raise _problem(error) from error
            return b"".join(pieces)

    def take_outgoing(self) -> bytes:
        with self._lock:
            return self._outgoing.read()

    def _advance(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise _problem(error) from error
        self.is_ready = True


def _problem(error: ssl.SSLError) -> SessionError:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if isinstance(error, ssl.SSLCertVerificationError):
        return SessionError(
            f"the other side's certificate is refused ({error.verify_message}): {AUTHORITY} of this node has to be the "
            "authority of all nodes"
        )
    if reason in ("wrong version number", "http request", "record layer failure", "unexpected message"):
        return SessionError("the other side does not speak TLS: all nodes need --cluster-tls, or none")
    return SessionError(f"TLS ended: {reason}")
