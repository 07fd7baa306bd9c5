"""tokenizer.py: ids equal Hugging Face `tokenizers` one by one, text comes back in NFC, and look-alikes are refused."""
import argparse
import hashlib
import inspect
import io
import json
import random
import sys
import typing
import unicodedata
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import tokenizer  # noqa: E402

hf = pytest.importorskip('tokenizers')
SHARED = ROOT.parent / 'shared' / 'data'
needs_shared = pytest.mark.skipif(not (SHARED / 'tokenizer' / 'tokenizer.json').exists(),
                                  reason='no ../shared/data/tokenizer: the real GPT-NeoX vocabulary is not tested')

UNICODE = ('naïve Ångström — “quotes” … ½ ²³ ٣٤ Ⅷ e\u0301 n\u0303 \u1112\u1161\u11ab 日本語の文章 中文 한국어 '
           'हिन्दी עברית 😀👨\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 \ufeff \u00a0 \u2003 \u3000 \x85 \u2028 \x1c \x0b '
           '\ufffd \ufb01 ſ ẛ̣ ')


def train(path, neox):
    """A small vocabulary, laid out like GPT-NeoX's or GPT-2's tokenizer.json."""
    t = hf.Tokenizer(hf.models.BPE())
    t.normalizer = hf.normalizers.NFC() if neox else None
    t.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = hf.decoders.ByteLevel()
    special = ['<|endoftext|>', '<|padding|>'] if neox else []
    trainer = hf.trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False,
                                     initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet())
    t.train_from_iterator([inspect.getsource(argparse), inspect.getsource(typing), UNICODE * 9], trainer)
    if neox:
        t.add_tokens([hf.AddedToken(' ' * n, normalized=True) for n in range(24, 1, -1)])
    else:
        t.add_special_tokens(['<|endoftext|>'])
    path.mkdir()
    t.save(str(path / 'tokenizer.json'))
    return path


@pytest.fixture(scope='session')
def folders(tmp_path_factory):
    tmp = tmp_path_factory.mktemp('tokenizers')
    return {'neox': train(tmp / 'neox', True), 'gpt2': train(tmp / 'gpt2', False), 'real': SHARED / 'tokenizer'}


@pytest.fixture(params=['neox', 'gpt2', pytest.param('real', marks=needs_shared)])
def pair(request, folders):
    """(ours, Hugging Face's) of the same file."""
    folder = folders[request.param]
    return tokenizer.load(folder), hf.Tokenizer.from_file(str(folder / 'tokenizer.json'))


def fuzzed(count, seed):
    """Strings of awkward characters, runs of blanks, and pieces of words."""
    rng = random.Random(seed)
    blanks = list(' \t\n\r\x0b\x0c\x1c\x85\u00a0\u2003\u2028\u3000')
    pieces = (list(UNICODE) + blanks * 3 + [' ' * n for n in (2, 3, 23, 24, 25, 26, 48, 49)]
              + "'s 't 're 've 'm 'll 'd 'S ' '' 12 1234 _ == <| |> endoftext def return".split())
    for _ in range(count):
        words = (rng.choice(pieces) if rng.random() < 0.9 else rng.choice(blanks) * rng.randint(1, 60)
                 for _ in range(rng.randint(0, 30)))
        yield ''.join(words)


def assert_same(pair, texts):
    ours, theirs = pair
    texts = [text for text in texts if '<|endoftext|>' not in text and '<|padding|>' not in text]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids.dtype == np.uint16
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        assert ours.decode(ids) == (text if ours.name == 'gpt2' else unicodedata.normalize('NFC', text))


def test_fuzzed_ids_equal_hugging_face(pair):
    assert_same(pair, fuzzed(2000, seed=0))


def test_runs_of_blanks_equal_hugging_face(pair):
    runs = [blank * n for blank in ' \t\n\u00a0\u3000' for n in range(1, 61)]
    assert_same(pair, [form.format(run) for run in runs for form in ('{}', 'a{}b', '{}b', 'a{}', 'a\n{}\n!')])


def test_code_equals_hugging_face(pair):
    assert_same(pair, [inspect.getsource(json.decoder), inspect.getsource(random), UNICODE])


@needs_shared
def test_real_documents_equal_hugging_face(folders):
    pyarrow = pytest.importorskip('pyarrow')
    path = SHARED / 'slimpajama_mini' / 'validation' / '0.jsonl.zst'
    if not path.exists():
        pytest.skip(f'no {path}')
    with io.BufferedReader(pyarrow.input_stream(str(path), compression='zstd')) as f:
        texts = [json.loads(line)['text'] for line in f]
    file = folders['real'] / 'tokenizer.json'
    assert_same((tokenizer.load(file), hf.Tokenizer.from_file(str(file))), texts[:700])


@needs_shared
def test_real_neox_is_described(folders):
    t = tokenizer.load(folders['real'])
    assert (t.name, t.n_vocab, t.eot) == ('gpt-neox', 50277, 0)
    assert t.encode('a  b' + ' ' * 24).tolist() == [66, 50276, 67, 50254]
    assert t.sha256 == sha256(folders['real'] / 'tokenizer.json')


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_small_vocabularies_are_described(folders):
    neox, gpt2 = tokenizer.load(folders['neox']), tokenizer.load(str(folders['gpt2'] / 'tokenizer.json'))
    assert (neox.name, neox.eot, gpt2.name, gpt2.eot) == ('gpt-neox', 0, 'gpt2', gpt2.n_vocab - 1)
    assert neox.sha256 == sha256(neox.path) != gpt2.sha256


@pytest.mark.parametrize('name', ['neox', 'gpt2', 'bytes'])
def test_text_cannot_inject_a_token(name, folders):
    t = tokenizer.load(folders.get(name, name))
    text = 'a<|endoftext|><|padding|>b' * 3
    assert t.eot not in t.encode(text)
    assert t.decode(t.encode(text)) == text
    assert t.decode([*t.encode('a'), t.eot]) == 'a<|endoftext|>'


@pytest.mark.parametrize('name', ['neox', 'gpt2', 'bytes'])
def test_surrogates_and_unknown_ids_become_replacement_characters(name, folders):
    t = tokenizer.load(folders.get(name, name))
    assert t.decode(t.encode(json.loads(r'"a\ud800b\udc00"'))) == 'a\ufffdb\ufffd'
    assert t.decode(t.encode('a\ud83d\ude00')) == 'a😀'  # a pair, as UTF-16 has it, is a character
    assert t.decode([t.n_vocab + 5, *t.encode('a')]) == '\ufffda'
    assert t.decode(t.encode('é')[:1]) in ('é', '\ufffd')
    assert t.encode('').tolist() == [] and t.decode([]) == '' and t.encode_batch([]) == []


def test_a_million_blanks_do_not_stop_it(folders):
    """tiktoken's regex engine panics on them."""
    for name in ('neox', 'gpt2'):
        t = tokenizer.load(folders[name])
        for text in ('\n' * 1_500_000 + 'x', 'x ' + '\n \t' * 500_000, ' ' * 1_500_000):
            assert t.decode(t.encode(text)) == text


def test_bytes_are_utf8_of_nfc():
    t = tokenizer.load('bytes')
    assert (t.name, t.n_vocab, t.eot, t.path, len(t.sha256)) == ('bytes', 257, 256, None, 64)
    for text in [*fuzzed(300, seed=1), 'e\u0301']:
        ids = t.encode(text)
        assert ids.dtype == np.uint16 and ids.tolist() == list(unicodedata.normalize('NFC', text).encode())
        assert t.decode(ids) == unicodedata.normalize('NFC', text)


def change(*path, to):
    def edit(file):
        for key in path[:-1]:
            file = file[key]
        file[path[-1]] = to
    return edit


REFUSED = {
    'no <|endoftext|>': change('added_tokens', 0, 'content', to='</s>'),
    'not BPE': change('model', 'type', to='Unigram'),
    'pre-tokenizer': change('pre_tokenizer', to={'type': 'Metaspace'}),
    "pre-tokenizer is {\"type\": \"ByteLevel\", \"add_prefix_space\": true": change(
        'pre_tokenizer', 'add_prefix_space', to=True),
    'normalizer is None': change('normalizer', to=None),
    'normalizer is NFKC': change('normalizer', to={'type': 'NFKC'}),
    'byte_fallback=True': change('model', 'byte_fallback', to=True),
    'uint16': change('model', 'vocab', 'many', to=100_000),
    'added runs': change('added_tokens', 4, 'content', to=' ' * 40),
    "adds the token '|||EMAIL|||'": lambda file: file['added_tokens'].append(
        {**file['added_tokens'][2], 'content': '|||EMAIL|||', 'id': 3000}),
    'order of their ids': lambda file: file['model']['merges'].reverse(),
    'lacks tokens for 1 bytes': lambda file: file['model']['vocab'].pop('!'),
    'KeyError': lambda file: file.pop('pre_tokenizer'),
}


@pytest.mark.parametrize('message', REFUSED)
def test_foreign_tokenizer_is_refused_by_name(message, folders, tmp_path):
    file = json.loads((folders['neox'] / 'tokenizer.json').read_text())
    REFUSED[message](file)
    (tmp_path / 'tokenizer.json').write_text(json.dumps(file))
    with pytest.raises(ValueError) as error:
        tokenizer.load(tmp_path)
    assert message in str(error.value) and str(tmp_path) in str(error.value) and '\n' not in str(error.value)


def test_what_is_not_there_is_said(tmp_path):
    (tmp_path / 'tokenizer.json').write_text('{"broken')
    with pytest.raises(ValueError, match='not a GPT-NeoX or GPT-2 tokenizer.json'):
        tokenizer.load(tmp_path)
    for name in (tmp_path / 'none.json', tmp_path / 'none', 'none', 'a/b/c'):
        with pytest.raises(ValueError, match='no tokenizer at'):
            tokenizer.load(name)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(ValueError, match='no tokenizer.json in'):
        tokenizer.load(tmp_path / 'empty')


def test_a_hub_id_is_fetched_and_failure_is_one_line(folders, monkeypatch):
    hub = pytest.importorskip('huggingface_hub')
    monkeypatch.setattr(hub, 'hf_hub_download', lambda name, file: str(folders['neox'] / file))
    assert tokenizer.load('someone/something').name == 'gpt-neox'

    def fail(*_):
        raise ConnectionError('no network\nsecond line')
    monkeypatch.setattr(hub, 'hf_hub_download', fail)
    with pytest.raises(OSError, match=r'someone/something.*no network\).*download it once') as error:
        tokenizer.load('someone/something')
    assert '\n' not in str(error.value)
