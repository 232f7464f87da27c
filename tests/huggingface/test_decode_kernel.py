"""The decoding kernel, through Triton's interpreter where there is no GPU: against fp64, against SDPA over the same
cache, and compiled for cards that are not there."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from s2_megatron.huggingface import CACHE_ARGUMENT, S2Cache, decode_kernel
from s2_megatron.huggingface.attention import attend, rotated
from s2_megatron.huggingface.decode_kernel import DecodePlan, Kept, decode, plan_for, split_sizes
from s2_megatron.patterns.ranges import RangePattern
from tests.huggingface.tiny import BLOCK, HEADS, KV_HEADS, NAMES, config_of, model_of, plan_of, sparsity_named, tokens
from tests.kernels.test_compile import LIMITS
from tests.processes import found_by
from tests.tiers import mostly_slow

SMALL = DecodePlan(tile=16, stages=1, warps=4, programs=16)  # several splits of a few tokens


def random_kept(heads, kept: int, sizes, dtype, device="cpu", by_query_head: int = 1, generator=None) -> Kept:
    """A group of KV heads [K] of two rows with room behind S tokens, of which a third is attended, but none of a row's
    last head's and nothing in the second half of the first head's. sizes: (D, V)."""
    shape = (2, len(heads))
    keys, values = (torch.randn(*shape, kept + 8, size, generator=generator) for size in sizes)
    shown = torch.rand(*shape, by_query_head, kept, generator=generator) < 0.3
    shown[:, 0, :, kept // 2 :] = False
    shown[1, -1] = False
    place = torch.stack([torch.randint(kept // 2, (2, 1), generator=generator) for _ in range(3)], -1)
    keys, values = keys.to(dtype).to(device), values.to(dtype).to(device)
    return Kept(keys, values, shown.to(device), place.to(device), torch.tensor(heads, device=device))


def expected_step(query, key, value, groups: list[Kept], scale: float, offset=None):
    """(out [B, H, 1, V], LSE [B, H, 1]) in fp64 of a step that writes key and value first. A row without a key has out
    0, and -inf or the offset for its LSE."""
    query, key, value = (tensor.double().cpu() for tensor in (query, key, value))
    (batch, heads), ratio = query.shape[:2], query.shape[1] // key.shape[1]
    out, lse = torch.zeros(batch, heads, 1, value.shape[3]).double(), torch.zeros(batch, heads, 1).double()
    for group in groups:
        for index, kv_head in enumerate(group.heads.tolist()):
            for row in range(batch):
                keys, values = (store[row, index].double().cpu() for store in (group.keys, group.values))
                places = group.place.cpu().expand(batch, len(group.heads), -1)[row, index]
                keys[places], values[places] = key[row, kv_head, 0], value[row, kv_head, 0]
                shown = group.shown.cpu().expand(batch, len(group.heads), ratio, -1)[row, index]
                for head, seen in zip(range(kv_head * ratio, (kv_head + 1) * ratio), shown):
                    scores = (keys[: len(seen)] @ query[row, head, 0] * scale)[seen]
                    extra = scores.new_empty(0) if offset is None else offset[head].double().cpu()[None]
                    lse[row, head] = torch.cat([scores, extra]).logsumexp(0)
                    if seen.any():
                        out[row, head] = (scores - lse[row, head]).exp() @ values[: len(seen)][seen]
    return out, lse


def step(dims, dtype, group, device, generator):
    """query, key, value of two rows and three KV heads, strided as projections are."""
    sizes = ((3 * group, dims[0]), (3, dims[0]), (3, dims[1]))
    return [torch.randn(2, 1, *size, generator=generator).to(dtype).to(device).transpose(1, 2) for size in sizes]


CASES = [  # (D, V), query heads of a KV head, shown by query head, offset, plan
    ((64, 64), 4, False, False, SMALL),
    ((64, 64), 1, False, True, SMALL),
    ((128, 128), 2, True, True, SMALL),
    ((128, 72), 4, False, False, DecodePlan(32, 1, 4, 4)),
    ((256, 256), 2, False, True, SMALL),
    ((24, 40), 17, True, False, SMALL),
    ((64, 64), 4, True, True, DecodePlan(64, 1, 4, 1)),  # a group in one split
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_out_and_lse_against_fp64(case, dtype, device):
    dims, group, by_query_head, with_offset, plan = case
    generator = torch.Generator().manual_seed(0)
    parts = step(dims, dtype, group, device, generator)
    rows = group if by_query_head else 1
    groups = [
        random_kept(heads, kept, dims, dtype, device, rows, generator) for heads, kept in (([1], 208), ([0, 2], 80))
    ]
    before = [(kept.keys.clone(), kept.values.clone()) for kept in groups]
    offset = torch.randn(3 * group, generator=generator).to(device) if with_offset else None
    expected = expected_step(*parts, groups, 0.2, offset)
    out, lse = decode(*parts, groups, 0.2, None, offset, plan)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert (out.double().cpu() - expected[0]).abs().max() < (2e-6 if dtype == torch.float32 else 2e-3)
    found, wanted = lse.double().cpu(), expected[1]
    assert torch.equal(found.isinf(), wanted.isinf()) and wanted.isinf().any() == (offset is None)
    finite = wanted.isfinite()
    assert (found - wanted)[finite].abs().max() < 8 * torch.finfo(torch.float32).eps * wanted[finite].abs().max()
    for kept, stores in zip(groups, before):  # the new token is in its places, and nothing else has changed
        for now, then, new in zip((kept.keys, kept.values), stores, parts[1:]):
            place = kept.place.expand(2, len(kept.heads), -1)[..., None].expand(-1, -1, -1, now.shape[3])
            then.scatter_(2, place, new[:, kept.heads].expand(-1, -1, 3, -1))
            assert torch.equal(now, then)
    for _ in range(2):
        assert torch.equal(
            torch.cat([out.flatten(), lse.flatten()]),
            torch.cat([part.flatten() for part in decode(*parts, groups, 0.2, None, offset, plan)]),
        )


@pytest.mark.parametrize(
    "kinds",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float16, torch.float16, torch.float16),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float16),
    ],
    ids=str,
)
def test_rope_in_the_kernel_is_the_models(kinds, device):
    """Rounded where transformers rounds: in 16 bits the new key has the same bits. Angles by row, or one for all. With
    an fp32 query (autocast) the cache rounds once; angles of fewer bits take none off it. kinds: dtypes of the cache,
    of query and key, of the angles."""
    generator = torch.Generator().manual_seed(0)
    dtype, given, of_angles = kinds
    query, key, value = step((64, 64), dtype, 4, device, generator)
    query, key = query.to(given), key.to(given)
    for rows in (1, 2):
        angles = torch.rand(rows, 1, 32, generator=generator).repeat(1, 1, 2).to(device)
        rotary = tuple(part.to(of_angles) for part in (angles.cos() * 1.1, angles.sin() * 1.1))
        both = rotated(query.transpose(1, 2), key.transpose(1, 2), rotary)
        turned = [part.to(dtype).transpose(1, 2) for part in both]
        one, two = (
            [random_kept([0, 1, 2], 48, (64, 64), dtype, device, 1, torch.Generator().manual_seed(1))] for _ in range(2)
        )
        out, _ = decode(query, key, value, one, 0.2, rotary, None, SMALL)
        expected, _ = decode(*turned, value, two, 0.2, None, None, SMALL)
        bound = 2e-6 if dtype == given == torch.float32 else 0 if given == torch.float16 else 1e-3
        assert (out - expected).abs().max() <= bound and (one[0].keys - two[0].keys).abs().max() <= bound


def test_what_is_not_attended_is_not_read(device):
    """Behind the last tile with an attended token, and before the first one, lies NaN."""
    generator = torch.Generator().manual_seed(0)
    parts = step((64, 64), torch.float32, 4, device, generator)
    kept = random_kept([0, 1, 2], 160, (64, 64), torch.float32, device, 1, generator)
    kept.shown[:] = False
    kept.shown[..., 40:60] = True
    kept.place[:] = 50
    for store in (kept.keys, kept.values):
        store[:, :, :32], store[:, :, 64:] = float("nan"), float("nan")
    for plan in (SMALL, DecodePlan(16, 1, 4, 1)):
        assert decode(*parts, [kept], 0.2, None, None, plan)[0].isfinite().all()


@pytest.mark.parametrize("kept, heads", [(16, 1), (16, 8), (9216, 8), (131072, 8), (131072, 32), (9216, 4000), (80, 1)])
def test_splits_cover_what_is_kept(kept, heads):
    for plan in (plan_for(64, 2, 16), plan_for(128, 2, 64), plan_for(256, 4, 16), SMALL):
        size, count = split_sizes(kept, heads, plan, 132)
        assert size % plan.tile == 0 and (count - 1) * size < kept <= count * size
        assert 1 <= count <= decode_kernel.MOST_SPLITS and (count == 1 or (count - 1) * heads < plan.programs * 132)


@pytest.mark.parametrize(
    "name, layer, offset",
    mostly_slow(
        [
            (name, layer, offset)
            for name in NAMES
            for layer in (0, 1)
            for offset in (False, True)
            if layer or name == "s2"
        ],
        ("s2", 0, False),
        ("s2", 1, False),
        ("dense_heads", 1, True),
        ("tokens_by_head", 1, False),
        ("mask_heads", 1, False),
    ),
)
def test_every_step_equals_the_full_attention(name, layer, offset, device, monkeypatch):
    """Steps over a border of blocks behind a prefill, rows of unequal length; layer 0 is dense. And SDPA's steps."""
    monkeypatch.setattr(decode_kernel, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(decode_kernel, "plan_for", lambda *sizes: SMALL)
    sparsity, generator, prompt, total = sparsity_named(name), torch.Generator().manual_seed(0), 133, 133 + BLOCK + 4
    starts, pattern = torch.tensor([0, 37]), sparsity.layers[layer].pattern
    parts = [torch.randn(2, count, total, 16, generator=generator).to(device) for count in (HEADS, KV_HEADS, KV_HEADS)]
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], device=device) if offset else None
    config, found = config_of(sparsity, softmax_type="learnable" if offset else "vanilla"), {}
    for backend in ("reference", "triton"):
        cache = S2Cache(config, max_length=total, decode_backend=backend)
        cache.layers = [cache.layers[layer]]
        pieces = [(0, prompt), *((at, at + 1) for at in range(prompt, total))]
        out = [
            cache.attend(0, *(part[:, :, first:end] for part in parts), starts, 0.3, pattern, sinks)
            for first, end in pieces
        ]
        found[backend] = torch.cat(out[1:], 2)
    found = {backend: out.cpu() for backend, out in found.items()}
    assert (found["triton"] - found["reference"]).abs().max() < (2e-6 if device == "cpu" else 2e-3)  # TF32 in SDPA
    whole = RangePattern.dense(BLOCK, HEADS, KV_HEADS) if offset and pattern is None else pattern
    for row, start in enumerate(starts.tolist()):
        texts = (part[row : row + 1, :, start:].cpu().double() for part in parts)
        expected = attend(*texts, whole, 0.3, None if sinks is None else sinks.cpu().double())
        assert (found["triton"][row] - expected[0, :, prompt - start :]).abs().max() < 2e-6


@pytest.mark.parametrize("more", [{}, dict(softmax_type="learnable", qk_norm=True)], ids=str)
def test_the_model_generates_the_same(more, device):
    """RoPE in the kernel, padding, a growing cache, two patterns whose places and masks are computed together; and as
    with the full cache."""
    model, text = model_of(plan_of("dense_heads", "DSS"), **more).to(device), tokens(2, 60).to(device)
    mask = torch.ones_like(text)
    mask[1, :13] = 0
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, output_logits=True)
    with sdpa_kernel(SDPBackend.MATH):  # on a GPU the others compute in TF32
        one, two = (
            model.generate(
                text,
                **options,
                return_dict_in_generate=True,
                **{CACHE_ARGUMENT: S2Cache(model.config, decode_backend=backend)},
            )
            for backend in ("reference", "triton")
        )
        full = model.generate(text, **options, cache_implementation="dynamic")
    assert torch.equal(one.sequences, two.sequences) and torch.equal(one.sequences, full)
    assert torch.allclose(torch.stack(one.logits), torch.stack(two.logits), atol=1e-4 if device == "cpu" else 1e-3)


class Launches(TorchDispatchMode):
    """By layer (the number of the one that computes, or -1) what a GPU would launch: every op that is neither a view
    nor an allocation, and the decoding kernels, which do not run."""

    def __init__(self, model, monkeypatch):
        super().__init__()
        self.layer, self.found = -1, [Counter() for _ in range(len(model.model.layers) + 1)]
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(lambda *_, number=number: setattr(self, "layer", number))
            layer.register_forward_hook(lambda *_: setattr(self, "layer", -1))
        for name in ("s2_decode_kernel", "s2_decode_join_kernel"):
            monkeypatch.setattr(decode_kernel, name, Recorded(lambda name=name: self.count(name)))

    def count(self, name: str) -> None:
        self.found[self.layer][name] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = [value.alias_info for value in func._schema.returns]
        view = returns and all(alias is not None and not alias.is_write for alias in returns)
        if not view and not any(word in func._schema.name for word in ("empty", "view", "promote_types")):
            self.count(str(func))
        return func(*args, **(kwargs or {}))


class Recorded:
    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launched()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("name", ["s2", "dense_heads", "tokens_by_head"])
def test_a_sparse_layer_launches_as_much_as_a_dense_one(name, backend, monkeypatch):
    """Where a token goes and what it attends is computed in the first layer, once for all patterns: these differ in
    their residues. A group of KV heads has its own attention. What is computed reads nothing from the host."""
    monkeypatch.setattr(decode_kernel, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(decode_kernel, "plan_for", lambda *sizes: SMALL)
    in_first = []
    for plan in ("DDS", "DDSSSS"):
        sparsity = plan_of(name, plan)
        assert len({layer.pattern for layer in sparsity.layers}) == len(plan) - 1
        model = model_of(sparsity)
        cache = S2Cache(model.config, max_length=256, decode_backend=backend)
        counted = Launches(model, monkeypatch)
        with torch.no_grad():
            model(tokens(1, 130), **{CACHE_ARGUMENT: cache})
            assert all(joined.slots._tables for joined in cache._joined)  # a captured step cannot copy them
            with counted:
                model(tokens(1, 1), **{CACHE_ARGUMENT: cache})
        first, dense, *sparse, _ = counted.found
        groups = len(cache.layers[-1].groups)
        kernels = Counter(s2_decode_kernel=1, s2_decode_join_kernel=1) if backend == "triton" else Counter()
        assert kernels <= dense and all(layer == sparse[0] for layer in sparse)
        if groups == 1:
            assert sparse[0] == dense
        else:
            assert all(sparse[0][kernel] == groups for kernel in kernels)
            assert sum((sparse[0] - dense).values()) <= 12 * (groups - 1)
        in_first.append(first - dense)
    assert in_first[0] == in_first[1]
    assert name != "s2" or sum(in_first[0].values()) <= (40 if backend == "triton" else 48)


def test_refused_backends(device):
    config = config_of(sparsity_named("s2"))
    with pytest.raises(ValueError, match="decode_backend='gluon'; expected one of auto, triton, reference; use auto"):
        S2Cache(config, decode_backend="gluon")
    wrong = [
        (torch.float64, 16, "dtype torch.float64, expected one of"),
        (torch.float32, 264, "head dim 264, expected 256"),
    ]
    for dtype, dim, message in wrong:
        cache = S2Cache(config, decode_backend="triton")
        cache.layers = cache.layers[1:]
        parts = [torch.zeros(1, count, 1, dim, dtype=dtype, device=device) for count in (HEADS, KV_HEADS, KV_HEADS)]
        with pytest.raises(ValueError, match=message):
            cache.attend(0, *parts, None, 0.3, cache.layers[0].pattern)


def test_a_cpu_takes_the_reference():
    """In a process without the interpreter."""
    code = """
import torch
from s2_megatron.huggingface.decoding import takes_kernel
assert not takes_kernel("auto", "cpu", torch.float32, 16)
try:
    takes_kernel("triton", "cpu", torch.float32, 16)
except ValueError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert "decode_backend=triton: device cpu, expected a GPU; use decode_backend=auto or reference" in done.stdout, (
        done
    )


@pytest.mark.slow
def test_it_compiles_for_cards_that_are_not_there():
    """Within their shared memory; without a spill in 16 bits, and with its loads in a pipeline (the shared memory of a
    loop without one is a third)."""
    found = found_by(Path(__file__).with_name("compile_decode.py"), TRITON_INTERPRET="0")
    assert {int(name.partition("-")[0][2:]) for name in found} == set(LIMITS)
    assert {
        name: needs for name, needs in found.items() if needs["shared"] > LIMITS[int(name.partition("-")[0][2:])]
    } == {}
    narrow = {name: needs for name, needs in found.items() if name.startswith("sm90-") and "fp32" not in name}
    # By Triton 3.9 alone.
    known = {f"sm90-{kernel}-256-256-bf16-one_kv_head": 24 for kernel in ("decode", "whole")}
    assert {name: needs for name, needs in narrow.items() if needs["spills"] > known.get(name, 0)} == {}
    walks = {name: needs["shared"] for name, needs in narrow.items() if "join" not in name}
    assert len(walks) > 10 and min(walks.values()) > 48 * 1024
