"""What tests of refused arguments share."""

import pytest


def refuses(call, *words: str) -> None:
    """call() raises a ValueError of one line with these words, in this order."""
    with pytest.raises(ValueError) as caught:
        call()
    text, place = str(caught.value), 0
    for part in words:
        assert part in text[place:], f"{part!r} is not in {text!r}"
        place = text.index(part, place) + len(part)
    assert "\n" not in text
