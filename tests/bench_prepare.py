"""
Preparation and tokenizing, text to token files, on one core, side by side with `tokenizers`.

$ python tests/bench_prepare.py --source=FOLDER --tokenizer=FILE --out=results/speed/prepare.json
"""

import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import prepare_slimpajama as preparation  # noqa: E402
import sources  # noqa: E402
import tokenizer  # noqa: E402
from bench import middle  # noqa: E402
from configurator import configure, one_line_errors  # noqa: E402
from tables import markdown_table  # noqa: E402


@dataclass
class PrepareConfig:
    source: str = ''  # as in prepare_slimpajama.py
    tokenizer: str = ''  # as in prepare_slimpajama.py
    megabytes: int = 16  # of text, from the start of the source
    rounds: int = 5  # timed passes of each row
    out: str = ''  # write the table's numbers here, as JSON

    def __post_init__(self):
        if not self.source or not self.tokenizer:
            message = 'needs --source and --tokenizer, as prepare_slimpajama.py does'
            raise ValueError(f'bench_prepare.py {message}')


def bench_prepare(settings):
    """Text to token files on one core, all of it, against tokenizers' encoding alone."""
    ours = tokenizer.load(settings.tokenizer)
    theirs = load_peer(ours)
    documents, size = read_documents(settings)
    texts = [text for _, text in documents]

    with tempfile.TemporaryDirectory() as folder:
        write_source(Path(folder, 'train'), documents)
        whole = functools.partial(prepare, folder, settings.tokenizer)
        work = {
            'prepare_slimpajama.py: read, shuffle, tokenize, write': whole,
            'tokenizer.py: encode': lambda: ours.encode_batch(texts),
            'tokenizers: encode': lambda: theirs.encode_batch(texts, add_special_tokens=False),
        }
        seconds = time_rounds(work, settings.rounds)

    print(f'{len(texts):,} documents, {size / 1e6:.1f} MB, one core\n')
    rows = print_table(seconds, seconds['tokenizers: encode'], size)
    return {'documents': len(texts), 'bytes': size, 'rows': rows}


def load_peer(ours):
    """Hugging Face's tokenizer of the same file."""
    try:
        import tokenizers
    except ImportError:
        message = 'bench_prepare.py needs tokenizers: pip install -r requirements-dev.txt'
        raise OSError(message) from None

    if ours.path is None:
        raise ValueError('--tokenizer=bytes has nothing to compare with; give a tokenizer.json')
    # Read at the first batch.
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'
    return tokenizers.Tokenizer.from_file(str(ours.path))


def read_documents(settings):
    """The first documents of the source, and their size in bytes."""
    defaults = preparation.Settings()
    units, _ = sources.find_units(
        settings.source, defaults.revision, defaults.weights, defaults.seed
    )
    documents = []
    size = 0
    for unit in units:
        for domain, text in unit.read():
            documents.append((domain, text))
            size += len(text.encode())
            if size > settings.megabytes * 1e6:
                return documents, size
    return documents, size


def write_source(folder, documents):
    folder.mkdir()
    with open(folder / '0.jsonl', 'w') as file:
        for domain, text in documents:
            row = {'text': text, 'meta': {'redpajama_set_name': domain}}
            file.write(json.dumps(row) + '\n')


def prepare(source, tokenizer_path):
    """Prepare all of a source, without a word."""
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryDirectory())
        quiet = stack.enter_context(open(os.devnull, 'w'))
        stack.enter_context(contextlib.redirect_stdout(quiet))
        stack.enter_context(contextlib.redirect_stderr(quiet))
        options = {'source': source, 'tokenizer': tokenizer_path, 'tokens': 0, 'workers': 1}
        preparation.prepare(preparation.Settings(out=out, **options))


def time_rounds(work, rounds):
    """{name: [seconds of each round]} of {name: function}, in turn; a first round warms up."""
    seconds = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, function in work.items():
            start = time.perf_counter()
            function()
            if number > 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def print_table(seconds, peer_seconds, size):
    """Print a line for each row, and return its numbers."""
    rows, lines = [], []
    for name, times in seconds.items():
        median, spread = middle(times)
        speed = size / 1e6 / median
        pairs = zip(times, peer_seconds, strict=True)
        ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        lines.append([name, f'{speed:.1f}', f'{spread:.1%}', f'{ratio:.2f}'])
        rows.append({'name': name, 'mb_per_s': speed, 'spread': spread, 'ratio': ratio})
    print(markdown_table(['row', 'MB/s', 'spread', 'x tokenizers'], lines))
    return rows


def main():
    with one_line_errors(ValueError, OSError):
        (settings,) = configure(PrepareConfig)
        numbers = bench_prepare(settings)
        if settings.out:
            Path(settings.out).write_text(json.dumps(numbers, indent=1) + '\n')


if __name__ == '__main__':
    main()
