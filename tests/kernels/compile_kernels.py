"""Compiles the kernels for GPUs that are not there, and reads what ptxas says about them.

    TRITON_INTERPRET=0 python tests/kernels/compile_kernels.py sm90-forward-128-bf16 sm86-dkdv-256-fp32
    TRITON_INTERPRET=0 python tests/kernels/compile_kernels.py --list
    TRITON_INTERPRET=0 python tests/kernels/compile_kernels.py --write

The first (--all: of every entry, --gluon: of those in Gluon that a second Triton compiles in CI) prints JSON:
{"triton": version, "found": {name: {"shared": bytes a block, "registers": a thread, "spills": bytes stored,
"serialised": [codes], "late": exponentials under no product, "over_barriers": words of shared memory that are a barrier
first and something else later, both of Gluon kernels}}}, all but the first for sm_90. --write takes everything down for
the installed Triton in the list that tests compare with (compile_list.py); for another Triton: `pip install --no-deps
--target folder triton==X.Y.Z`, and the same with PYTHONPATH=folder. What was measured is stored in Triton's cache
folder, for the same Triton, kernel and arguments.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from s2_megatron.kernels.compile_options import OPTIONS
from s2_megatron.kernels.tiles import tiles_for
from s2_megatron.kernels.triton.key_kernels import s2_backward_dkdv_kernel
from s2_megatron.kernels.triton.query_kernels import s2_delta_kernel, s2_forward_kernel, s2_grad_query_kernel
from tests.kernels import compile_list, shared_memory

INT64 = ("row_starts_ptr", "column_starts_ptr")
INT32 = (
    "ranges_ptr",
    "key_blocks_ptr",
    "query_blocks_ptr",
    "starts_ptr",
    "lengths_ptr",
    "query_ids_ptr",
    "query_rank_ptr",
    "slot_ptr",
)
INT32 += ("tokens_ptr", "counters_ptr", "run_index_ptr", "run_prefix_ptr", "run_slots_ptr")


@dataclass(frozen=True)
class Entry:
    """One kernel as it is compiled. signature: the Triton type of each argument, "constexpr" for constants (a Gluon
    kernel's descriptors as "tensordesc<bf16[64, 128],layout>"). attributes: {(position,): [["tt.divisibility", 16]]}.
    options: num_warps, num_stages, ..."""

    kernel: object
    capability: int
    signature: dict[str, str]
    constants: dict[str, object]
    attributes: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)


def compiled(entry: Entry):
    source = ASTSource
    if entry.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source
    names = entry.kernel.arg_names
    constants = {(names.index(name),): value for name, value in entry.constants.items()}
    ast = source(fn=entry.kernel, signature=entry.signature, constexprs=constants, attrs=entry.attributes)
    return triton.compile(ast, target=GPUTarget("cuda", entry.capability, 32), options=entry.options)


def stored_place(entry: Entry):
    """Where in Triton's cache folder the needs of an entry are stored."""
    readers = [Path(file).read_text() for file in (__file__, shared_memory.__file__)]
    known = [*readers, triton.__version__, entry.kernel.cache_key, entry.capability]
    known += [sorted(entry.signature.items()), sorted((name, repr(value)) for name, value in entry.constants.items())]
    known += [sorted(entry.attributes.items()), sorted(entry.options.items())]
    return get_cache_manager(hashlib.sha256(repr(known).encode()).hexdigest())


def measured(name: str) -> dict:
    """What an entry needs, by its compiled metadata and, for sm_90, by ptxas."""
    entry = entries()[name]
    place = stored_place(entry)
    stored = place.get_file("needs.json")
    if stored:
        return json.loads(Path(stored).read_text())
    found = compile_and_measure(entry)
    place.put(json.dumps(found), "needs.json", binary=False)
    return found


def compile_and_measure(entry: Entry) -> dict:
    said = io.StringIO()
    if entry.capability == 90:  # compiled anew, for ptxas speaks only then
        triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(said):
        kernel = compiled(entry)
    found = {"shared": kernel.metadata.shared}
    if entry.capability != 90:
        return found
    text = said.getvalue()
    found["registers"] = max(int(number) for number in re.findall(r"Used (\d+) registers", text))
    found["spills"] = sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", text))
    found["serialised"] = sorted(set(re.findall(r"C75\d\d", text)))  # wgmma that ptxas made wait for each other
    if entry.kernel.is_gluon():
        found["late"] = late_exponentials(kernel.asm["cubin"])
        found["over_barriers"] = shared_memory.barriers_overwritten(kernel.asm["ptx"])
    return found


def late_exponentials(cubin: bytes) -> int:
    """Exponentials in the machine code while no product is in flight: every one of a masked step, and those that ptxas
    moved behind a wait."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Without the analysis of the data flow, which only names the targets of jumps.
        command = [triton.knobs.nvidia.nvdisasm.path, "--print-code", "--no-dataflow", file.name]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    late, in_flight = 0, False
    for found in re.finditer(r"\bHGMMA\b|\bWARPGROUP\.DEPBAR\.LE gsb0, 0x0\b|\bMUFU\.EX2\b", code):
        if found[0] == "MUFU.EX2":
            late += not in_flight
        else:
            in_flight = found[0] == "HGMMA"
    return late


# Kernels in plain Triton

PORTABLE = {
    "forward": s2_forward_kernel,
    "dq": s2_grad_query_kernel,
    "dkdv": s2_backward_dkdv_kernel,
    "delta": s2_delta_kernel,
}
ROLES = tuple(PORTABLE)
VARIANTS = {
    "": {},
    "packed": dict(PACKED=True),
    "mask": dict(TABLE=True, N_RANGES=1, EFFICIENT=False),
    "placed": dict(QUERY_IDS=True, KEY_SLOT=True, RUNS=True, CONTINUE=True),
    "uneven": dict(EFFICIENT=False),
    "counters": dict(COUNTERS=True),
    "tokens": dict(TOKENS=True),
}
ONE_ROLE = {"uneven": "dkdv", "counters": "delta"}


def kind_of(name: str, dtype: str) -> str:
    """The Triton type of a kernel's argument."""
    if not name.endswith("_ptr"):
        return "fp32" if name == "scale" else "i32"
    if name in INT64:
        return "*i64"
    if name in INT32:
        return "*i32"
    return "*fp32" if any(word in name for word in ("lse", "delta", "clear")) else f"*{dtype}"


def portable_entry(capability: int, role: str, dim: int, dtype: str, variant: str = "") -> Entry:
    """A portable kernel for blocks of 64, with aligned pointers and strides."""
    fp32, flags = dtype == "fp32", VARIANTS[variant]
    share = 1 if variant in ("mask", "uneven") else 2
    tiles = dict(zip(("forward", "dq", "dkdv"), tiles_for(dim, fp32, 64, share, divmod(capability, 10))))
    known = dict(N_RANGES=2, TABLE=False, TOKENS=False, PACKED=False, QUERY_IDS=False, KEY_SLOT=False, RUNS=False,
                 HEAD_GROUP=4, BLOCK=64, HEAD_DIM=dim, BLOCK_D=dim, IEEE=fp32, EFFICIENT=True, RATIO=1, CONTINUE=False,
                 ROWS=64, GRAD_LSE=True, CLEAR=False, COUNTERS=False)  # fmt: skip
    known.update(flags)
    options = dict(OPTIONS)
    if role in tiles:
        tile = tiles[role]
        known.update(TILE_M=tile.rows, TILE_N=tile.columns, STAGES=tile.stages)
        options.update(num_warps=tile.warps, num_stages=tile.stages)
    known["CONTINUE"] &= role == "forward"
    kernel = PORTABLE[role]
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in known or (name.startswith("stride_") and name.endswith("d")):
            signature[name], constants[name] = "constexpr", known.get(name, 1)
            continue
        signature[name] = kind_of(name, dtype)
        aligned = name.endswith("_ptr") or name.startswith("stride_")
        if aligned and not parameter.do_not_specialize and not parameter.do_not_specialize_on_alignment:
            attributes[(position,)] = [["tt.divisibility", 16]]
    return Entry(kernel, capability, signature, constants, attributes, options)


def portable_entries() -> dict[str, Entry]:
    shapes = [(card, dim, "bf16") for card in (80, 86) for dim in (64, 128, 256)]
    shapes += [
        (86, 32, "bf16"),
        (86, 32, "fp32"),
        (86, 64, "fp32"),
        (86, 128, "fp32"),
        (86, 256, "fp32"),
        (80, 256, "fp32"),
    ]
    shapes += [
        (89, 128, "bf16"),
        (100, 128, "bf16"),
        (120, 128, "bf16"),
        (120, 256, "bf16"),
        (90, 64, "bf16"),
        (90, 256, "bf16"),
    ]
    wanted = [(card, role, dim, dtype, "") for card, dim, dtype in shapes for role in ROLES[:3]]
    wanted += [
        (90, role, 128, "bf16", variant)
        for variant in VARIANTS
        for role in ([ONE_ROLE[variant]] if variant in ONE_ROLE else ROLES[:3])
    ]
    wanted += [(90, "delta", 128, "bf16", "")]
    return {
        "-".join(filter(None, (f"sm{card}", *map(str, rest)))): portable_entry(card, *rest) for card, *rest in wanted
    }


# Kernels in Gluon: as they are launched


def hopper_entries() -> dict[str, Entry]:
    """What s2_attention launches on Hopper for 8K tokens, 4 KV groups: by head dim, packed, in deterministic mode, for
    a block mask, and for a window and a sink in tokens ("listed": of larger blocks); and what context parallelism
    launches for its own keys, for those in slots, and for both at once. All of it without and with columns of
    dK and dV in parts. Up to head dim 128 also with a KV head for each query head ("alone"), i.e. two query blocks in a
    tile."""
    from benchmarks.cases import as_table
    from s2_megatron.context_parallel.exchange import slot_views
    from s2_megatron.kernels.hopper import launch as hopper
    from s2_megatron.ops import parts as op
    from s2_megatron.ops.call import AttentionCall
    from s2_megatron.ops.layout import PackedSequence, Placement, build_layout
    from s2_megatron.patterns.ranges import make_range_pattern
    from tests.kernels.record_launches import believe_in_hopper, record_launches

    believe_in_hopper()
    launches, found = record_launches(), {}
    pattern = make_range_pattern(block_size=64, num_heads=8, num_kv_heads=4, ranges=((16, 1), (None, 16)))
    one_each = make_range_pattern(block_size=64, num_heads=4, num_kv_heads=4, ranges=((16, 1), (None, 16)))
    shape = dict(num_heads=8, num_kv_heads=4, window=1000, sink_tokens=4)
    tokens = make_range_pattern(block_size=64, ranges=((None, 16),), **shape)
    tokens_of_128 = make_range_pattern(block_size=128, ranges=((None, 8),), **shape)
    packed = PackedSequence(torch.tensor([0, 5000, 8192], dtype=torch.int32), 5000)

    def take(*words):
        for launch in launches:
            kernel = launch.kernel.fn.__name__.removeprefix("s2_").removesuffix("_kernel").replace("_", "-")
            if kernel.startswith("hopper-"):
                name = "-".join(filter(None, ("sm90", kernel, *words)))
                found.setdefault(launch.variant, (name, launch))  # the deterministic mode shares what it can
        launches.clear()

    for parts, few in (("", 0), ("parts", hopper.FEW_UNITS)):
        hopper.FEW_UNITS = few
        # Layouts store what is launched.
        ranges, mask, alone = build_layout(pattern), build_layout(as_table(pattern, 8192)), build_layout(one_each)
        by_token, by_token_128 = build_layout(tokens), build_layout(tokens_of_128)
        for dim in (64, 128, 256):
            shapes = [(8192, 1, heads, dim) for heads in (8, 8, 8, 4, 4)]
            query, out, grad, key, value = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
            kinds = [("", ranges, None), ("packed", ranges, packed), ("mask", mask, None)]
            kinds += [("tokens", by_token, None)] + ([("tokens-listed", by_token_128, None)] if dim == 128 else [])
            for word, layout, documents in [*kinds, ("alone", alone, None)] if dim <= 128 and not parts else kinds:
                tensors = query, key, value, grad, out
                if word == "alone":
                    tensors = [tensor[:, :, :4] for tensor in tensors]
                if documents is not None:
                    tensors = [tensor.squeeze(1) for tensor in tensors]
                for deterministic in (False, True):
                    call = AttentionCall(
                        layout, 0.1, "thd" if documents else "sbhd", documents, None, "gluon", deterministic
                    )
                    _, lse = op.attention_forward(*tensors[:3], call)
                    op.attention_backward(tensors[3], None, *tensors[:3], tensors[4], lse, call)
                    take(str(dim), "bf16", word, parts, "deterministic" if deterministic else "")
            # Even blocks are this rank's, odd ones lie in slots.
            for word, present in (("own", 0), ("slots", 1)):
                slots = torch.full((4, 256), -1)
                slots[:, present::2] = torch.arange(128) if word == "own" else torch.arange(512).view(4, 128)
                placement = Placement.make(range(0, 256, 2), 256, slots, "cpu", ranges.pattern)
                call = AttentionCall(ranges, 0.1, "sbhd", None, placement, "gluon", False)
                returned = None
                if word == "own":
                    keys = grads = (key, value)
                    order = torch.arange(513, dtype=torch.int32)
                    returned = (torch.empty(512, 64, 2, 1, dim, dtype=torch.bfloat16), order, order)
                    out_float, dq, lse = query.float(), query.float(), op.empty_lse(query, "sbhd")
                    op.attention_forward(query, *keys, call, into=(out_float, lse))
                    op.attention_backward_dq(grad, query, *keys, lse, lse, call, into=dq)
                else:
                    buffer = torch.empty(512, 64, 2, 1, dim, dtype=torch.bfloat16)
                    grads = keys = slot_views(buffer, 4)
                    op.attention_forward(query, *keys, call, initial=(out_float, lse))
                    op.attention_backward_dq(grad, query, *keys, lse, lse, call, initial=dq)
                op.attention_backward_dkdv(grad, query, *keys, lse, lse, *grads, call, returned)
                take(str(dim), "bf16", word, parts)
            joined = torch.arange(256).expand(4, -1) // 2 + torch.tensor([0, 128]).repeat(128)
            placement = Placement.make(range(0, 256, 2), 256, joined, "cpu", ranges.pattern, own_slots=128)
            both = dict(kv_heads=(1, 4), more=keys)
            op.attention_forward(query, key, value, call._replace(placement=placement), **both)
            op.attention_backward_dq(grad, query, key, value, lse, lse, call._replace(placement=placement), **both)
            take(str(dim), "bf16", "joined", parts)
            # All keys are at hand, and the gradients of all are wanted in fp32.
            placement = Placement.make(range(0, 256, 2), 256, None, "cpu", ranges.pattern)
            keys = [torch.empty(16384, 1, 4, dim, dtype=torch.bfloat16)] * 2
            op.attention_backward_dkdv(
                grad, query, *keys, lse, lse, *[keys[0].float()] * 2, call._replace(placement=placement)
            )
            take(str(dim), "bf16", "gathered", parts)
    return {
        name: Entry(launch.kernel, 90, launch.signature, launch.constants, launch.attributes, launch.options)
        for name, launch in found.values()
    }


def for_a_second_triton() -> list[str]:
    """Names of Gluon kernels that are enough for a second version of Triton: every kernel and every way to use it at
    the head dims 128 and 256, and at 64 and with columns in parts the plain ones."""
    found = []
    for name in entries():
        kernel, _, ways = name.removesuffix("-deterministic").partition("-bf16")
        if name.startswith("sm90-hopper-") and (
            ways in ("", "-parts") or not (kernel.endswith("-64") or ways.endswith("-parts"))
        ):
            found.append(name)
    return found


@cache
def entries() -> dict[str, Entry]:
    """Everything that is compiled in tests, by name; the name begins with the architecture."""
    return portable_entries() | hopper_entries()


def measure(names) -> dict[str, dict]:
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(measured, names)))


def version() -> str:
    """Major and minor number of the installed Triton, whose wheel brings its own ptxas."""
    return ".".join(triton.__version__.split(".")[:2])


def main(arguments):
    if arguments == ["--list"]:
        print("\n".join(entries()))
    elif arguments == ["--write"]:
        compile_list.write(version(), measure(list(entries())))
    else:
        groups = {"--all": entries, "--gluon": for_a_second_triton}
        names = list(groups[arguments[0]]()) if arguments[0] in groups else arguments
        print(json.dumps({"triton": version(), "found": measure(names)}))


if __name__ == "__main__":
    main(sys.argv[1:])
