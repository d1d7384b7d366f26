"""HTML and SVG elements. Text becomes markup in one place only, so that everything is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"meta", "br", "hr", "col", "img", "link"})


class Markup(str):
    """Text that is markup already. Only this module makes it."""

    __slots__ = ()


Child = Markup | str | None


def escape(text: str) -> Markup:
    """Text as it may stand between tags and in quoted attributes; characters that XML forbids become U+FFFD."""
    return Markup(html.escape(_NOT_IN_XML.sub("\ufffd", text), quote=True))


def element(name: str, attributes: dict[str, str | float | None] | None = None, *children: Child) -> Markup:
    """One element.

    Args:
        name: The tag, written by us.
        attributes: Values are escaped; None leaves the attribute out; numbers are written to two decimals.
        children: Markup stays, text is escaped, None is left out.
    """
    given = "".join(f' {key}="{_value(value)}"' for key, value in (attributes or {}).items() if value is not None)
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[Child], between: str = "") -> Markup:
    """Several children in a row."""
    parts = [child if isinstance(child, Markup) else escape(child) for child in children if child is not None]
    return Markup(escape(between).join(parts))


def stylesheet(css: str) -> Markup:
    """A style element; the text is ours alone."""
    assert "</" not in css
    return Markup(f"<style>{css}</style>")


def document(body: Markup) -> str:
    """A whole page of HTML."""
    return f"<!doctype html>\n{body}\n"


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")
