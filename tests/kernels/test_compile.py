"""The kernels compile for every kind of GPU, their tiles fit into its shared memory, and on sm_90 they keep to a list
of registers, spills and serialised tensor-core instructions. Compiled, not run; and not compiled while the committed
list was measured of the same code with the same Triton (compile_list.py): then the list is what is tested."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from s2_megatron.kernels.trial import OLDEST
from tests.kernels import compile_list
from tests.kernels.shared_memory import barriers_overwritten
from tests.processes import found_by

pytestmark = pytest.mark.slow
# Shared memory a block may use, bytes (CUDA C++ programming guide, technical specifications per compute capability).
LIMITS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


def measure(*arguments, **environment):
    """(version of Triton, what was measured, by name): compiled in a process of its own, for this one may have Triton's
    interpreter."""
    script = Path(__file__).with_name("compile_kernels.py")
    result = found_by(script, *arguments, seconds=1200, **{"TRITON_INTERPRET": "0"} | environment)
    return result["triton"], result["found"]


def needs_of(release, *arguments, **environment):
    """(version of Triton, needs by name): as the list has them, or compiled now."""
    listed = compile_list.measured(release)
    return (release, listed) if listed is not None else measure(*arguments, **environment)


@pytest.fixture(scope="module")
def compiled():
    return needs_of(".".join(version("triton").split(".")[:2]), "--all")


@pytest.fixture(scope="module")
def oldest(compiled):
    """The same of the Gluon kernels, by the oldest Triton that they run on: most of them, where that is not the
    installed one."""
    release = ".".join(map(str, OLDEST))
    folder = Path(sys.prefix) / f"triton-{release}.x"
    if compiled[0] == release:
        found = compiled[1]
    elif compile_list.measured(release) is None and not folder.exists():
        pytest.skip(f"there is no Triton {release} in {folder}; scripts/make-venv.sh installs it there")
    else:
        found = needs_of(release, "--gluon", PYTHONPATH=str(folder))[1]
    return release, {name: needs for name, needs in found.items() if is_gluon(name)}


def test_every_architecture_is_there(compiled):
    assert {int(name.partition("-")[0][2:]) for name in compiled[1]} == set(LIMITS)


def is_gluon(name):
    return name.startswith("sm90-hopper-")


@pytest.mark.parametrize("capability", LIMITS)
def test_tiles_fit(capability, compiled):
    found = {name: needs["shared"] for name, needs in compiled[1].items() if name.startswith(f"sm{capability}-")}
    assert found
    assert {name: size for name, size in found.items() if size > LIMITS[capability]} == {}


def keeps_to_the_list(release, found, of_list):
    """No more registers, spills, serialised instructions or exponentials under no product than committed for this
    Triton. A change that means it takes the list down anew: `TRITON_INTERPRET=0 python tests/kernels/compile_kernels.py
    --write`."""
    committed = compile_list.read()
    if release not in committed:
        pytest.skip(f"there is no list for Triton {release}; make one with tests/kernels/compile_kernels.py --write")
    if compile_list.measured(release) is not None:
        pytest.skip(
            f"the list for Triton {release} was measured of these kernels; compiled again when their code changes"
        )
    listed = committed[release]["found"]
    missing = set(found) - set(listed) | {name for name in listed if of_list(name)} - set(found)
    assert not missing, "the list is of other kernels"
    for name, needs in found.items():
        worse = [key for key in ("registers", "spills", "late") if needs.get(key, 0) > listed[name].get(key, 0)]
        worse += [code for code in needs["serialised"] if code not in listed[name]["serialised"]]
        assert not worse, f"{name}: {needs}, in the list {listed[name]}"


def test_kernels_keep_to_the_list(compiled):
    release, found = compiled
    keeps_to_the_list(
        release,
        {name: needs for name, needs in found.items() if name.startswith("sm90-")},
        lambda name: name.startswith("sm90-"),
    )


def test_gluon_kernels_keep_to_the_list_of_the_oldest_triton(oldest):
    release, found = oldest
    assert len(found) > 30
    keeps_to_the_list(release, found, lambda name: False)


def portable(names):
    return {name for name in names if name.startswith("sm90-") and not is_gluon(name)}


def test_the_list_has_the_same_kernels_for_every_triton(compiled):
    for release, listed in compile_list.read().items():
        assert portable(listed["found"]) == portable(compiled[1]), (
            f"Triton {release}: take it down anew, see tests/kernels/compile_kernels.py"
        )


@pytest.mark.parametrize("which", ["compiled", "oldest"])
def test_gluon_kernels_compile(which, request):
    """Forward, dK/dV, dQ: also for packed documents, block masks, own and received keys of context parallelism; within
    shared memory."""
    _, found = request.getfixturevalue(which)
    for kernel in ("forward", "backward", "grad-query"):
        for variant in ("", "-packed", "-mask", "-own", "-slots"):
            assert (
                f"sm90-hopper-{kernel}-128-bf16{variant}" in found
                and f"sm90-hopper-d256-{kernel}-256-bf16{variant}" in found
            )
    assert {name: needs["shared"] for name, needs in found.items() if needs["shared"] > LIMITS[90]} == {}


@pytest.mark.parametrize("which", ["compiled", "oldest"])
def test_no_barrier_becomes_plain_memory(which, request):
    """dK and dV of columns in parts were wrong now and then while another process used the card: see the end of
    docs/validation.md."""
    _, found = request.getfixturevalue(which)
    gluon = {name: needs["over_barriers"] for name, needs in found.items() if is_gluon(name)}
    assert len(gluon) > 30 and {name: words for name, words in gluon.items() if words} == {}


BARRIER = """
    mov.b32 %r1, global_smem;
    add.s32 %r2, %r1, 1000;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 2;
    st.shared.v2.b32 [global_smem+2000], {0, 1};
"""


@pytest.mark.parametrize("ptx, found", [
    ("", []),
    ("st.shared.b32 [%r1+996], 1;", []),
    ("st.shared.b32 [%r1+1008], 1;", []),
    ("mbarrier.try_wait.parity.shared.b64 complete, [%r2], %r5;", []),
    ("@%p1 st.shared::cta.b32 [ %r2 + 0 ], %r4;", [1000]),
    ("ld.shared.b32 %r4, [global_smem+1004];", [1000]),
    ("st.shared.v4.b32 [%r1+992], {%r4, %r4, %r4, %r4};", [1000]),
    ("add.s32 %r3, %r2, 4;\n ld.volatile.shared.b32 %r5, [%r3];", [1000]),
    ("mbarrier.inval.shared::cta.b64 [%r2];\n st.shared.b32 [%r2], 1;", []),
])  # fmt: skip
def test_what_overwrites_a_barrier(ptx, found):
    assert barriers_overwritten(BARRIER + ptx) == found


@pytest.mark.parametrize("ptx", ["", "mbarrier.init.shared.b64 [%r9], 1;", BARRIER.partition("st.shared")[0]])
def test_unknown_ptx_is_not_taken_for_right(ptx):
    with pytest.raises(AssertionError, match="Triton's PTX is another than known"):
        barriers_overwritten(ptx)
