"""What the PTX of a kernel does with its shared memory."""

import re


def barriers_overwritten(ptx: str) -> list[int]:
    """Offsets in shared memory of barriers that the PTX initialises and then reads or writes as plain memory, by a
    constant address, as it does with the words that hand an atomic's result to all threads.

    Triton gives the memory of a barrier that nothing waits for to something else and leaves out `mbarrier.inval`, which
    PTX asks for first ("Parallel synchronization and communication instructions: mbarrier"). Addresses that depend on
    the thread are not looked at.
    """
    known = dict.fromkeys(["global_smem", *re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx)], 0)
    for register, base, offset in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (-?\d+);", ptx):
        if base in known:  # which stands above
            known[register] = known[base] + int(offset)

    def found(operations: str) -> list[tuple[int | None, int]]:
        """(offset, or None where it is not constant; bytes) of every one."""
        pattern = rf"\b({operations})[^\[\n;]*\[\s*([%\w]+)(?:\s*\+\s*(-?\d+))?\s*\]"
        return [
            (known[base] + int(more or 0) if base in known else None, width(operation))
            for operation, base, more in re.findall(pattern, ptx)
        ]

    def width(operation: str) -> int:
        parts = dict(re.findall(r"\.([vbufs])(\d+)", operation))
        return int(parts.pop("v", 1)) * max(map(int, parts.values()), default=32) // 8

    barriers = {offset for offset, _ in found(r"mbarrier\.init[\w.:]*")}
    assert barriers and None not in barriers, "a barrier without a constant address: Triton's PTX is another than known"
    barriers -= {offset for offset, _ in found(r"mbarrier\.inval[\w.:]*")}
    plain = {each for each in found(r"(?:ld|st|atom|red)(?:\.\w+)*?\.shared[\w.:]*") if each[0] is not None}
    assert plain, "no plain memory has a constant address: Triton's PTX is another than known"
    return sorted(at for at in barriers if any(at - size < offset < at + 8 for offset, size in plain))
