"""Files that are too large, too deep, broken or misread end in one short line, soon and without large memory."""

import io
import os
import re
import struct
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s2_megatron.config.errors import ConfigError, printable
from s2_megatron.config.load import SparsityConfig, load_config
from s2_megatron.config.mask_file import read_mask
from s2_megatron.tools import commands
from tests.config.test_config import MODEL, resolve

SPEC = "layers: S\nspecs: {{S: {{local_blocks: 2, {}}}}}\n"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)

# (YAML as text or bytes, words of the message), whatever the model is.
BAD_FILES = {
    "alias bomb": (BOMB, ["aliases", "at most 32,768 values"]),
    "merge bomb": ("a: &a {x: 1, y: 2}\n" + "".join(
        f"{new}: &{new} [{{<<: *{old}}},{{<<: *{old}}}]\n" for old, new in zip("abcdefgh", "bcdefghi")),
        ["expected"]),
    "nested brackets": ("layers: " + "[" * 5000, ["more than 20 levels of nesting", "line 1"]),
    "nested mappings": ("a: {" * 3000, ["more than 20 levels"]),
    "a million entries": ("layers: [" + "S," * 1_000_000 + "]", ["more than 65,536 bytes", "a plan that tiles"]),
    "a long plan": ("layers: " + "S" * 5000, ["at most 4096 names"]),
    "a long list": ("layers: [" + "S," * 5000 + "]", ["at most 4096 names"]),
    "many unknown names": ("layers: [" + ",".join(f"s{i}" for i in range(4000)) + "]", ["and 15 more"]),
    "many unknown keys": ("".join(f"k{i}: 1\n" for i in range(5000)), ["and 4996 more"]),
    "a long key": ("x" * 1000 + ": 1\nlayers: D", ["unknown key"]),
    "a long value": ("layers: D\nblock_size: " + "y" * 60000, ["16, 32, 64 or 128"]),
    "many specs": ("layers: D\nspecs:\n" + "".join(f"  s{i}: {{local_blocks: 1}}\n" for i in range(1000)),
        ["at most 256"]),
    "control characters in a key": ('"\\e[31m\\x07red": 1\nlayers: D', ["\\x1b[31m\\x07red"]),
    "line break in a key": ('"a\\nb": 1\nlayers: D', ["a\\nb"]),
    "a surrogate": ('"\\ud800": 1\nlayers: D', ["\\ud800"]),
    "Latin-1": ("layers: D # caf\xe9".encode("latin-1"), ["text in UTF-8"]),
    "zero bytes": (b"layers: D\0", ["text in UTF-8"]),
    "an archive": (b"PK\x03\x04" + bytes(100), ["text in UTF-8"]),
    "octal": (SPEC.format("stride: 010"), ["010", "octal", "nearest valid: 10"]),
    "base 60": (SPEC.format("stride: 1:30"), ["1:30", "base 60"]),
    "yes": (SPEC.format("stride: yes"), ["yes", "true (boolean)", "unquoted"]),
    "off in a plan": ("layers: [D, off]", ["off", "false (boolean)"]),
    "a number of a hundred digits": (SPEC.format("stride: " + "9" * 100), ["100 characters"]),
    "a hexadecimal number": (SPEC.format("stride: 0x" + "f" * 60000), ["characters"]),
    "int tag": (SPEC.format("stride: !!int x"), ["fit their YAML tags"]),
    "empty int tag": (SPEC.format("stride: !!int ''"), ["fit their YAML tags"]),
    "bool tag": (SPEC.format("stride: !!bool x"), ["expected"]),
    "case only": ("layers: S\nspecs: {S: {local_blocks: 2}, s: {local_blocks: 3}}", ["beside S", "their case"]),
    "d": ("layers: d\nspecs: {d: {local_blocks: 2}}", ["dense spec D", "their case"]),
    "stride": (SPEC.format("stride: 16777217"), ["at most 16777216"]),
    "local_blocks": ("layers: S\nspecs: {S: {local_blocks: 1099511627777}}", ["at most 1099511627776"]),
    "local_tokens": ("layers: S\nspecs: {S: {local_tokens: 1125899906842624}}", ["at most 1099511627776"]),
    "head_step": (SPEC.format("head_step: 16777217"), ["at most 16777216"]),
    "layer_step": (SPEC.format("layer_step: 99999999999"), ["at most 16777216"]),
    "base_offset": (SPEC.format("base_offset: 16777217"), ["at most 16777216"]),
    "low base_offset": (SPEC.format("base_offset: -16777217"), ["-16777216 or more"]),
    "dense_heads": (SPEC.format("dense_heads: {last: 65537}"), ["at most 65536"]),
    "spread dense_heads": (SPEC.format("dense_heads: 65537"), ["at most 65536"]),
    "many ranges": ("layers: S\nspecs: {S: {ranges: [" + "{stride: 1}," * 65 + "]}}", ["at most 64"]),
    "stride in tokens": (SPEC.format("stride: 1024"), ["longer than the 16 blocks", "16, if 1024 was meant in tokens"]),
    "long stride": (SPEC.format("stride: 20000"), ["longer than the 16 blocks", "16, or a longer sequence"]),
    "long stride in a range": ("layers: S\nspecs: {S: {ranges: [{end_blocks: 2, stride: 1}, {stride: 17}]}}",
        ["specs.S.ranges[1].stride", "longer than the 16 blocks"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_one_short_error(write, case):
    content, words = BAD_FILES[case]
    path = write("")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    begin = time.process_time()
    with pytest.raises(ConfigError) as caught:
        resolve(path)
    assert time.process_time() - begin < 5
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert all(line.replace("\n", "").isprintable() for line in message.splitlines())
    assert all(len(line) < 900 for line in message.splitlines()) and len(message.splitlines()) < 8


@pytest.mark.parametrize("make, word", [
    (os.mkdir, "a folder"), (os.mkfifo, "a device or pipe"), (lambda path: None, "no such file"),
    (lambda path: path.symlink_to(path.name), "cannot be used"), (lambda path: path.symlink_to("/dev/zero"), "device"),
])  # fmt: skip
def test_what_is_no_file(tmp_path, write, make, word):
    make(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match=word):
        load_config(tmp_path / "x.yaml")
    make(tmp_path / "mask.npz")
    with pytest.raises(ConfigError, match="does not exist" if word == "no such file" else word):
        resolve(write("layers: S\nspecs: {S: {mask: mask.npz}}"))


@pytest.mark.parametrize("model, word", [
    ({"num_layers": 0}, "1 or more"), ({"num_heads": -1}, "1 or more"), ({"seq_length": 2**31}, "at most"),
    ({"num_layers": 10**9}, "at most 4096"), ({"num_layers": 4096, "num_heads": 4096}, "in all layers together"),
    ({"mtp_num_layers": -1}, "0 or more"), ({"seq_length": 8.0}, "an integer"), ({"num_kv_heads": True}, "an integer"),
])  # fmt: skip
def test_sizes_of_the_model_have_a_range(write, model, word):
    with pytest.raises(ValueError, match=word):
        load_config(write("layers: D")).resolve(**{**MODEL, **model})


@pytest.mark.parametrize("stride", [4096, 20000])
def test_long_strides_resolve_soon(write, stride):
    path = write(SPEC.format(f"stride: {stride}"))
    begin = time.process_time()
    resolve(path, seq_length=10 * 2**20)
    assert time.process_time() - begin < 3


def npy(array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def claim(shape) -> bytes:
    """An .npy with a header of this shape, and eight bytes."""
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + bytes(8)


INDPTR, INDICES = npy(np.arange(17)), npy(np.arange(16))
MASKS = {
    "empty file": b"",
    "text": b"hello",
    "truncated": None,
    "encrypted": None,
    "odd compression": None,
    "wrong checksum": None,
    "huge claim": (claim((10**13,)), INDICES),
    "huge claim of indices": (INDPTR, claim((10**13,))),
    "negative claim": (claim((-1,)), INDICES),
    "broken header": (b"\x93NUMPY\x01\x00\xff\xff{", INDICES),
    "header that is no dict": (b"\x93NUMPY\x01\x00\x03\x00[]\n", INDICES),
    "empty array file": (b"", INDICES),
    "scalar": (npy(np.int64(3)), INDICES),
    "no dimension left": (npy(np.zeros((1, 0), dtype=int)), INDICES),
    "three dimensions": (npy(np.zeros((1, 1, 17), dtype=int)), INDICES),
    "fractions": (INDPTR, npy(np.arange(16.0))),
    "pickled": (INDPTR, npy(np.array([{}], dtype=object))),
    "negative": (npy(np.arange(17) - 5), INDICES),
    "counts of 2^62": (npy(np.array([0, 2**62])), INDICES),
    "large unsigned": (npy(np.array([0, 2**64 - 1], dtype=np.uint64)), INDICES),
    "missing": (INDPTR, None),
    "text array": (npy(np.array(["a"])), INDICES),
}


def write_mask(path, kind):
    content = MASKS[kind]
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    parts = content or (INDPTR, INDICES)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2 if kind == "odd compression" else zipfile.ZIP_STORED) as archive:
        for name, part in zip(("indptr", "indices"), parts):
            if part is not None:
                archive.writestr(f"{name}.npy", part)
    raw = bytearray(path.read_bytes())
    if kind == "truncated":
        raw = raw[: len(raw) // 2]
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for found in re.finditer(re.escape(signature), bytes(raw)):
            if kind == "encrypted":
                raw[found.start() + offset] |= 1
            if kind == "odd compression":
                raw[found.start() + offset + 2] = 77
    if kind == "wrong checksum":
        at = raw.find(INDICES) + len(INDICES) - 3
        raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("kind", MASKS)
def test_broken_mask_is_one_line_and_allocates_little(write, tmp_path, kind):
    write_mask(tmp_path / "mask.npz", kind)
    path = write("layers: S\nspecs:\n  S: {mask: mask.npz}\n")
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"specs.S.mask \(line 3\): got .*cannot be read.*; expected .*") as caught:
        resolve(path)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 900


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(changes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=6), cut=st.booleans())
def test_flipped_bytes_are_a_valid_mask_or_one_error(tmp_path, changes, cut):
    np.savez_compressed(tmp_path / "mask.npz", indptr=np.arange(17), indices=np.arange(16))
    raw = bytearray((tmp_path / "mask.npz").read_bytes())
    for place, value in changes:
        raw[place % len(raw)] = value
    (tmp_path / "mask.npz").write_bytes(raw[: changes[0][0]] if cut else raw)
    try:
        indptr, indices = read_mask(tmp_path / "mask.npz", (1, 2, 8))
    except ValueError:
        return
    assert indptr.shape[1] > 1 and indices.ndim == 1


KEYS = st.sampled_from(["local_tokens", "local_blocks", "stride", "ranges", "slide", "head_step", "base_offset",
    "layer_step", "dense_heads", "mask", "other"])  # fmt: skip
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 4, 16, 64, 128, 1000, 1024, 4096, 20000, 2**24, 2**40, 2**63, 10**30])
VALUES = NUMBERS | st.booleans() | st.none() | st.text(max_size=6) | st.sampled_from(["auto", "paper", "kv", "query"])
RANGE = st.dictionaries(st.sampled_from(["end_tokens", "end_blocks", "stride"]), NUMBERS, max_size=3)
NESTED = VALUES | st.lists(RANGE | VALUES, max_size=3) | st.dictionaries(st.sampled_from(["last", "spread"]), NUMBERS)
WINDOW = st.fixed_dictionaries(
    {"local_blocks": st.integers(1, 20)},
    optional={
        "stride": NUMBERS, "head_step": NUMBERS, "base_offset": NUMBERS, "layer_step": NUMBERS, "dense_heads": NUMBERS
    },
)  # fmt: skip
CONFIGS = st.fixed_dictionaries(
    {"layers": st.sampled_from(["D", "S", "DS", "DSS"]) | VALUES},
    optional={
        "block_size": st.sampled_from([16, 64, 128]) | VALUES,
        "softmax_scale": st.floats() | VALUES,
        "specs": st.fixed_dictionaries({"S": WINDOW | st.dictionaries(KEYS, NESTED, max_size=4)}) | VALUES,
    },
)
FLAGS = st.fixed_dictionaries(
    {
        "--num-layers": st.sampled_from([1, 2, 6, 32]) | NUMBERS,
        "--num-attention-heads": st.sampled_from([1, 4, 32]) | NUMBERS,
        "--seq-length": st.sampled_from([1, 100, 1024, 8192, 10 * 2**20]) | NUMBERS,
    },
    optional={
        "--num-query-groups": st.sampled_from([1, 2, 4]) | NUMBERS,
        "--tensor-model-parallel-size": st.sampled_from([1, 2, 4]) | NUMBERS,
        "--context-parallel-size": st.sampled_from([1, 2]) | NUMBERS,
        "--mtp-num-layers": st.sampled_from([0, 1]) | NUMBERS,
    },
)


@pytest.mark.slow
@settings(
    max_examples=200, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
@given(config=CONFIGS, flags=FLAGS)
def test_inspect_ends_well_or_in_one_error(write, capsys, config, flags):
    path = write(yaml.safe_dump(config))
    arguments = [text for flag, value in flags.items() for text in (flag, str(value))]
    begin = time.process_time()
    try:
        status = commands.main(["inspect", str(path), *arguments])
    except SystemExit as stop:
        status = stop.code
    assert time.process_time() - begin < 10
    error = capsys.readouterr().err
    if status == 0:
        assert not error
    else:
        assert status == 2 and error.startswith("error: ") and error.count("error: ") == 1
        _, *others = error.rstrip("\n").split("\n")
        assert all(line.startswith("  ") for line in others) and len(error) < 4000


def test_printable_escapes_and_cuts():
    assert printable("a\x1b\n\u202e") == "a\\x1b\\n\\u202e"
    assert len(printable("x" * 1000)) == 60


def test_dense_at_this_length_is_noted(write, capsys):
    path = write("layers: S\nspecs: {S: {local_tokens: 1024, stride: 16}}\n")
    flags = ["--num-layers", "1", "--num-attention-heads", "2", "--seq-length", "1024"]
    assert commands.main(["inspect", str(path), *flags]) == 0
    assert "it is DENSE attention here; its window of 1024 tokens" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "spec, why",
    [
        (dict(window=1024), "its window of 1024 tokens is no shorter"),
        (dict(window=64, stride=1), "its strides are 1"),
        (dict(ranges=[dict(end_blocks=8, stride=1), dict(end_blocks=16, stride=1)]), "its strides are 1"),
        (
            dict(window=1023, sink_tokens=1),
            "all its heads are dense, or its window, strides and sink together leave out nothing",
        ),
        (dict(local_tokens=64, dense_heads=[0, 1]), "all its heads are dense, or its strides leave out nothing"),
        (dict(window=64, dense_heads=[0, 1]), "all its heads are dense, or its strides leave out nothing"),
    ],
)
def test_why_a_spec_is_dense(spec, why):
    config = SparsityConfig.from_data({"block_size": 64, "layers": "S", "specs": {"S": spec}})
    sparsity = config.resolve(num_layers=1, num_heads=2, num_kv_heads=2, seq_length=1024)
    assert sparsity.notes[0].endswith(f"DENSE attention here; {why}")
