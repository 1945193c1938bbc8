"""Messages between the service and its worker: pickles, whose arrays travel beside them without being copied.

Both ends are this package, and each end started or was started by the other.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO

_HEAD = struct.Struct("<II")  # bytes of the pickle, number of arrays
_MOST = 1 << 22  # bytes of one call to write: a pipe takes much less


def send(stream: BinaryIO, message: Any) -> None:
    """Write a message and flush it."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    lengths = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    stream.write(_HEAD.pack(len(content), len(views)) + lengths + content)
    for view in views:
        for start in range(0, view.nbytes, _MOST):
            stream.write(view[start : start + _MOST])
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """The next message; ``EOFError`` if the other end is gone.

    >>> import io
    >>> pipe = io.BytesIO()
    >>> send(pipe, {"a": bytearray(3)})
    >>> _ = pipe.seek(0)
    >>> receive(pipe)
    {'a': bytearray(b'\\x00\\x00\\x00')}
    """
    length, arrays = _HEAD.unpack(_exactly(stream, _HEAD.size))
    lengths = struct.unpack(f"<{arrays}Q", _exactly(stream, 8 * arrays))
    content = _exactly(stream, length)
    return pickle.loads(content, buffers=[_exactly(stream, size) for size in lengths])


def _exactly(stream: BinaryIO, size: int) -> bytearray:
    content = bytearray(size)
    view, at = memoryview(content), 0
    while at < size:
        found = stream.readinto(view[at:])  # type: ignore[attr-defined]
        if not found:
            raise EOFError("the other end is gone")
        at += found
    return content
