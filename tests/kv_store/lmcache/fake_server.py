"""A server that speaks the bytes of LMCache's own, in this process, and can be told to misbehave."""

import socket
import struct
import threading

HEADER, ANSWER = struct.Struct("<9i150s"), struct.Struct("<9i")


class FakeServer:
    """`chunks`: name -> (7 numbers that describe it, bytes). `mangle(answer, content)`: what is sent instead."""

    def __init__(self):
        self.chunks, self.commands, self.mangle = {}, [], None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self):
        return f"lm://127.0.0.1:{self.port}"

    def close(self):
        if self._listener.fileno() != -1:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()
        for connection in self._open:
            connection.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection, connection.makefile("rb") as reader:
            while len(head := reader.read(HEADER.size)) == HEADER.size:
                command, length, form, dtype, _, *extents, name = HEADER.unpack(head)
                name = name.decode().strip()
                self.commands.append((command, name))
                if command == 1:
                    self.chunks[name] = ((length, form, dtype, *extents), reader.read(length))
                    continue
                said, content = self.chunks.get(name, ((0, 1, 2, 0, 0, 0, 0), b""))
                if command == 3:
                    said, content = (0, 1, 2, 0, 0, 0, 0), b""
                answer = ANSWER.pack(200 if name in self.chunks else 400, *said, 0)
                if self.mangle is not None and command == 2:
                    answer, content = self.mangle(answer, content)
                try:
                    connection.sendall(answer + content)
                except OSError:
                    return
                if self.mangle is not None and command == 2:
                    return  # what it misbehaved on is over
