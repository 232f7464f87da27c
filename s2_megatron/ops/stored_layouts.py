"""A layout as a text, where only numbers and texts can go: among the arguments of the operator, hence in compiled,
saved and exported programs. The text is the pattern itself (patterns/text.py): a program that is loaded in another
process attends what it attended where it was made, whatever else that process has."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch

from s2_megatron.ops.layout import Layout, alive, build_layout
from s2_megatron.patterns.text import pattern_of, text_of

_by_text: WeakValueDictionary[str, Layout] = WeakValueDictionary()
_kept: dict[str, Layout] = {}


@torch.compiler.assume_constant_result  # of one handle, on which torch.compile guards
def text_of_layout(handle: str) -> str:
    """The text of the layout with this handle; made once for each pattern."""
    layout = alive[handle]
    pattern = layout.pattern
    text = getattr(pattern, "_text", None)
    if text is None:
        text = text_of(pattern)
        object.__setattr__(pattern, "_text", text)
    _by_text.setdefault(text, layout)
    return text


def layout_of(text: str) -> Layout:
    """A layout of this text: one that is in use, or a new one, which stays. Raises ValueError for any other text."""
    layout = _by_text.get(text)
    if layout is None:
        _by_text[text] = _kept[text] = layout = build_layout(pattern_of(text))
    return layout


def keep(text: str) -> None:
    """The layout of this text lives from here on as long as the process: a graph may read its tensors as long."""
    _kept[text] = layout_of(text)
