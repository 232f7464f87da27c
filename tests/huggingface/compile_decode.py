"""Compiles the decoding kernels for GPUs that are not there: `python tests/huggingface/compile_decode.py` prints JSON,
{name: {"shared": bytes a block, "registers": a thread, "spills": bytes stored, both for sm_90}}."""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from s2_megatron.huggingface import decode_kernel
from s2_megatron.huggingface.decode_kernel import Kept
from tests.kernels.compile_kernels import Entry, compile_and_measure

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CASES = [(90, dim, dim, dtype, "") for dim in (64, 128, 256) for dtype in DTYPES]
CASES += [(90, 128, 128, "bf16", "by_query_head"), (90, 128, 64, "bf16", "plain"), (90, 192, 128, "bf16", "")]
CASES += [(card, 128, 128, "bf16", "") for card in (80, 86, 89, 100, 120)] + [(86, 256, 256, "fp32", "")]
CASES += [(card, dim, dim, "bf16", "one_kv_head") for card in (86, 90) for dim in (128, 256)]  # of 64 query heads


def launched(dim: int, value_dim: int, dtype: torch.dtype, form: str) -> list[tuple]:
    """(kernel, arguments, options) of a step of 32 query and 8 KV heads (one_kv_head: 64 and 1), with RoPE and offsets
    unless it is plain, in many splits and in one."""
    found = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *arguments, **more: found.append((self.kernel, arguments, more))

    kernels = ("s2_decode_kernel", "s2_decode_join_kernel")
    real = {name: getattr(decode_kernel, name) for name in kernels}
    heads, kv_heads = (64, 1) if form == "one_kv_head" else (32, 8)
    query, key = (torch.empty(1, count, 1, dim, dtype=dtype) for count in (heads, kv_heads))
    value = torch.empty(1, kv_heads, 1, value_dim, dtype=dtype)
    plain, rows = form == "plain", 4 if form == "by_query_head" else 1
    rotary = None if plain else (torch.empty(1, 1, dim, dtype=dtype),) * 2
    offset = None if plain else torch.empty(heads, dtype=dtype)
    for name, kernel in real.items():
        setattr(decode_kernel, name, Recorder(kernel))
    try:
        for kept in (9216, 16):
            keys, values = (torch.empty(1, kv_heads, kept, size, dtype=dtype) for size in (dim, value_dim))
            shown, place = (
                torch.ones(1, 1, rows, kept, dtype=torch.bool),
                torch.zeros(1, kv_heads, 2, dtype=torch.int64),
            )
            decode_kernel.decode(
                query, key, value, [Kept(keys, values, shown, place, torch.arange(kv_heads))], 0.1, rotary, offset
            )
    finally:
        for name, kernel in real.items():
            setattr(decode_kernel, name, kernel)
    return found


def entry_of(card: int, kernel, arguments: tuple, more: dict) -> Entry:
    """As the kernel is launched on a card: pointers and multiples of 16 are known to be that."""
    types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64"}
    types |= {torch.uint8: "*u8"}
    options = {name: value for name, value in more.items() if name not in kernel.arg_names}
    constants = {name: value for name, value in more.items() if name in kernel.arg_names}
    signature, attributes = dict.fromkeys(constants, "constexpr"), {}
    for position, (parameter, value) in enumerate(zip(kernel.params, arguments)):
        pointer = isinstance(value, torch.Tensor)
        if type(value) is int and value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[parameter.name] = "constexpr", 1
            continue
        signature[parameter.name] = types[value.dtype] if pointer else "fp32" if type(value) is float else "i32"
        if pointer or (type(value) is int and value % 16 == 0 and not parameter.do_not_specialize):
            attributes[(position,)] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}
    return Entry(kernel, card, signature, constants, attributes, options)


def measured(case: tuple) -> dict[str, dict]:
    card, dim, value_dim, dtype, form = case
    found = {}
    for kernel, arguments, more in launched(dim, value_dim, DTYPES[dtype], form):
        word = "whole" if more.get("WHOLE") else kernel.fn.__name__.removeprefix("s2_").removesuffix("_kernel")
        name = "-".join(filter(None, (f"sm{card}", word, str(dim), str(value_dim), dtype, form)))
        found[name] = compile_and_measure(entry_of(card, kernel, arguments, more))
    return found


def main() -> None:
    decode_kernel.multiprocessors = lambda device: 132
    with ProcessPoolExecutor(2) as pool:
        results = pool.map(measured, CASES)
        print(json.dumps({name: needs for found in results for name, needs in found.items()}))


if __name__ == "__main__":
    main()
