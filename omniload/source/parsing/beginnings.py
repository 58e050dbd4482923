"""What text begins with that is none in UTF-8, though the file is sound, and the command that mends it."""

__all__ = ["said_of_beginning"]

_PACKED = {
    b"\x1f\x8b": "is compressed by gzip; give the file a name that ends in .gz",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; give the file a name that ends in .zst",
    b"BZh": "is compressed by bzip2, which is not read; unpack it: bunzip2 FILE",
    b"\xfd7zXZ\x00": "is compressed by xz, which is not read; unpack it: unxz FILE",
}
_CODINGS = {
    # The longer ones first: they begin as those of two bytes do.
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    # Lines of JSON behind the first one, or in a file without a mark of its byte order.
    b'{\0"\0': "UTF-16LE",
    b'\0{\0"': "UTF-16",
}


def said_of_beginning(data: bytes) -> str:
    """Return what the first bytes of a file, or of a line of it, show it to be and what mends it; empty where nothing.

    As a predicate of the file, with ``FILE`` for its name.
    """
    for magic, said in _PACKED.items():
        if data.startswith(magic):
            return said
    for mark, coding in _CODINGS.items():
        if data.startswith(mark):
            return f"is {coding}; write it as UTF-8: iconv -f {coding} -t UTF-8 FILE > NEW"
    return ""
