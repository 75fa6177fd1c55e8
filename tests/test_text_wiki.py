"""The MediaWiki cleaner: every rule on its own, hostile and broken markup, linear time, a real dump."""

import json
import lzma
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.errors import SourceError
from anisoscope.text.dump import read_pages
from anisoscope.text.wiki import Tally, clean, clean_with_counts

PREFIX = Path(__file__).parents[2] / "shared" / "data" / "enwik8_prefix" / "enwik8_first4154063.xml.xz"
NOTHING_LEFT = ["[[", "]]", "{{", "}}", "{|", "|}", "<ref", "</ref", "<!--", "-->", "&amp;", "&nbsp;", "&lt;", "&quot;"]

RULES = {
    "link": ("a [[cat]] and [[dog]]s", "a cat and dogs"),
    "link with text": ("a [[Felis catus|cat]]s", "a cats"),
    "link with two pipes": ("a [[x|y|cat]]", "a cat"),
    "pipe trick": ("[[Paris (Texas)|]] town", "Paris town"),
    "category": ("cat\n[[Category:Cats|*]]\n[[category : Felines]]", "cat"),
    "link to a category": ("see [[:Category:Cats]]", "see Category:Cats"),
    "interlanguage": ("cat\n[[fr:Chat]]\n[[zh-min-nan:Niau]]\n[[simple:Cat]]\n[[ar: قط]]", "cat"),
    "not interlanguage": ("[[Alien: Resurrection]] film", "Alien: Resurrection film"),
    "media": ("a [[Image:Cat.jpg|thumb|A [[cat]] of [http://x.org sort] {{y}}]] b", "a b"),
    "media, other names": ("a [[file:Cat.jpg]] [[Media:x.ogg|hear]] b", "a b"),
    "media in a link": ("a [[Cat|[[Image:Cat.jpg]] cat]] b", "a cat b"),
    "template": ("a {{infobox|x={{nested|[[y]]}}|z}} b", "a b"),
    "parameter": ("a {{{1|none}}} b {{x|{{{2}}}}} c", "a b c"),
    "table": ("a\n{| class=x\n! head\n|-\n| cell\n{|\n| inner\n|}\n| [[more]]\n|}\nb", "a\n\nb"),
    "table ends a template argument": ("a {{x|y=|}} b", "a b"),
    "html table": ("a <TABLE border=1><tr><td>x<table><tr></table></table> b", "a b"),
    "reference": ('a<ref name="x">see [[y]] {{cite}}</ref>, b<ref name=x />. c<references/>', "a, b. c"),
    "code": ("a <pre>x [[y]]</pre><code>z</code> <source lang=c>int i;</source> b", "a b"),
    "math": ("a <math>\\{{x}_2</math> b", "a b"),
    "gallery": ("a\n<gallery>\nImage:x.jpg|[[y]]\n</gallery>\nb", "a\n\nb"),
    "comment": ("a <!-- [[x]] {{ -- > \n\n --> b", "a b"),
    "nowiki with prose": ("a <nowiki>plain</nowiki> b", "a plain b"),
    "nowiki with markup": ("a <nowiki>[[x]]</nowiki> b", "a b"),
    "tags": ('a <font color="red">red</font> H<sub>2</sub>O', "a red H2O"),
    "line break": ("a<br/>b<BR>c", "a\nb\nc"),
    "what is no tag": ("#include <stdio.h> if a < b and b > c", "include <stdio.h> if a < b and b > c"),
    "external": ("a [http://x.org/y?z=1 the site] b [https://x.org] c http://x.org/z d", "a the site b c d"),
    "brackets that are text": ("he said [sic] so", "he said [sic] so"),
    "bold and italic": ("''a'' '''b''' '''''c''''' d'''' it's", "a b c d' it's"),
    "heading": ("== Top ==\ntext\n=== Sub===\nmore", "Top\ntext\nSub\nmore"),
    "heading without text": (
        "a\n== See ==\n=== Deep ===\n{{x}}\n== Next ==\nb\n== Notes ==\n<references/>",
        "a\n\nNext\nb",
    ),
    "heading over a heading": ("== Top ==\n=== Sub ===\nb", "Top\nSub\nb"),
    "lists": ("* a\n** b\n# c\n:: d\n; e\n*:# f", "a\nb\nc\nd\ne\nf"),
    "rule": ("a\n----\nb", "a\nb"),
    "magic words": ("__NOTOC__ a __TOC__ snake_case b ~~~~", "a snake_case b"),
    "entities": ("a&nbsp;b &amp;nbsp; c &lt; d &#233; &#xe9; &mdash; AT&amp;T R&D", "a b c < d é é — AT&T R&D"),
    "entities escaped again": ("&amp;amp;amp;eacute; &amp;#38;mdash;", "é —"),
    "unknown entity": ("a &fooo; &amp;fooo; b", "a &fooo; &fooo; b"),
    "escaped markup": ("&lt;ref&gt;a&lt;/ref&gt; &#91;&#91;b&#93;&#93;", "a b"),
    "hollow brackets": ("Plato ({{lang|x}}, {{IPA|y}}) was", "Plato was"),
    "spaces": ("a  b ,c\t d .\r\n\n\n\ne", "a b ,c d.\n\ne"),
    "redirect": ("#REDIRECT [[Cat]]", ""),
    "indented program": (
        " for (i = 0; i < n; i++) {\n   x = y;\n }\n An indented sentence stays.",
        "An indented sentence stays.",
    ),
    "empty": ("", ""),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    text, expected = RULES[name]
    found, tally = clean_with_counts(text)
    assert found == expected
    assert tally.characters.total() == len(text) - len(expected)


BROKEN = {
    "link left open": ("a [[cat is here.\n\nb [[dog]] c", "a cat is here.\n\nb dog c"),
    "link closed twice": ("a [[cat]]]] b", "a cat b"),
    "template left open": ("a {{infobox b [[cat]] c", "a infobox b cat c"),
    "template closed twice": ("a {{x}} }} b", "a b"),
    "table left open": ("a\n{| class=x\n| cell\nb stays", "a\nclass=x\nb stays"),
    "crossed": ("a {{x [[y}} z]] b", "a z b"),
    "reference left open": ("a<ref> b stays", "a b stays"),
    "reference cut off": ("a <ref name=b", "a"),
    "comment left open": ("a <!-- b stays", "a b stays"),
    "link in a link": ("a [[b [[c]] d]] e", "a b c d e"),
    "one bracket short": ("a [[cat] b [[dog]]", "a cat] b dog"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_markup_takes_no_prose_with_it(name):
    text, expected = BROKEN[name]
    assert clean(text) == expected


MARKS = ["[[", "]]", "{{", "}}", "{{{", "}}}", "{|", "|}", "\n", "\n\n", "|", "<ref>", "</ref>", "<ref", "<!--", "-->"]
MARKS += ["[[Image:", "[http://", "]", "''", "&amp;", "&am", "amp;", "p;", "&", "nbsp;", "( )", "<nowiki>", "</nowiki>"]
MARKS += [
    "<table>",
    "</table>",
    "=",
    "*",
    " ",
    "word",
    "[",
    "{",
    "}",
    "<br>",
    "<math>",
    "</math>",
    "#38;",
    "&#91;",
    "lt;",
    "\r",
]


@given(st.lists(st.sampled_from(MARKS), max_size=40).map("".join))
def test_no_mark_is_left_of_any_text(text):
    found, tally = clean_with_counts(text)
    for mark in NOTHING_LEFT:
        assert mark not in found, (mark, found)
    assert tally.characters.total() == len(text) - len(found)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=80))
def test_any_text_is_taken(text):
    clean(text)


HOSTILE = ["[[", "{{", "{|\n", "[[a|", "{{a|[[b|", "<ref>", "<!--", "<table>", "[http://", "&amp;", "&#38;", "<ref "]
HOSTILE += ["''", "=", "\n|", "{", "(", " ", "\n", "__", "<nowiki>", "{{a}}[[b"]
NESTED = [("[[", "]]"), ("[[a", "]]"), ("{{", "}}"), ("{|\n", "\n|}"), ("[[Image:a|", "]]"), ("{{a|[[b|", "]]}}")]

# In a process of its own: the type checks of the test run cost more than the cleaner itself.
COSTS = """
import json, sys, time
from anisoscope.text.wiki import clean

def cost(text):
    begin = time.process_time()
    found = clean(text)
    return time.process_time() - begin, found[:6], found[-5:]

hostile, nested = json.loads(sys.argv[1])
flat = {unit: [cost(unit * (size // len(unit)))[0] for size in (40_000, 320_000)] for unit in hostile}
deep = [
    [cost("before\\n" + a * (size // len(a)) + "x" + b * (size // len(a)) + "\\nafter") for size in (80_000, 640_000)]
    for a, b in nested
]
print(json.dumps([flat, deep]))
"""


def test_linear_time_on_hostile_megabytes():
    """Eight times the text may cost little more than eight times the time; deep nesting goes up to a megabyte."""
    asked = json.dumps([HOSTILE, NESTED])
    done = subprocess.run([sys.executable, "-c", COSTS, asked], capture_output=True, text=True, check=True)
    flat, deep = json.loads(done.stdout)
    for unit, (small, large) in flat.items():
        assert large < 24 * small + 0.1, (unit, small, large)
    for pair, ((small, *_), (large, start, end)) in zip(NESTED, deep):
        assert large < 24 * small + 0.1, (pair, small, large)
        assert (start, end) == ("before", "after"), pair


def test_tally_merges_and_prints():
    _, one = clean_with_counts("[[a]] ''b''")
    _, two = clean_with_counts("[[c]]")
    both = one.merge(two)
    assert both.matches["link"] == 2 and both.matches["bold and italic"] == 2
    assert both.characters["link"] == 8 and one.characters["link"] == 4
    assert "| link | 2 | 8 |" in both.table()
    assert one.merge(Tally()).matches == one.matches


DUMP = b"""<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.3/"><siteinfo><namespaces>
<namespace key="10">Template</namespace><namespace key="0" /></namespaces></siteinfo>
<page><title>Cat</title><id>1</id><revision>
<text xml:space="preserve">''Cat''&amp;nbsp;&lt;ref&gt;x&lt;/ref&gt; \xc3\xa9</text></revision></page>
<page><title>Kat</title><revision><text>#redirect [[Cat]]</text></revision></page>
<page><title>New</title><redirect title="Cat" /><revision><text>moved</text></revision></page>
<page><title>Template:Box</title><revision><text>{{{1}}}</text></revision></page>
<page><title>2001: A Space Odyssey</title><revision><text>A film.</text></revision></page>
<page><title>Cut</title><revision><text>half of a pa"""


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_pages_of_a_dump_that_is_cut_off(step):
    seen = Counter()
    pages = list(read_pages((DUMP[a : a + step] for a in range(0, len(DUMP), step)), seen))
    assert [page.title for page in pages] == ["Cat", "2001: A Space Odyssey"]
    assert clean(pages[0].wikitext) == "Cat é"
    assert seen == {"article": 2, "redirect": 2, "not an article": 1, "cut off": 1}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"plain text", "is not a MediaWiki dump"),
        (b"<html><body/></html>", "holds no page"),
        (b"", "holds no page"),
        (b"<!DOCTYPE x [<!ENTITY a 'aa'>]><mediawiki/>", "document type"),
        (b"<mediawiki><page></mediawiki>", "mismatched tag"),
    ],
)
def test_what_is_no_dump(data, reason):
    with pytest.raises(SourceError, match=reason):
        list(read_pages([data]))


@pytest.fixture(scope="module")
def dump():
    if not PREFIX.exists():
        pytest.skip("the beginning of enwik8 is not here")
    seen = Counter()
    pages = list(read_pages([lzma.decompress(PREFIX.read_bytes())], seen))
    tally, cleaned = Tally(), {}
    for page in pages:
        cleaned[page.title], counts = clean_with_counts(page.wikitext)
        tally = tally.merge(counts)
    return cleaned, pages, seen, tally


def test_real_dump_is_clean(dump):
    cleaned, pages, seen, tally = dump
    assert seen == {"article": 248, "redirect": 243}
    text = "\n".join(cleaned.values())
    for mark in [*NOTHING_LEFT, "''", "thumb|", "Image:", "<br", "__NOTOC__", "&mdash;", "&#"]:
        assert mark not in text, mark
    assert tally.characters.total() == sum(len(page.wikitext) - len(cleaned[page.title]) for page in pages)
    # Most of the prose stays: of the source about a quarter is markup.
    assert 0.70 < len(text) / sum(len(page.wikitext) for page in pages) < 0.85


def test_real_dump_keeps_its_sentences(dump):
    cleaned, *_ = dump
    assert cleaned["Anarchism"].startswith(
        "Anarchism originated as a term of abuse first used against early working class radicals including the Diggers "
        "of the English Revolution and the sans-culottes of the French Revolution. Whilst the term"
    )
    assert 'is derived from the Greek αναρχία ("without archons (ruler, chief, king)").' in cleaned["Anarchism"]
    assert "Albedo is the measure of reflectivity of a surface or body." in cleaned["Albedo"]
    assert cleaned["Alabama"].startswith("Alabama is a state located in the Southern United States.")


def test_the_table_in_the_document_is_this_one(dump):
    assert dump[3].table() in (Path(__file__).parents[1] / "docs" / "text.md").read_text()
