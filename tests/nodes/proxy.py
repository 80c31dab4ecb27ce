"""A relay between two TCP sockets that can alter, hold back or end what passes, as a network or who is on it can."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Proxy:
    """Relays the connections to its `address` to `target`, each byte through `alter(upwards, data)`. `hold`: nothing
    passes while it is set, in neither direction."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.alter: Callable[[bool, bytes], bytes] = lambda _, data: data
        self.passed = threading.Event()
        self.passed.set()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            for upwards, source, sink in ((True, near, far), (False, far, near)):
                threading.Thread(target=self._relay, args=(upwards, source, sink), daemon=True).start()

    def _relay(self, upwards: bool, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.passed.wait()
                sink.sendall(self.alter(upwards, data))
        except OSError:
            pass
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.passed.set()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
