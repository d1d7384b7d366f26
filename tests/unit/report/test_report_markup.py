from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from shardwise.report.markup import Markup, element, escape, join


def test_children_are_escaped_once() -> None:
    inner = element("b", None, "<i> & 'x'")
    assert element("p", {"title": '"><script>'}, inner, None, " a<b") == (
        '<p title="&quot;&gt;&lt;script&gt;"><b>&lt;i&gt; &amp; &#x27;x&#x27;</b> a&lt;b</p>'
    )


def test_numbers_are_short_and_none_is_left_out() -> None:
    assert (
        element("rect", {"x": 1.0, "y": 2.346, "rx": None, "width": 100}) == '<rect x="1" y="2.35" width="100"></rect>'
    )


def test_join_escapes_text_and_keeps_markup() -> None:
    assert join(["<", Markup("<br>"), None], between="&") == "&lt;&amp;<br>"


@given(st.text(), st.text())
def test_any_text_makes_well_formed_xml_and_comes_back(attribute: str, text: str) -> None:
    root = ElementTree.fromstring(element("p", {"title": attribute}, text))
    assert root.tag == "p"
    assert not len(root)
    assert (root.text or "").count("<") == escape(text).count("&lt;")
