"""Text to tokens to batches: sources, the MediaWiki cleaner, tokenizers, counts, and languages of a chosen Zipf law."""
