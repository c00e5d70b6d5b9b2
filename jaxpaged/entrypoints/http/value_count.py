"""How much a JSON text will become when it is decoded, counted as it comes and before anything is made of it."""

COSTS = {b",": 1, b":": 8, b"{": 12, b"[": 12}
"""How many numbers the decoder reads in the time that it takes for what these signs stand for, and 1 for a quote: most
of all a name of an object that has other names. It lets nobody else run meanwhile."""
DEAREST = max(COSTS.values())
"""No byte counts for more."""


class ValueCount:
    """Counts what stands outside of texts: signs inside of one make it longer, and nothing else."""

    def __init__(self) -> None:
        self.num_values = 0
        """So far, in numbers that take as long."""
        self._in_text = False
        self._escape = b""  # the beginning of one, of which the rest comes with the next piece

    def add(self, piece: bytes) -> None:
        """Count the next piece of the text."""
        if self._escape or b"\\" in piece:
            piece = (self._escape + piece).replace(rb"\\", b"").replace(rb"\"", b"")
            self._escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        num_quotes = len(parts) - 1
        self.num_values += num_quotes + sum(cost * outside.count(sign) for sign, cost in COSTS.items())
        self._in_text ^= num_quotes % 2 == 1
