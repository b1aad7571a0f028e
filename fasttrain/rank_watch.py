"""All ranks of a run end soon after one has failed, with a sentence that says which one and why.

A rank whose partner has died waits for it: over NCCL until the process group's timeout, and in a replayed CUDA graph
without end, since NCCL's watchdog knows nothing of the collectives in there. Here each rank holds a connection to the
first. The system closes a dead process's connections, whatever ended it, so that nobody has to send signs of life, and
a rank that is merely slow is never taken for a dead one.
"""

import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

CONNECT_SECONDS, HELLO_SECONDS, LONGEST_HELLO = 60.0, 5.0, 100

CONSEQUENCE_SECONDS = 1.0
"""A rank's error that comes this shortly before it learns of another's loss is taken for a consequence of that."""

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A host that is cut off, and closes nothing, is given up after 30 seconds."""

_open: "weakref.WeakSet[RankWatch]" = weakref.WeakSet()
_children_let_go: list[bool] = []


class RankWatch:
    """This rank's connections: on the first rank to every other one, on those to the first.

    Args:
        rank: of this process.
        world_size: number of ranks.
        share: returns on every rank what the first one gave it, as `Strategy.broadcast` does.
        host: where the others reach the first rank, if it is one of its own addresses; else they take its name.
        on_loss: called in a thread, once, with a clause, when another rank has failed or is gone.

    Raises:
        OSError: the ranks don't get connected within `CONNECT_SECONDS`.
    """

    def __init__(
        self, rank: int, world_size: int, share: Callable[[Any], Any], host: str, on_loss: Callable[[str], None]
    ) -> None:
        self.rank, self._on_loss = rank, on_loss
        self._lost, self._over, self._lock = threading.Event(), threading.Event(), threading.Lock()
        server, host = _listen_at(host) if rank == 0 else (None, "")
        port = server.getsockname()[1] if server is not None else 0
        host, port, token = share((host, port, secrets.token_hex(16)))
        if server is not None:
            with server:
                self._peers = _accept(server, world_size, token)
        else:
            self._peers = {0: socket.create_connection((host, port), CONNECT_SECONDS)}
            self._peers[0].sendall(f"{token} {rank}\n".encode())
        _open.add(self)
        if not _children_let_go:
            os.register_at_fork(after_in_child=_let_go_in_child)
            _children_let_go.append(True)
        for other, peer in self._peers.items():
            _wait_for_long(peer)
            threading.Thread(target=self._watch, args=(other, peer), name=f"watch-rank-{other}", daemon=True).start()

    def tell_failure(self, reason: str) -> None:
        """Have the other ranks know that this one fails, unless it does so since another one was lost."""
        if not self._over.is_set() and not self._lost.wait(CONSEQUENCE_SECONDS):
            self._leave(f"lost rank {self.rank} failed: {' '.join(reason.split())}")
        self.close()

    def close(self) -> None:
        """Leave in good order. Safe to call twice."""
        self._leave("over")

    def _leave(self, line: str) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()  # before the others know: they may be gone at once, and are not lost then
        self._send_all(line)
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # ends the thread that reads, which then closes it

    def let_go(self) -> None:
        """Give up a forked child's copies of the connections, which would outlive the parent's."""
        for peer in self._peers.values():
            with suppress(OSError):
                os.close(peer.detach())

    def _watch(self, other: int, peer: socket.socket) -> None:
        clause = f"rank {other} is gone: it was killed, or its host is cut off"
        with peer, suppress(OSError), peer.makefile(encoding="utf-8", errors="replace") as lines:
            word, _, told = lines.readline().strip().partition(" ")
            if word == "over":
                return
            clause = told or clause
        self._lose(clause)

    def _lose(self, clause: str) -> None:
        with self._lock:
            if self._lost.is_set() or self._over.is_set():
                return
            self._lost.set()
        if self.rank == 0:
            self._send_all(f"lost {clause}")
        self._on_loss(clause)

    def _send_all(self, line: str) -> None:
        for peer in self._peers.values():
            with suppress(OSError):  # of one that is gone, which its own thread has seen
                peer.sendall(f"{line}\n".encode())


def _let_go_in_child() -> None:
    for watch in _open:
        watch.let_go()


def _listen_at(host: str) -> tuple[socket.socket, str]:
    """Return a socket that takes connections, and the name under which other hosts find it."""
    try:
        server = socket.create_server((host, 0))
    except OSError:  # the first rank of some ranks need not be on the run's first host
        host = socket.gethostname()
        server = socket.create_server(("", 0))
    server.settimeout(CONNECT_SECONDS)
    return server, host


def _accept(server: socket.socket, world_size: int, token: str) -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    while len(peers) < world_size - 1:
        peer, _ = server.accept()
        known, _, rank = _hello(peer).partition(b" ")
        if secrets.compare_digest(known, token.encode()) and rank.isdigit():
            peers[int(rank)] = peer
        else:
            peer.close()  # a stranger
    return peers


def _hello(peer: socket.socket) -> bytes:
    """Return the first line that a connection brings, byte by byte: what comes after it is read elsewhere."""
    peer.settimeout(HELLO_SECONDS)
    line = b""
    with suppress(OSError):
        while not line.endswith(b"\n") and len(line) < LONGEST_HELLO and (byte := peer.recv(1)):
            line += byte
    return line.strip()


def _wait_for_long(peer: socket.socket) -> None:
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
