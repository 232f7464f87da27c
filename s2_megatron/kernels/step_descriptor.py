"""The bits of the step descriptors, which the host writes (ops/query_steps.py, ops/key_steps.py) and the Hopper kernels
read and make. Plain integers: neither Triton nor torch is imported.

A tile has two halves. A step of a query tile meets two key blocks, each with four flags for the halves of the tile; a
step of a key tile meets one query block, with four flags for the tile's two key blocks.

Flags of half h (0 or 1): ATTENDED << h, the half and the block attend; OWN << h, they do and it is the half's own
block, masked by token.

A query tile's step on the host is two entries: slot + (flags << SLOT_BITS). In the kernels its descriptor is the flags
of the first key block + (flags of the second << FLAG_BITS).

A key tile's step is flags + LAST_STEP in the tile's last one + (query row block << ROW_SHIFT) + (member <<
MEMBER_SHIFT), where the member is the query head within the KV head's group.
"""

ATTENDED = 1
OWN = 4
BOTH_HALVES = ATTENDED | ATTENDED << 1  # of a block that both halves attend, and whose tokens they all see
FLAG_BITS = 4
FLAG_MASK = (1 << FLAG_BITS) - 1

SLOT_BITS = 24
MOST_SLOTS = 1 << SLOT_BITS
SLOT_MASK = MOST_SLOTS - 1

LAST_STEP = 1 << FLAG_BITS
ROW_SHIFT = FLAG_BITS + 1
MOST_ROW_BLOCKS = 1 << 19
ROW_MASK = MOST_ROW_BLOCKS - 1
MEMBER_SHIFT = 24
MOST_MEMBERS = 127  # the sign bit stays free
