#!/usr/bin/env python3
"""Makes the golden files beside it: python3 make_golden.py. Standard library alone; it knows the
formats from docs/FORMAT.md and not from the C code, so that the two check each other.

Every file holds, for layer i, head h and d = 16,
    rotation[i][h][r][c] = (-1)^(popcount(r & c) + s) / 4,  s = bit (c + 3 h + i) % 5 of 0b01101
"""
import io
import json
import os
import pickle
import struct
import sys
import zipfile

D = 16
HERE = os.path.dirname(os.path.abspath(__file__))


def rotation(i, h):
    def value(r, c):
        return (-1) ** (bin(r & c).count("1") + (0b01101 >> ((c + 3 * h + i) % 5) & 1)) / 4

    return [value(r, c) for r in range(D) for c in range(D)]


def floats(values):
    return struct.pack("<%df" % len(values), *values)


def write(name, data):
    with open(os.path.join(HERE, name), "wb") as f:
        f.write(data)


# --- our format --------------------------------------------------------------------------------------


def safetensors(tensors, metadata, reverse=False):
    """tensors: [(name, dtype, shape, bytes)]; reverse: header entries against the order of data."""
    entries, data = {}, b""
    for name, dtype, shape, raw in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = dict(reversed(entries.items())) if reverse else dict(entries)
    header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def make_ours():
    meta = {"format": "oscar-rotations", "format_version": "1", "n_layers": "2", "model": "g\u00f6lden \U0001f600 \"quoted\"\n"}
    numbers = {
        0: dict(n_kv_heads=2, n_q_heads=6, head_dim=D, window=0, rope_layout=2, rope_n_dims=8, bits_k=3, bits_v=2, recipe=0,
                ldlq_k=1, gain_k=1, gain_v=0, rope_magnitude="1.25", clip_k="0", clip_v="0"),
        1: dict(n_kv_heads=1, n_q_heads=1, head_dim=D, window=128, rope_layout=0, rope_n_dims=0, bits_k=2, bits_v=4, recipe=1,
                ldlq_k=0, gain_k=0, gain_v=0, rope_magnitude="1", clip_k="0.96", clip_v="9.2e-1"),
    }
    for i, pairs in numbers.items():
        meta.update({"layers.%d.%s" % (i, k): str(v) for k, v in pairs.items()})
    ramp = lambda n, scale: floats([scale * (j + 1) for j in range(n)])
    heads = lambda i, n: floats(sum((rotation(i, h) for h in range(n)), []))
    # Pairs 1 and 3 of head 0, 0 and 2 of head 1; half-split: dims f and f + 4.
    tracked, mean = [0.0] * (2 * D), [0.0] * (2 * D)
    for h, pairs in enumerate([(1, 3), (0, 2)]):
        for c in range(D):
            inside = c < 8 and c % 4 in pairs
            (tracked if inside else mean)[h * D + c] = (c + 1) / 8 + h
    tensors = [
        ("layers.0.k_rotation", "F32", [2, D, D], heads(0, 2)),
        ("layers.0.v_rotation", "F32", [2, D, D], heads(0, 2)),
        ("layers.0.rope_inv_freq", "F32", [4], ramp(4, 0.5)),
        ("layers.0.k_pairs", "I32", [2, 2], struct.pack("<4i", 1, 3, 0, 2)),
        ("layers.0.k_tracked", "F32", [2, D], floats(tracked)),
        ("layers.0.k_mean", "F32", [2, D], floats(mean)),
        ("layers.0.v_mean", "F32", [2, D], ramp(2 * D, -0.25)),
        ("layers.0.k_metric_b", "F32", [2, D * (D - 1) // 2], ramp(D * (D - 1), 0.125)),
        ("layers.0.k_metric_d", "F32", [2, D], ramp(2 * D, 2.0)),
        ("layers.1.k_rotation", "F32", [1, D, D], heads(1, 1)),
    ]
    write("golden.safetensors", safetensors(tensors, meta))
    write("golden_unordered.safetensors", safetensors(tensors, meta, reverse=True))


# --- RotationZoo -------------------------------------------------------------------------------------


class Global:
    def __init__(self, module, name):
        self.text = b"c" + module.encode() + b"\n" + name.encode() + b"\n"


class Tensor:
    """A view of a storage, as torch describes one."""

    def __init__(self, storage, n_storage, offset, shape, strides):
        self.fields = storage, n_storage, offset, shape, strides


def dump(v):
    """Protocol 2 without a memo; real files, which have one, are read where they are at hand."""
    if isinstance(v, Global):
        return v.text
    if isinstance(v, Tensor):
        storage, n, offset, shape, strides = v.fields
        pid = b"(" + b"".join(map(dump, ("storage", Global("torch", "FloatStorage"), storage, "cpu", n))) + b"tQ"
        hooks = Global("collections", "OrderedDict").text + b")R"
        args = b"(" + pid + b"".join(map(dump, (offset, tuple(shape), tuple(strides), False))) + hooks + b"t"
        return Global("torch._utils", "_rebuild_tensor_v2").text + args + b"R"
    if isinstance(v, dict):
        return b"}(" + b"".join(dump(k) + dump(x) for k, x in v.items()) + b"u"
    if isinstance(v, tuple):
        return b"(" + b"".join(map(dump, v)) + b"t"
    if isinstance(v, str):
        return b"X" + struct.pack("<I", len(v.encode())) + v.encode()
    return pickle.dumps(v, 2)[2:-1]  # numbers, None, bool: without PROTO and STOP


def torch_file(root, storages, name):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as z:
        put = lambda entry, data: z.writestr(zipfile.ZipInfo("archive/" + entry), data)
        put("data.pkl", root if isinstance(root, bytes) else b"\x80\x02" + dump(root) + b".")
        put("byteorder", b"little")
        for key, values in storages.items():
            put("data/" + key, floats(values))
        put("version", b"3\n")
    write(name, out.getvalue())


def make_pt():
    # Version 1: one matrix a layer, the layers views into one storage, a calibration dict.
    both = rotation(0, 0) + rotation(1, 0)
    entry = lambda i: {"layer_id": i, "rotation": Tensor("0", 512, 256 * i, (D, D), (D, 1)),
                       "eigenvalues": Tensor("1", D, 0, (D,), (1,))}
    root = {"format_version": 1, "objective": "qqt_r_h_pbr", "source_grouping": "layer",
            "calibration": {"tokens": 1000, "model_revision": None, "created_at_unix": 1.5, "post_rope": True},
            "layers": {0: entry(0), 1: entry(1)}}
    torch_file(root, {"0": both, "1": [float(j) for j in range(D)]}, "golden_v1.pt")
    # Version 2: a matrix a head, ids as text, means, a rotation stored transposed.
    heads = rotation(0, 0) + rotation(0, 1)
    turned = [heads[256 * h + D * r + c] for h in range(2) for c in range(D) for r in range(D)]
    layer = {"layer_id": 0, "rotation": Tensor("0", 512, 0, (2, D, D), (256, 1, D)),
             "q_rotation": Tensor("0", 512, 0, (2, D, D), (256, 1, D)),
             "k_mean": Tensor("1", 2 * D, 0, (2, D), (D, 1))}
    root = {"format_version": 2, "objective": "oscar2_center", "source_grouping": "head", "layers": {"0": layer}}
    torch_file(root, {"0": turned, "1": [0.5 * j for j in range(2 * D)]}, "golden_v2.pt")
    # What a hostile file would do; loading it must run nothing.
    root = b"\x80\x02cposix\nsystem\n(X\x04\x00\x00\x00exittR."
    torch_file(root, {}, "hostile.pt")


# --- GGUF --------------------------------------------------------------------------------------------


def make_gguf():
    text = lambda s: struct.pack("<Q", len(s)) + s.encode()
    u32 = lambda v: struct.pack("<I", v)
    pairs = [text("general.architecture") + u32(8) + text("llama"), text("general.alignment") + u32(4) + u32(64),
             text("tokenizer.ggml.tokens") + u32(9) + u32(8) + struct.pack("<Q", 2) + text("a") + text("bc"),
             text("llama.rope.freq_base") + u32(6) + struct.pack("<f", 1e4)]
    transposed = lambda i: floats([rotation(i, 0)[D * r + c] for c in range(D) for r in range(D)])
    tensors = [("blk.0.attn_k_rot.weight", (D, D), 0, transposed(0)), ("blk.0.attn_v_rot.weight", (D, D), 0, transposed(1)),
               ("output.weight", (32, 2), 2, bytes(36)), ("blk.1.attn_k_rot.weight", (D, D), 0, transposed(2))]
    infos, data = b"", b""
    for name, dims, kind, raw in tensors:
        data += bytes(-len(data) % 64)
        infos += text(name) + u32(len(dims)) + struct.pack("<%dQ" % len(dims), *dims) + u32(kind) + struct.pack("<Q", len(data))
        data += raw
    header = b"GGUF" + u32(3) + struct.pack("<QQ", len(tensors), len(pairs)) + b"".join(pairs) + infos
    write("golden_rot.gguf.bin", header + bytes(-len(header) % 64) + data)


if __name__ == "__main__":
    make_ours()
    make_pt()
    make_gguf()
    sys.exit(0)
