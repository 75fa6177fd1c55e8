"""Commands about text: fetch a corpus, clean a dump, say what a corpus holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anisoscope.commands.common import ticking
from anisoscope.errors import OptionError, choose

app = typer.Typer(help="Text: fetch enwik8, clean MediaWiki dumps, look into a corpus.", no_args_is_help=True)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Which corpus: enwik8.")],
    folder: Annotated[Path, typer.Option(help="Where to put it.")] = Path("data"),
    from_file: Annotated[
        Path | None, typer.Option("--from", help="An offline copy: the zip or the file itself.")
    ] = None,
    allow_prefix: Annotated[
        bool, typer.Option("--allow-prefix", help="Accept the beginning of the file only.")
    ] = False,
) -> None:
    """Fetch a corpus from its official address, resumable, and check its sums."""
    from anisoscope.text.fetch import fetch_enwik8

    choose("corpus", name, ("enwik8",))
    console = Console()
    with ticking(console, 1) as ticker:
        fetched = fetch_enwik8(
            folder,
            from_file=from_file,
            allow_prefix=allow_prefix,
            progress=lambda done, total: ticker.step("fetching enwik8, bytes", done, total or 0),
        )
    for line in (*fetched.notes, f"corpus: {fetched.path}  (use it with --text {fetched.path})"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def clean(
    dump: Annotated[Path, typer.Argument(help="A MediaWiki XML dump, such as enwik8.")],
    out: Annotated[Path, typer.Option(help="Where the prose goes, one article after another.")],
) -> None:
    """Take the markup out of a MediaWiki dump and say how much each rule took."""
    from anisoscope.runs.files import explained, replacing
    from anisoscope.text.dump import read_pages
    from anisoscope.text.streams import open_bytes, read_bytes
    from anisoscope.text.wiki import Tally, clean_with_counts

    if not dump.is_file():
        raise OptionError(f"no such file: {dump}")
    console, tally, articles = Console(), Tally(), 0
    with ticking(console, 1) as ticker, explained(out), open_bytes(dump) as stream, replacing(out) as file:
        for page in read_pages(read_bytes(stream, str(dump)), name=str(dump)):
            text, taken = clean_with_counts(page.wikitext)
            tally = tally.merge(taken)
            if text:
                file.write(f"{text}\n\n".encode())
                articles += 1
                if articles % 50 == 0:
                    ticker.step("articles", articles, 0)
    console.print(tally.table(), markup=False, highlight=False)
    console.print(f"text: {out}  ({articles:,} articles)", markup=False, highlight=False, soft_wrap=True)


@app.command()
def info(
    source: Annotated[
        str | None, typer.Argument(help="As for --text; default: the documentation inside Python.")
    ] = None,
) -> None:
    """Say what a corpus holds: documents, characters, alphabet, fingerprint, how it begins."""
    from anisoscope.text.corpus import load_corpus

    corpus = load_corpus(source)
    console = Console()
    alphabet = len({character for document in corpus for character in document})
    for label, value in (
        ("corpus", corpus.name),
        ("documents", f"{len(corpus):,}"),
        ("characters", f"{corpus.characters:,}"),
        ("alphabet", f"{alphabet:,} different characters"),
        ("fingerprint", corpus.fingerprint),
        ("begins", repr(next(iter(corpus))[:160])),
    ):
        console.print(f"{label:<12}{value}", markup=False, highlight=False, soft_wrap=True)
