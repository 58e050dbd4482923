"""An EROFS image read by the words of its format alone: a second opinion on what was written."""

import struct

from snapshot.image.erofs_format import crc32c

__all__ = ["ErofsReader", "inverted_crc32c"]

BLOCK = 4096


def inverted_crc32c(data):
    """The checksum as everybody but the kernel gives it."""
    return crc32c(data) ^ 0xFFFFFFFF


class ErofsReader:
    """Metadata and the blobs of its devices; every number is read anew from the bytes."""

    def __init__(self, image, blobs=()):
        self.image, self.blobs = image, blobs
        fields = struct.unpack_from("<IIIBBHQQIIII16s16sIHHHBBIQB23x", image, 1024)
        self.magic, self.checksum, self.compatible, bits = fields[:4]
        self.root_nid, self.inodes, self.blocks = fields[5], fields[6], fields[9]
        self.uuid, self.incompatible, self.devices, slot = (
            fields[12],
            fields[14],
            fields[16],
            fields[17],
        )
        assert 1 << bits == BLOCK
        self.slots = [
            struct.unpack_from("<64sII56x", image, slot * 128 + 128 * number)
            for number in range(self.devices)
        ]

    def checksum_is_right(self):
        first = bytearray(self.image[1024:BLOCK])
        first[4:8] = bytes(4)
        return self.checksum == crc32c(bytes(first))

    def inode(self, nid):
        at = nid * 32
        fields = struct.unpack_from("<HHHHQIIIIqII16x", self.image, at)
        form, xattr_count, mode, _, size, place, number, uid, gid, seconds, nanos, links = fields
        assert form & 1, "an extended inode"
        xattr_bytes = 12 + 4 * (xattr_count - 1) if xattr_count else 0
        return {
            "at": at,
            "layout": form >> 1 & 7,
            "mode": mode,
            "size": size,
            "place": place,
            "number": number,
            "owner": (uid, gid),
            "mtime_ns": seconds * 10**9 + nanos,
            "links": links,
            "xattrs": self._xattrs(at + 64, xattr_bytes),
            "behind": at + 64 + xattr_bytes,
        }

    def data(self, inode):
        """All bytes of a file, directory or symbolic link."""
        size = inode["size"]
        if inode["layout"] == 0:
            start = inode["place"] * BLOCK
            return self.image[start : start + size]
        if inode["layout"] == 2:
            tail = inode["behind"]
            assert tail // BLOCK == (tail + size - 1) // BLOCK, "inline data in one block"
            return self.image[tail : tail + size]
        assert inode["layout"] == 4
        return b"".join(self._chunks(inode))

    def names(self, inode):
        """Every name of a directory with its nid and type, in the order of the blocks."""
        data, found = self.data(inode), []
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            count = struct.unpack_from("<QHBx", block)[1] // 12
            records = [struct.unpack_from("<QHBx", block, 12 * n) for n in range(count)]
            ends = [record[1] for record in records[1:]] + [len(block)]
            for (nid, at, kind), end in zip(records, ends, strict=True):
                found.append((block[at:end].rstrip(b"\0"), nid, kind))
        return found

    def tree(self):
        """Every path with its inode, parents first."""
        waiting = [(b"", self.root_nid)]
        while waiting:
            path, nid = waiting.pop()
            inode = self.inode(nid)
            yield path, nid, inode
            if inode["mode"] >> 12 == 0o04:
                for name, below, _ in self.names(inode):
                    if name not in {b".", b".."}:
                        waiting.append((path + b"/" + name if path else name, below))

    def _chunks(self, inode):
        chunk = BLOCK << (inode["place"] & 31)
        assert inode["place"] & 0x20, "chunks by address"
        at = inode["behind"] + -inode["behind"] % 8
        for start in range(0, inode["size"], chunk):
            size = min(chunk, inode["size"] - start)
            high, device, block = struct.unpack_from("<HHI", self.image, at)
            at += 8
            if block == 0xFFFFFFFF:
                yield bytes(size)
                continue
            assert not high
            blob = self.blobs[device - 1]
            data = bytes(blob[block * BLOCK : block * BLOCK + size])
            assert len(data) == size, "a chunk lies in its blob"
            yield data

    def _xattrs(self, at, size):
        if not size:
            return {}
        end, found = at + size, {}
        assert struct.unpack_from("<IB", self.image, at) == (0, 0)
        at += 12
        prefixes = {1: b"user.", 4: b"trusted.", 6: b"security."}
        prefixes |= {2: b"system.posix_acl_access", 3: b"system.posix_acl_default"}
        while at < end:
            name_size, index, value_size = struct.unpack_from("<BBH", self.image, at)
            name = self.image[at + 4 : at + 4 + name_size]
            value = self.image[at + 4 + name_size : at + 4 + name_size + value_size]
            found[prefixes[index] + name] = value
            at += 4 + name_size + value_size
            at += -at % 4
        return found
