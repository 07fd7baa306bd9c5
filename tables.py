"""Tables in Markdown, as programs print them and reports hold them."""


def markdown_table(head, rows, text_columns=(0,)):
    """A table, without a line break at its end; cells are strings.

    Columns hold numbers, aligned right, but for the text_columns.
    """
    rule = ['---' if column in text_columns else '---:' for column in range(len(head))]
    return '\n'.join([markdown_row(head), f'|{"|".join(rule)}|', *map(markdown_row, rows)])


def markdown_row(cells):
    escaped = [cell.replace('|', r'\|') for cell in cells]
    return f'| {" | ".join(escaped)} |'
