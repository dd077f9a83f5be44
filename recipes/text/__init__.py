"""A language model of characters on any text: by default the source text of Python's standard library, which every user has."""
