"""
Preparation and tokenizing, text to token files, on one core, side by side with `tokenizers`.

$ python tests/bench_prepare.py --source=FOLDER --tokenizer=FILE --out=results/bench_prepare.json
"""
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import middle  # noqa: E402
from configurator import configure, one_line_errors  # noqa: E402


@dataclass
class PrepareConfig:
    source: str = ''  # as in prepare_slimpajama.py
    tokenizer: str = ''  # as in prepare_slimpajama.py
    megabytes: int = 16  # of text, from the start of the source
    rounds: int = 5  # timed passes of each row
    out: str = ''  # write the table's numbers here, as JSON


def bench_prepare(settings):
    """Text to token files on one core, all of it, against tokenizers' encoding alone."""
    import prepare_slimpajama as prepare
    import tokenizer
    try:
        import tokenizers
    except ImportError:
        raise OSError('bench_prepare.py needs tokenizers: pip install -r requirements-dev.txt') from None
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'  # read at the first batch

    if not settings.source or not settings.tokenizer:
        raise ValueError('bench_prepare.py needs --source and --tokenizer, as prepare_slimpajama.py does')
    asked = prepare.Settings(source=settings.source, tokenizer=settings.tokenizer)
    ours, units = tokenizer.load(settings.tokenizer), prepare.find_units(asked)[0]
    if ours.path is None:
        raise ValueError('--tokenizer=bytes has nothing to compare with; give a tokenizer.json')
    theirs = tokenizers.Tokenizer.from_file(str(ours.path))
    pairs, size = [], 0
    for pair in (pair for unit in units for pair in unit.read()):
        pairs.append(pair)
        size += len(pair[1].encode())
        if size > settings.megabytes * 1e6:
            break
    texts = [text for _, text in pairs]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, 'source', 'train')
        source.mkdir(parents=True)
        with open(source / '0.jsonl', 'w') as f:
            for domain, text in pairs:
                f.write(json.dumps({'text': text, 'meta': {'redpajama_set_name': domain}}) + '\n')

        def whole():
            with tempfile.TemporaryDirectory() as out, open(os.devnull, 'w') as quiet, \
                    contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                prepare.prepare(prepare.Settings(source=str(source.parent), tokenizer=settings.tokenizer, tokens=0,
                                                 out=out + '/out', workers=1))

        rows = {'prepare_slimpajama.py: read, shuffle, tokenize, write': whole,
                'tokenizer.py: encode': lambda: ours.encode_batch(texts),
                'tokenizers: encode': lambda: theirs.encode_batch(texts, add_special_tokens=False)}
        seconds = {name: [] for name in rows}
        for round_ in range(settings.rounds + 1):
            for name, work in rows.items():
                start = time.perf_counter()
                work()
                if round_:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
    peer = seconds['tokenizers: encode']
    print(f'{len(texts):,} documents, {size / 1e6:.1f} MB, one core\n\n| row | MB/s | spread | x tokenizers |')
    print('|---|---:|---:|---:|')
    reports = []
    for name, times in seconds.items():
        median, spread = middle(times)
        ratio = statistics.median(b / a for a, b in zip(times, peer, strict=True))
        reports.append({'name': name, 'mb_per_s': size / 1e6 / median, 'spread': spread, 'ratio': ratio})
        print(f'| {name} | {size / 1e6 / median:.1f} | {spread:.1%} | {ratio:.2f} |')
    return {'documents': len(texts), 'bytes': size, 'rows': reports}


def main():
    with one_line_errors(ValueError, OSError):
        (settings,) = configure(PrepareConfig)
        numbers = bench_prepare(settings)
        if settings.out:
            Path(settings.out).write_text(json.dumps(numbers, indent=1) + '\n')


if __name__ == '__main__':
    main()
