#!/usr/bin/env python3
"""Writes quant_vectors.json: random blocks of every weight type and their elements as binary32 bits.

The elements come from the `gguf` package (pip install gguf==0.19.0), which the crate's own code shares nothing with.
"""
import json
import random
import struct
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize

BLOCKS = 3
# Offsets of the binary16 fields of a block, which are kept finite.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
PLAIN = {
    "F32": [0x3FC00000, 0x80000001, 0x7F7FFFFF, 0x00000000],
    "F16": [0x3E00, 0x8001, 0x7BFF, 0x0000, 0x03FF],
    "BF16": [0x3FC0, 0x8001, 0x7F7F, 0x0000],
}


def block_bytes(name, size, rng):
    data = bytearray(rng.randbytes(size))
    for at in HALVES[name]:
        # Exponents from subnormal to 2^0: what real scales are, and no overflow in the products.
        bits = rng.getrandbits(1) << 15 | rng.randrange(0, 16) << 10 | rng.getrandbits(10)
        data[at : at + 2] = struct.pack("<H", bits)
    return bytes(data)


def vector(name, rng):
    kind = Type[name]
    _, size = GGML_QUANT_SIZES[kind]
    if name in PLAIN:
        data = b"".join(struct.pack("<I" if name == "F32" else "<H", bits) for bits in PLAIN[name])
    else:
        data = b"".join(block_bytes(name, size, rng) for _ in range(BLOCKS))
    elements = dequantize(np.frombuffer(data, dtype=np.uint8).copy(), kind) if name not in PLAIN else plain(name, data)
    return {"type": name, "bytes": data.hex(), "f32": elements.astype("<f4").tobytes().hex()}


def plain(name, data):
    if name == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype="<f4" if name == "F32" else "<f2").astype(np.float32)


def main():
    rng = random.Random(20)
    vectors = [vector(name, rng) for name in [*PLAIN, *HALVES]]
    lines = ",\n".join(json.dumps(entry) for entry in vectors)
    Path(__file__).with_name("quant_vectors.json").write_text(f"[\n{lines}\n]\n")


main()
