"""The tables of the MediaWiki cleaner: which elements, prefixes and words are markup, and the patterns made of them.

Every pattern runs in linear time on any input: character classes exclude their own opening character, and quantifiers
that could overlap are possessive, so that nothing is ever tried twice.
"""

from __future__ import annotations

import re

# Elements that go with everything inside them: code, formulas, notes, media.
DROPPED_ELEMENTS: dict[str, str] = {
    "pre": "code",
    "code": "code",
    "source": "code",
    "syntaxhighlight": "code",
    "script": "code",
    "style": "code",
    "math": "math",
    "chem": "math",
    "ref": "reference",
    "references": "reference",
    "gallery": "gallery",
    "imagemap": "gallery",
    "timeline": "gallery",
    "hiero": "gallery",
    "score": "gallery",
    "inputbox": "gallery",
    "noinclude": "template",
    "includeonly": "template",
}
# Elements that go while their content stays. What is not listed (``<stdio.h>``) is text, not a tag.
PLAIN_ELEMENTS = (
    "a|abbr|b|bdi|bdo|big|blockquote|br|caption|center|cite|col|colgroup|dd|del|dfn|div|dl|dt|em|font|h1|h2|h3|h4|h5|h6|"
    "hr|i|ins|kbd|li|name|nobr|nowiki|ol|onlyinclude|p|q|rb|rp|rt|ruby|s|samp|section|small|span|strike|strong|sub|sup|"
    "table|tbody|td|tfoot|th|thead|time|tr|tt|u|ul|var|wbr"
)
BREAKING = re.compile(r"(?:br|hr|p|li|dd|dt|tr|td|th|div|h[1-6]|blockquote|caption|center)$", re.IGNORECASE)

_RAW = "|".join(sorted((*DROPPED_ELEMENTS, "nowiki"), key=len, reverse=True))
ELEMENT = re.compile(rf"<!--|<(/?)({_RAW})\b([^<>]*+)>", re.IGNORECASE)
TAG = re.compile(rf"</?+({PLAIN_ELEMENTS}|{_RAW})\b[^<>]*+>", re.IGNORECASE)
CODE_LIKE = re.compile(r"[\[\]{}<>|=]|''|~~~")

# One token stream for everything that nests. A blank line ends a link that was left open.
BRACKET = re.compile(
    r"\[\[|\]\]|\{\{++|\}\}++|\{\||\|\}(?!\})|\n[ \t]*+\n|"
    r"<[tT][aA][bB][lL][eE]\b[^<>]*+>|</[tT][aA][bB][lL][eE][^<>]*+>"
)
TABLE_START = re.compile(r"(?:^|\n)[ \t:*#]*+$")  # what may stand before ``{|`` and ``|}`` on their line
TABLE_START_REACH = 40  # characters looked back at, so that a line of nothing but marks costs no more than any other
MEDIA = re.compile(r"[ \t]*+:?+[ \t]*+(?:image|file|media)[ \t]*+:", re.IGNORECASE)
CATEGORY = re.compile(r"[ \t]*+category[ \t]*+:", re.IGNORECASE)
# Two or three small letters and a colon: the same article in another language. Longer codes are listed.
LANGUAGE = re.compile(
    r"[ \t]*+(?:[a-z]{2,3}|simple|tokipona|be-x-old|bat-smg|cbk-zam|fiu-vro|map-bms|nds-nl|roa-rup|roa-tara|"
    r"zh-[a-z-]{2,9})[ \t]*+:(?!/)"
)
EXTERNAL = re.compile(r"\[(?:(?:https?|ftp|irc|news|gopher)://|mailto:|//)[^\s\[\]]*+[ \t]*+([^\[\]\n]*+)\]")
BARE_ADDRESS = re.compile(r"(?:https?|ftp)://[^\s\[\]<>\"|(){}]*+")
QUOTES = re.compile(r"'{2,}+")
MAGIC_WORD = re.compile(r"__[A-Z]{3,30}__|~{3,5}+")
_CHARACTER = r"(#[0-9]{1,8}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});"
ENTITY = re.compile(rf"&(?:amp;)++(?:{_CHARACTER})?+|&{_CHARACTER}")  # escaped several times over, or once

HOLLOW = re.compile(r"\([\s,;:/]*+\)|\[\s*+\]")  # brackets that lost what they held
OTHER_SPACE = re.compile("[\t\u00a0\u2000-\u200b\u202f\u2060\u3000\ufeff]")
SPACES = re.compile(r"  ++")
BEFORE_STOP = re.compile(r" (?=[,.;:!?)](?:\s|$))")
INVISIBLE = re.compile("[\u00ad\u200e\u200f]")
LEFT_OVER_SIGNS = ("[[", "]]", "{{", "}}", "{|", "|}", "<", "-->")  # one of them stands in every match below
LEFT_OVER = re.compile(r"\[{2,}+|\]{2,}+|\{{2,}+|\}{2,}+|\{\||\|\}|</?+[rR][eE][fF](?:erences)?\b[^<>\n]*+>?+|<!--|-->")
CODE_LINE = re.compile(r"[;{}\\]$|:=|==|!=|\(\)|->|/\*|\*/|^(?:return|if|while|for|end|begin|print)\b.*[:;(]")
REDIRECT = re.compile(r"\s*+#\s*+redirect\b", re.IGNORECASE)
LETTER = re.compile(r"[^\W_]")
