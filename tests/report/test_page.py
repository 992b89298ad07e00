"""A page is one file whose policy admits what is in it and nothing else."""

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from jettison.report import page as kit
from jettison.report.page import json_for_html, page
from support.pages import page_data

SCRIPTS = (kit.INFLATE, *kit.KIT, *kit.LAST)
HOSTILE = "</script><script>alert(1)</script><!-- \u2028 & '\""


class Read(HTMLParser):
    """Elements as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._within = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + data)
        elif self._within != "style":
            self.text += data


def test_hostile_text_stays_text() -> None:
    found = Read(page(HOSTILE, intro=f"{HOSTILE}\n\nsecond", scripts=(), data={"x": {HOSTILE: [HOSTILE]}}))
    data = [text for attributes, text in found.scripts if attributes.get("type") == "application/json"]
    assert [json.loads(text) for text in data] == [{HOSTILE: [HOSTILE]}]
    assert len(found.scripts) == 1 + len(kit.VENDOR) + len(SCRIPTS)
    assert found.text.count(HOSTILE) == 3  # title, heading, intro
    assert [tag for tag, _ in found.tags].count("p") == 3  # two paragraphs, and what stands where nothing is drawn


def test_the_policy_admits_the_scripts_by_their_digests_and_no_request() -> None:
    text = page("t", intro="", scripts=("kit/state.js",), data={"x": 1})
    found = Read(text)
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])  # type: ignore[index]
    digests = [
        base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        for attributes, body in found.scripts
        if not attributes
    ]
    assert len(digests) == 1 + len(SCRIPTS)
    digests += [base64.b64encode(hashlib.sha256(kit.asset(name).encode()).digest()).decode() for name in kit.VENDOR]
    assert all(f"'sha256-{digest}'" in policy for digest in digests)
    for part in ("default-src 'none'", "connect-src 'none'", "base-uri 'none'", "form-action 'none'"):
        assert part in policy
    assert "script-src 'unsafe" not in policy
    assert "'self'" not in policy
    assert "connect-src 'self'" in unescape(page("t", intro="", scripts=(), data={}, served=True))


def test_nothing_in_a_page_asks_for_something_elsewhere() -> None:
    found = Read(page("t", intro="", scripts=(), data={}))
    for tag, attributes in found.tags:
        assert not {name for name in attributes if name.startswith("on")}, tag
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
    assert "url(" not in kit.asset("kit/kit.css")
    assert "@import" not in kit.asset("kit/kit.css")


def test_libraries_leave_most_of_a_page_to_its_data() -> None:
    assert len(page("t", intro="", scripts=(), data={}).encode()) < 300_000


def test_licences_are_beside_the_libraries() -> None:
    for name in (*kit.VENDOR, kit.INFLATE):
        licence = kit.asset(re.sub(r"(_inflate)?\.min\.js", ".LICENSE", name))
        assert re.search("Permission (to use, copy, modify|is hereby granted, free of charge)", licence)


def test_large_data_are_compressed_and_small_ones_are_not() -> None:
    data = {"small": [1, "<"], "large": [{"tensor": "<b>", "nbytes": n} for n in range(5000)]}
    text = page("t", intro="", scripts=(), data=data)
    assert page_data(text) == data
    assert len(text) < 400_000


def test_json_has_no_infinities_and_a_name_is_a_name() -> None:
    assert json_for_html({"a": "<&>"}) == '{"a":"\\u003c\\u0026\\u003e"}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_for_html(float("inf"))
    with pytest.raises(AssertionError, match="cannot be a name"):
        page("t", intro="", scripts=(), data={'x" onload="': 1})
