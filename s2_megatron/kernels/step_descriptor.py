"""The bits of the step descriptors, which the host writes (ops/query_steps.py, ops/key_steps.py) and the Hopper kernels
read and make. Plain integers: neither Triton nor torch is imported.

A tile has two halves. A step of a query tile meets two key blocks, each with flags for the halves of the tile; a step of
a key tile meets one query block, with flags for the tile's two key blocks.

Three flags say what half h (0 or 1) attends of a block, ATTENDED << h, OWN << h and EDGE << h (patterns/tokens.py has
the rests of the window and of the sink):

    none                       nothing
    ATTENDED                   all of it
    ATTENDED | OWN             it is the half's own block: up to the row's own token
    OWN                        what the window's rest shows of the block at its edge
    OWN | EDGE                 the same of the block behind that one
    ATTENDED | OWN | EDGE      the half's own block, and the window is shorter than that
    EDGE                       the sink alone

SINK, of a query tile's step: the block holds the last tokens of the sink, which are attended beside what the window
shows. In a key tile the block is the same in all steps, and the tile itself says so.

A query tile's step on the host is two entries: slot + (flags << SLOT_BITS). In the kernels its descriptor is the flags
of the first key block + (flags of the second << FLAG_BITS).

A key tile's step is flags + LAST_STEP in the tile's last one + (query row block << ROW_SHIFT) + (member <<
MEMBER_SHIFT), where the member is the query head within the KV head's group. A slot of its list may have SINK_SLOT.
"""

ATTENDED = 1
OWN = 4
EDGE = 16
SINK = 64
NEAR, FAR, OWN_EDGE = OWN, OWN | EDGE, ATTENDED | OWN | EDGE
BOTH_HALVES = ATTENDED | ATTENDED << 1  # of a block that both halves attend, and whose tokens they all see
HALF_FLAGS = ATTENDED | OWN | EDGE  # of half 0
FLAG_BITS = 7
FLAG_MASK = (1 << FLAG_BITS) - 1

SLOT_BITS = 24
MOST_SLOTS = 1 << SLOT_BITS
SLOT_MASK = MOST_SLOTS - 1
SINK_SLOT = MOST_SLOTS

LAST_STEP = SINK  # has no meaning of its own there
ROW_SHIFT = FLAG_BITS
MOST_ROW_BLOCKS = 1 << 17
ROW_MASK = MOST_ROW_BLOCKS - 1
MEMBER_SHIFT = 24
MOST_MEMBERS = 127  # the sign bit stays free
