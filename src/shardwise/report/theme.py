"""Colors and type of the page and of pictures: one palette, light and dark, told apart by people who see few colors."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.vocabulary.memory import Category

CATEGORY_CLASSES = {category: f"c-{category.value}" for category in Category}

_LIGHT = {
    "paper": "#ffffff", "panel": "#f6f7f8", "ink": "#1a1e23", "muted": "#5a636e", "line": "#dfe3e8", "track": "#eceff2",
    "accent": "#0f6b58", "good": "#0f6b58", "warn": "#8a5a00", "bad": "#b42318",
    "parameter": "#2f5d9b", "gradient": "#5b9bd1", "optimizer": "#6c5aa8", "activation": "#d08c2c",
    "temporary": "#5f9a63", "runtime": "#98a1ab",
    "forward": "#5b9bd1", "backward": "#2f5d9b", "other": "#98a1ab", "wire": "#d08c2c", "wait": "#b42318",
}  # fmt: skip
_DARK = {
    "paper": "#121518", "panel": "#1a1e22", "ink": "#e7eaed", "muted": "#9aa4af", "line": "#2c333a", "track": "#22282e",
    "accent": "#63c9ad", "good": "#63c9ad", "warn": "#e3b55a", "bad": "#f28b7d",
    "parameter": "#5f92d6", "gradient": "#93c5ee", "optimizer": "#a293dd", "activation": "#e6ab57",
    "temporary": "#86c08a", "runtime": "#7d8792",
    "forward": "#93c5ee", "backward": "#5f92d6", "other": "#7d8792", "wire": "#e6ab57", "wait": "#f28b7d",
}  # fmt: skip

SANS = 'ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
MONO = 'ui-monospace,SFMono-Regular,"SF Mono",Menlo,Consolas,"Liberation Mono",monospace'


def page_css() -> str:
    """The style of the HTML page, charts included."""
    return variables(":root") + _read("chart.css") + _fills() + _read("page.css")


def picture_css() -> str:
    """The style of a picture in a file of its own."""
    return variables("svg") + _read("chart.css") + _fills()


def variables(scope: str) -> str:
    """The palette as CSS variables of `scope`, dark where the reader's system is dark and not on paper."""

    def block(palette: dict[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in palette.items())

    return (
        f"{scope}{{{block(_LIGHT)}--sans:{SANS};--mono:{MONO};color-scheme:light dark}}"
        f"@media screen and (prefers-color-scheme:dark){{{scope}{{{block(_DARK)}}}}}"
    )


def _fills() -> str:
    names = [category.value for category in Category] + ["forward", "backward", "other", "wire", "wait"]
    return "".join(f"svg .c-{name}{{fill:var(--{name})}}" for name in names)


def _read(name: str) -> str:
    """A style sheet of this folder, without the comment and the blanks that only its readers need."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return re.sub(r"/\*.*?\*/|\n\s*", "", text, flags=re.DOTALL)
