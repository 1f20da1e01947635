"""Numbers, and whether a goal is met, in the words of the tables."""

import math

NOT_MEASURED = "not measured"


def bound(value: float) -> str:
    """Empty where there is none (NaN)."""
    return "" if math.isnan(value) else f"{value:.2f}"


def met(value: float, must: float, aim: float = math.nan, *, digits: int = 2) -> str:
    """Lower is better. A value is judged with the digits that it is shown with."""
    if math.isnan(must):
        return ""
    if math.isnan(value):
        return NOT_MEASURED
    if round(value, digits) <= aim:
        return "aim"
    return ("must" if not math.isnan(aim) else "yes") if round(value, digits) <= must else "**no**"


def at_least(value: float, must: float, *, digits: int = 2) -> str:
    """As `met` without an aim, where higher is better."""
    return met(-value, -must, digits=digits)


def both(one: str, other: str) -> str:
    """Of two goals: met only if both are."""
    said = [text for text in (one, other) if text]
    bad = [text for text in ("**no**", NOT_MEASURED) if text in said]
    return [*bad, *said, ""][0]


def number(value: float, digits: int | None = None) -> str:
    """A dash for NaN, inf as it is, else so many digits behind the point; by default three
    significant ones, without an exponent."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return str(value)
    if digits is None:
        digits = min(max(0, 2 - math.floor(math.log10(abs(value)))), 4) if value else 0
    return f"{value:.{digits}f}"


def difference(value: float, low: float, high: float, digits: int = 4) -> str:
    """With its sign, and the interval behind it, which is left out where there is none (NaN)."""
    # Plus 0: what rounds to 0 has no minus.
    value, low, high = (round(x, digits) + 0.0 for x in (value, low, high))
    interval = "" if math.isnan(low) else f" [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{value:+.{digits}f}{interval}"
