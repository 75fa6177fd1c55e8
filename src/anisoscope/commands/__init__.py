"""Commands of the command line, one module for each group; ``cli`` puts them together."""
