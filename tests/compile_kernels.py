"""Compiles the kernels for given GPUs without having one; prints JSON: [[capability, head dim, wide, kernel, bytes of shared memory], ...].

    TRITON_INTERPRET=0 python tests/compile_kernels.py 90:128:bf16 86:256:fp32
"""

import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from s2_megatron.kernels.key_kernels import s2_backward_dkdv_kernel
from s2_megatron.kernels.query_kernels import s2_query_kernel
from s2_megatron.kernels.tiles import tiles_for

FLAGS = dict(N_RANGES=2, TABLE=False, PACKED=False, QUERY_IDS=False, KEY_SLOT=False, HEAD_GROUP=4)
INT64 = ("row_starts_ptr", "column_starts_ptr")
INT32 = ("ranges_ptr", "key_blocks_ptr", "query_blocks_ptr", "starts_ptr", "lengths_ptr", "query_ids_ptr", "query_rank_ptr", "slot_ptr")


def kind_of(name: str, dtype: str) -> str:
    """The Triton type of a kernel's argument."""
    if not name.endswith("_ptr"):
        return "fp32" if name == "scale" else "i32"
    if name in INT64:
        return "*i64"
    if name in INT32:
        return "*i32"
    return "*fp32" if "lse" in name or "delta" in name else f"*{dtype}"


def shared_memory(kernel, capability: int, dtype: str, tile, constants: dict) -> int:
    signature, values, attributes = {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants or (name.startswith("stride_") and name.endswith("d")):
            signature[name], values[(position,)] = "constexpr", constants.get(name, 1)
            continue
        signature[name] = kind_of(name, dtype)
        if name.endswith("_ptr") or name.startswith("stride_"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = dict(num_warps=tile.warps, num_stages=tile.stages)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


def main():
    found = []
    for item in sys.argv[1:]:
        capability, dim, dtype = item.split(":")
        capability, dim, wide = int(capability), int(dim), dtype == "fp32"
        tiles = tiles_for(dim, wide, 64, 2, divmod(capability, 10))
        for role, tile in zip(("forward", "dq", "dkdv"), tiles):
            constants = dict(FLAGS, BLOCK=64, HEAD_DIM=dim, BLOCK_D=dim, TILE_M=tile.rows, TILE_N=tile.columns, STAGES=tile.stages, IEEE=wide)
            if role == "dkdv":
                kernel, constants = s2_backward_dkdv_kernel, dict(constants, EFFICIENT=True, RATIO=1)
            else:
                kernel, constants = s2_query_kernel, dict(constants, CONTINUE=False, FORWARD=role == "forward")
            found.append([capability, dim, wide, role, shared_memory(kernel, capability, dtype, tile, constants)])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
