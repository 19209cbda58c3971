"""What a hostile file may hold."""

LAUGHS = "&a [x, x, x, x, x, x, x, x, x, x]"  # a kilobyte of YAML, and written out ten words to the 20th power
for before, after in zip("abcdefghijklmnopqrs", "bcdefghijklmnopqrst", strict=True):
    LAUGHS = f"&{after} [{LAUGHS}, {', '.join([f'*{before}'] * 9)}]"
