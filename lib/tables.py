"""A program's numbers: tables in Markdown, as it prints them, and the JSON of its --out."""

from pathlib import Path

from lib.files import printable, write_json


def markdown_table(head, rows):
    """A table, without a line break at its end; cells are strings, and those of all columns but the first
    are aligned right, as numbers."""
    rule = ['---'] + ['---:'] * (len(head) - 1)
    return '\n'.join([markdown_row(head), f'|{"|".join(rule)}|', *map(markdown_row, rows)])


def markdown_row(cells):
    escaped = [printable(cell).replace('|', r'\|') for cell in cells]
    return f'| {" | ".join(escaped)} |'


def check_out(out):
    """Refuse an --out that save_numbers() could not write to, before anything is measured; make its
    folder."""
    if Path(out).is_dir():
        raise IsADirectoryError(f'--out={out} is a folder; name a file')
    Path(out).parent.mkdir(parents=True, exist_ok=True)


def save_numbers(numbers, settings, machine):
    """Write a program's numbers so far as JSON to its --out, if it has one."""
    if settings.out and machine.is_first:
        write_json(settings.out, numbers)
