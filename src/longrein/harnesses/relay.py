"""Runs inside the sandbox: `python -I -S relay.py SOCKET PORT READY GO PROCESSES COMMAND...`, standard library alone.

Always true: what a program sends to 127.0.0.1:PORT goes to the unix socket SOCKET and nowhere else, byte for byte, and an end of
either side is passed on at once (the proxy tells from it whether a reply arrived). The command starts once PORT listens and
whoever holds GO has written to it; this process ends with the command, by its exit status (128 + the signal, where one ended it).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` and `socket` are made of: to import those takes longer than the interpreter to start
import _socket
import os
import select
import sys

BLOCK = 65536
FULL = 4 * BLOCK
"""Bytes that wait for a slow reader before its writer is kept waiting too."""
MOST = 1000
"""Connections at a time; more wait to be accepted."""
CANNOT_RUN = 127


class End:
    """One end of a connection; `other` is where its bytes go."""

    other: End

    def __init__(self, sock: _socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.waiting = bytearray()
        """Bytes for this end that it has not taken yet."""
        self.finished = False
        """It will send no more."""
        self.watched = 0


class Relay:
    def __init__(self, listener: _socket.socket, target: str) -> None:
        self._listener, self._target = listener, target
        self._ends: dict[int, End] = {}
        self._accepting = False
        self._epoll = select.epoll()
        self._accept_if_room()

    def until(self, ended: int) -> None:
        """Pass on what comes, until a file number is readable."""
        self._epoll.register(ended, select.EPOLLIN)
        while True:
            events = self._epoll.poll()
            if any(number == ended for number, _ in events):
                return
            self._turn(events)

    def _turn(self, events: list[tuple[int, int]]) -> None:
        for number, event in events:
            if number == self._listener.fileno():
                self._accept()
            elif (end := self._ends.get(number)) is not None:  # its other end may have closed both a moment ago
                try:
                    if event & select.EPOLLERR:
                        raise OSError
                    if event & (select.EPOLLIN | select.EPOLLHUP) and not end.finished:
                        self._read(end)
                    if event & select.EPOLLOUT:
                        self._write(end)
                    self._settle(end)
                except BlockingIOError:
                    pass
                except OSError:
                    self._close(end)

    def _accept(self) -> None:
        try:
            number, _ = self._listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        client, server = _socket.socket(fileno=number), _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            server.connect(self._target)
            client.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        except OSError:
            client.close()
            server.close()
            return
        one, two = End(client), End(server)
        one.other, two.other = two, one
        for end in (one, two):
            self._ends[end.sock.fileno()] = end
            self._epoll.register(end.sock.fileno(), 0)
            self._watch(end)
        self._accept_if_room()

    def _accept_if_room(self) -> None:
        room = len(self._ends) < 2 * MOST
        if room and not self._accepting:
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        elif self._accepting and not room:
            self._epoll.unregister(self._listener.fileno())
        self._accepting = room

    def _read(self, end: End) -> None:
        data = end.sock.recv(BLOCK)
        end.finished = not data
        end.other.waiting += data
        self._write(end.other)

    def _write(self, end: End) -> None:
        while end.waiting:
            try:
                sent = end.sock.send(end.waiting)
            except BlockingIOError:
                return
            del end.waiting[:sent]
        if end.other.finished:
            end.sock.shutdown(_socket.SHUT_WR)

    def _settle(self, end: End) -> None:
        if end.finished and end.other.finished and not end.waiting and not end.other.waiting:
            self._close(end)
            return
        self._watch(end)
        self._watch(end.other)

    def _watch(self, end: End) -> None:
        reads = not end.finished and len(end.other.waiting) < FULL
        events = (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if end.waiting else 0)
        if events != end.watched:
            self._epoll.modify(end.sock.fileno(), events)
            end.watched = events

    def _close(self, end: End) -> None:
        for one in (end, end.other):
            if self._ends.pop(one.sock.fileno(), None) is not None:
                self._epoll.unregister(one.sock.fileno())
            one.sock.close()
        self._accept_if_room()


def start(command: list[str], processes: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
        if processes:
            import resource

            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_RUN)


def main() -> int:
    target, port, ready, go, processes = sys.argv[1], *map(int, sys.argv[2:6])
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(256)
    listener.setblocking(False)
    relay = Relay(listener, target)
    os.write(ready, b"ready")
    if not os.read(go, 1):
        return CANNOT_RUN
    os.close(ready)
    os.close(go)
    child = start(sys.argv[6:], processes)
    relay.until(os.pidfd_open(child))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main())
