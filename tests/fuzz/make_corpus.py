#!/usr/bin/env python3
"""Makes the first inputs of the corpus from the golden files and by hand: python3 make_corpus.py"""
import os
import struct
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "..", "data", "zoo")


def put(target, name, data):
    folder = os.path.join(HERE, "corpus", target)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "wb") as f:
        f.write(data)


def golden(name):
    with open(os.path.join(GOLDEN, name), "rb") as f:
        return f.read()


def safetensors(header, data=b""):
    return struct.pack("<Q", len(header)) + header + data


put("fuzz_rotations", "golden", golden("golden.safetensors"))
put("fuzz_rotations", "empty", safetensors(b"{}"))
put("fuzz_rotations", "tensors", safetensors(
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[],"data_offsets":[4,5]}}', bytes(5)))
put("fuzz_rotations", "escapes", safetensors(b'{"__metadata__":{"\\u0041\\ud83d\\ude00\\n\\"":"\xf0\x9f\x98\x80"}}'))
put("fuzz_rotations", "length", b"\xff" * 8 + b"{}")
put("fuzz_rotations", "overflow", safetensors(b'{"a":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'))

for name in ("golden_v1", "golden_v2", "hostile"):
    path = os.path.join(GOLDEN, name + ".pt")
    put("fuzz_pt", name, golden(name + ".pt"))
    with zipfile.ZipFile(path) as z:
        put("fuzz_pt", name + "_pickle", z.read("archive/data.pkl"))
put("fuzz_pt", "memo", b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01h\x00h\x01]q\x02(K\x01M\x00\x02J\xff\xff\xff\xff\x8a\x02\xff\x00G?\xf0\0\0\0\0\0\0e"
                       b"X\x01\x00\x00\x00bK\x01K\x02\x86K\x03K\x04K\x05\x87K\x06\x85u.")

put("fuzz_gguf", "golden", golden("golden_rot.gguf.bin"))


def saved(n_tokens, recent_low, known, version=2):
    """A saved sequence of the target's cache but for its hashes and check, which the target makes right."""
    rows = min(n_tokens, 4) + n_tokens - max(recent_low, 4) if n_tokens > 4 else n_tokens
    body = bytes(i * 37 % 251 for i in range(16 * n_tokens)) + bytes(i * 11 % 63 for i in range(64 * rows))
    body += struct.pack(f"<{known}i", *range(known)) + bytes(8)
    more = struct.pack("<Qq", 0, known) if version == 2 else b""
    head = struct.pack("<IIQQQiiiiqq", 0x31514553, version, 64 + len(more) + len(body), 0, 0, 0, 4, 24, 0, n_tokens, recent_low)
    return head + more + body


put("fuzz_saved", "empty", saved(0, 0, 0))
put("fuzz_saved", "short", saved(3, 0, 3))
put("fuzz_saved", "pages", saved(130, 90, 130))
put("fuzz_saved", "unknown", saved(70, 64, 20))
put("fuzz_saved", "version1", saved(40, 0, 0, 1))
put("fuzz_saved", "huge", saved(0, 0, 0)[:48] + struct.pack("<qqQq", 2**62, 2**61, 0, 2**62) + bytes(8))

text = lambda s: struct.pack("<Q", len(s)) + s
put("fuzz_gguf", "types", b"GGUF" + struct.pack("<IQQ", 2, 0, 4) + b"".join(
    text(k) + struct.pack("<I", t) + v for k, t, v in [(b"a", 0, b"\1"), (b"b", 12, bytes(8)), (b"c", 9, struct.pack("<IQ", 3, 2) + bytes(4)),
                                                       (b"d", 8, text(b"x" * 300))]))
put("fuzz_gguf", "none", b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
put("fuzz_gguf", "huge", b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62))
