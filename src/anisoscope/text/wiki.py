"""MediaWiki cleaner: from the markup of an article to its readable prose, in linear time on any input.

``clean`` takes wikitext as an author typed it. A dump escapes that text once more as XML: see dump.py.
What goes and what stays stands in docs/text.md. Unbalanced markup never takes prose with it: a mark without a partner
is taken out alone.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from html.entities import html5
from typing import Any

from anisoscope.text import markup


@dataclass(frozen=True)
class Tally:
    """By rule: how often it matched and how many characters it took out, less those it put in.

    Every character is counted once, so the characters of all rules add up to the difference in length.
    """

    matches: Counter[str] = field(default_factory=Counter)
    characters: Counter[str] = field(default_factory=Counter)

    def add(self, rule: str, characters: int, matches: int = 1) -> None:
        """Note that a rule matched."""
        self.matches[rule] += matches
        self.characters[rule] += characters

    def merge(self, other: Tally) -> Tally:
        """The tally of both texts together."""
        both = Tally(Counter(self.matches), Counter(self.characters))
        both.matches.update(other.matches)
        both.characters.update(other.characters)
        return both

    def table(self) -> str:
        """As a table in Markdown, the rule that took most on top."""
        lines = ["| rule | matches | characters |", "|---|---:|---:|"]
        for rule in sorted(self.matches, key=lambda rule: (-self.characters[rule], rule)):
            lines.append(f"| {rule} | {self.matches[rule]:,} | {self.characters[rule]:,} |")
        return "\n".join(lines)


def clean(wikitext: str) -> str:
    """The prose of an article: paragraphs, headings and list items, one a line, without markup."""
    return clean_with_counts(wikitext)[0]


def clean_with_counts(wikitext: str) -> tuple[str, Tally]:
    """The prose of an article, and what each rule took out."""
    tally = Tally()
    if markup.REDIRECT.match(wikitext):
        tally.add("redirect", len(wikitext))
        return "", tally
    text = _elements(wikitext, tally)
    text = _brackets(text, tally)
    text = _external_links(text, tally)
    text = _tags(text, tally)
    text = _quotes(text, tally)
    if "__" in text or "~~~" in text:
        text = _plain(markup.MAGIC_WORD, "magic word", text, tally)
    text = _entities(text, tally)
    text = _tidy(text, tally)
    text = _lines(text, tally)
    return text, tally


def _elements(text: str, tally: Tally) -> str:
    """Comments, and elements that go with their content. ``<nowiki>`` keeps its content where that is not markup."""
    found = list(markup.ELEMENT.finditer(text))
    if not found:
        return text
    names = [(m[2] or "").lower() for m in found]
    # For each tag the number of the next closing tag of its name: filled from behind, so one pass serves all.
    closing: list[int | None] = [None] * len(found)
    after: dict[str, int] = {}
    for number in range(len(found) - 1, -1, -1):
        closing[number] = after.get(names[number])
        if found[number][1]:
            after[names[number]] = number
    pieces, at, comment_ends = [], 0, True
    for number, match in enumerate(found):
        if match.start() < at:
            continue  # inside something that is gone already
        pieces.append(text[at : match.start()])
        at, partner = match.end(), closing[number]
        if not names[number]:
            end = text.find("-->", at) if comment_ends else -1
            comment_ends = end >= 0
            at = end + 3 if end >= 0 else at
            tally.add("comment", at - match.start())
        elif match[1] or match[3].endswith("/") or partner is None:
            tally.add(_rule(names[number]), at - match.start())  # a tag alone
        elif names[number] == "nowiki":
            inner = text[at : found[partner].start()]
            at = found[partner].end()
            kept = "" if markup.CODE_LIKE.search(inner) else inner
            pieces.append(kept)
            tally.add("nowiki", at - match.start() - len(kept))
        else:
            at = found[partner].end()
            tally.add(_rule(names[number]), at - match.start())
    pieces.append(text[at:])
    return "".join(pieces)


def _rule(element: str) -> str:
    return markup.DROPPED_ELEMENTS.get(element, element)


@dataclass(frozen=True)
class _Open:
    """An opening mark: what it opens, its length, and how many pieces of output stood before it."""

    kind: str
    length: int
    pieces: int


class _Brackets:
    """Templates, tables and links, which nest: one pass over their marks with a stack.

    A piece of output is dropped at most once and joined at most once, which keeps the whole linear: a plain link holds
    no other plain link (an inner ``[[`` shows that the outer one was not a link), and all else that nests is dropped.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.pieces: list[str] = []
        self.stack: list[_Open] = []
        self.depth: Counter[str] = Counter()

    def open(self, kind: str, mark: str) -> None:
        if kind == "link":
            self.give_up("link")
        self.stack.append(_Open(kind, len(mark), len(self.pieces)))
        self.depth[kind] += 1

    def pop(self) -> _Open:
        top = self.stack.pop()
        self.depth[top.kind] -= 1
        return top

    def give_up(self, *kinds: str) -> None:
        """These on top of the stack were never closed: their text stays, their mark goes."""
        while self.stack and self.stack[-1].kind in kinds:
            self.tally.add("unbalanced mark", self.pop().length)

    def close(self, kinds: tuple[str, ...], mark: str) -> None:
        if not any(self.depth[kind] for kind in kinds):
            self.tally.add("unbalanced mark", len(mark))
            return
        while self.stack[-1].kind not in kinds:
            self.tally.add("unbalanced mark", self.pop().length)
        top = self.pop()
        inner = self.pieces[top.pieces :]
        del self.pieces[top.pieces :]
        taken = top.length + len(mark) + sum(map(len, inner))
        if top.kind != "link":
            self.tally.add(top.kind, taken)
            return
        rule, shown = _link("".join(inner))
        self.tally.add(rule, taken - len(shown))
        self.pieces.append(shown)

    def finish(self) -> str:
        while self.stack:
            self.tally.add("unbalanced mark", self.pop().length)
        return "".join(self.pieces)


def _brackets(text: str, tally: Tally) -> str:
    state = _Brackets(tally)
    at = 0
    for match in markup.BRACKET.finditer(text):
        mark = match.group()
        state.pieces.append(text[at : match.start()])
        at = match.end()
        if mark == "[[":
            state.open("media" if markup.MEDIA.match(text, at) else "link", mark)
        elif mark == "]]":
            state.close(("link", "media"), mark)
        elif mark[0] == "{" and mark[1] == "{":
            _each(state.open, "template", mark)
        elif mark[0] == "}":
            _each(state.close, ("template",), mark)
        elif mark in ("{|", "|}"):
            if not markup.TABLE_START.search(text, max(0, match.start() - markup.TABLE_START_REACH), match.start()):
                state.pieces.append(mark)
            elif mark == "{|":
                state.open("table", mark)
            else:
                state.close(("table",), mark)
        elif mark[:2] in ("<t", "<T"):
            state.open("table", mark)
        elif mark[0] == "<":
            state.close(("table",), mark)
        else:
            state.give_up("link", "media")
            state.pieces.append(mark)
    state.pieces.append(text[at:])
    return state.finish()


def _each(act: Callable[[Any, str], None], what: str | tuple[str, ...], run: str) -> None:
    """A run of braces is as many marks as it has pairs; an odd one belongs to the first (``{{{parameter}}}``)."""
    pairs = len(run) // 2
    act(what, run[: len(run) - 2 * (pairs - 1)])
    for _ in range(pairs - 1):
        act(what, run[:2])


def _link(inner: str) -> tuple[str, str]:
    """The rule for ``[[inner]]`` and what it shows."""
    target, pipe, shown = inner.partition("|")
    if markup.CATEGORY.match(target):
        return "category", ""
    if markup.LANGUAGE.match(target):
        return "interlanguage link", ""
    if pipe:
        shown = shown.rpartition("|")[2]
        if not shown.strip():  # the pipe trick: [[Paris (Texas)|]] shows Paris
            shown = target.partition("(")[0].strip(" :")
        return "link with its own text", shown
    return "link", target.strip().removeprefix(":")


def _external_links(text: str, tally: Tally) -> str:
    pieces, at = [], 0
    for match in markup.EXTERNAL.finditer(text):
        pieces += [text[at : match.start()], match[1]]
        at = match.end()
        rule = "external link" if match[1] else "external link without text"
        tally.add(rule, at - match.start() - len(match[1]))
    pieces.append(text[at:])
    text = "".join(pieces)
    return _plain(markup.BARE_ADDRESS, "bare address", text, tally) if "://" in text else text


def _tags(text: str, tally: Tally) -> str:
    if "<" not in text:
        return text
    pieces, at = [], 0
    for match in markup.TAG.finditer(text):
        pieces.append(text[at : match.start()])
        at = match.end()
        breaks = markup.BREAKING.match(match[1]) is not None
        if breaks:
            pieces.append("\n")
        tally.add("tag", at - match.start() - breaks)
    pieces.append(text[at:])
    return "".join(pieces)


def _quotes(text: str, tally: Tally) -> str:
    """Two, three and five quotes are italic, bold and both; further ones are apostrophes."""
    if "''" not in text:
        return text
    pieces, at = [], 0
    for match in markup.QUOTES.finditer(text):
        length = match.end() - match.start()
        kept = "'" * (1 if length == 4 else max(0, length - 5))
        pieces += [text[at : match.start()], kept]
        at = match.end()
        tally.add("bold and italic", length - len(kept))
    pieces.append(text[at:])
    return "".join(pieces)


def _entities(text: str, tally: Tally) -> str:
    """Named and numbered characters, escaped once or several times over. Unknown names stay."""
    for _ in range(3):  # &amp;#38;nbsp; needs a second round; what the third one leaves is swept up in _tidy
        if "&" not in text:
            break
        text, before = _characters(text, tally), text
        if text == before:
            break
    return text


def _characters(text: str, tally: Tally, instead: str | None = None) -> str:
    pieces, at = [], 0
    for match in markup.ENTITY.finditer(text):
        name = match[1] or match[2] or "amp"
        if name[0] == "#" or f"{name};" in html5:
            shown = html.unescape(f"&{name};") if instead is None else instead
        else:
            shown = f"&{name};"
        pieces += [text[at : match.start()], shown]
        at = match.end()
        if at - match.start() != len(shown):
            tally.add("entity", at - match.start() - len(shown))
    pieces.append(text[at:])
    return "".join(pieces)


def _plain(pattern: re.Pattern[str], rule: str, text: str, tally: Tally, instead: str = "") -> str:
    """Replace every match; the pattern is looked for once."""
    new, matches = pattern.subn(instead, text)
    if matches:
        tally.add(rule, len(text) - len(new), matches)
    return new


def _tidy(text: str, tally: Tally) -> str:
    """Brackets that lost what they held, spaces, and last of all any mark that is left.

    What is left over becomes a space, never nothing: two halves of a mark must not meet over it.
    """
    text = text.replace("\r", "\n")
    text = _plain(markup.INVISIBLE, "spaces", text, tally)
    text = _plain(markup.HOLLOW, "hollow brackets", text, tally, " ")
    text = _plain(markup.OTHER_SPACE, "spaces", text, tally, " ")
    text = _plain(markup.SPACES, "spaces", text, tally, " ")
    text = _plain(markup.BEFORE_STOP, "spaces", text, tally)
    if any(sign in text for sign in markup.LEFT_OVER_SIGNS):
        text = _plain(markup.LEFT_OVER, "left-over mark", text, tally, " ")
    if "&" in text:
        text = _characters(text, tally, " ")
    return _plain(markup.SPACES, "spaces", text, tally, " ")


def _lines(text: str, tally: Tally) -> str:
    """Headings, list marks, rules, rows of broken tables, lines without a letter; headings with nothing under them.

    Read from the last line to the first: a heading stays where text follows it, or a kept heading of a lower level.
    """
    taken = Tally()
    kept: list[str] = []
    below = 0  # 7: text stands below; 1 to 6: level of the kept heading below; 0: nothing
    for raw in reversed(text.split("\n")):
        line = raw.strip()
        if not line:
            if kept and kept[-1]:
                kept.append("")  # one blank line between paragraphs
            continue
        level = _heading_level(line)
        if level:
            shown = line.strip("= ")
            taken.add("heading", len(line) - len(shown))
            if level >= below or not shown:
                taken.add("heading without text", len(shown))
                continue
            below = level
        else:
            shown = _unmarked(line, taken, indented=raw[0] == " ")
            if not shown:
                continue
            below = 7
        kept.append(shown)
    if kept and not kept[-1]:
        kept.pop()
    out = "\n".join(reversed(kept))
    for rule, matches in taken.matches.items():
        tally.add(rule, taken.characters[rule], matches)
    tally.add("spaces", len(text) - len(out) - taken.characters.total())
    return out


def _heading_level(line: str) -> int:
    if line[0] != "=" or line[-1] != "=" or not line.strip("= "):
        return 0
    marks = (len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")))
    return min(*marks, 6)


def _unmarked(line: str, taken: Tally, *, indented: bool) -> str:
    """A line of text without the marks at its start; nothing where no letter is left.

    An indented line is shown as typed, which authors use for programs and by oversight for prose: it goes if it looks
    like a program.
    """
    if indented and markup.CODE_LINE.search(line):
        taken.add("code", len(line))
        return ""
    if line[0] == "|" or (line[0] == "!" and ("!!" in line or "|" in line)):
        taken.add("row of a broken table", len(line))
        return ""
    if not markup.LETTER.search(line):
        taken.add("line without letters", len(line))
        return ""
    if line[0] in "*#:;-":
        shown = line.lstrip("*#:; ")
        if shown.startswith("----"):
            shown = shown.lstrip("- ")
        if len(shown) < len(line):
            taken.add("list mark", len(line) - len(shown))
        return shown
    return line
