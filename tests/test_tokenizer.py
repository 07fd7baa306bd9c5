"""
lib/tokenizer.py: ids equal those of Hugging Face `tokenizers` one by one, text comes back in NFC, and
look-alikes are refused.
"""

import argparse
import functools
import inspect
import json
import random
import typing
import unicodedata

import numpy as np
import pytest
from conftest import raises_one_line, read_json, write_json
from programs import NEOX, needs_neox, small_bpe, train_bpe

from lib import tokenizer
from lib.files import sha256_of

hf = pytest.importorskip('tokenizers')

UNICODE = (
    'naïve Ångström — “quotes” … ½ ²³ ٣٤ Ⅷ e\u0301 n\u0303 \u1112\u1161\u11ab 日本語の文章 中文 '
    '한국어 हिन्दी עברית 😀👨\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 \ufeff \u00a0 \u2003 \u3000 \x85 '
    '\u2028 \x1c \x0b \ufffd \ufb01 ſ ẛ̣ '
)


TEXTS = [inspect.getsource(argparse), inspect.getsource(typing), UNICODE * 9]


@pytest.fixture(scope='session')
def folders(tmp_path_factory):
    tmp = tmp_path_factory.mktemp('tokenizers')
    return {
        'neox': train_bpe(tmp / 'neox', TEXTS, 2000, neox=True),
        'gpt2': train_bpe(tmp / 'gpt2', TEXTS, 2000),
        'real': NEOX.parent,
    }


@pytest.fixture(scope='session')
def load(folders):
    """load(name): our tokenizer of that folder, or 'bytes'; each is loaded once."""
    return functools.cache(lambda name: tokenizer.load(folders.get(name, name)))


# ---- Ids and text --------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['neox', 'gpt2', pytest.param('real', marks=needs_neox)])
def test_fuzzed_ids_equal_hugging_face(name, folders, load):
    """Of awkward characters, runs of blanks, and pieces of words."""
    ours, theirs = load(name), hf.Tokenizer.from_file(str(folders[name] / 'tokenizer.json'))
    blanks = ' \t\n\r\x0b\x0c\x1c\x85\u00a0\u2003\u2028\u3000'
    runs = [blank * n for blank in blanks for n in (1, 1, 2, 3, 23, 24, 25, 26, 48, 49)]
    words = "'s 't 're 've 'm 'll 'd 'S ' '' 12 1234 _ == <| |> endoftext def return".split()
    pieces = [*UNICODE, *runs, *words]
    rng = random.Random(0)
    texts = [''.join(rng.choices(pieces, k=n % 30)) for n in range(2000)]
    texts = [text for text in texts if '<|endoftext|>' not in text and '<|padding|>' not in text]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids.dtype == np.uint16
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        back = text if ours.name == 'gpt2' else unicodedata.normalize('NFC', text)
        assert ours.decode(ids) == back


def test_small_vocabularies_are_described(load):
    neox, gpt2 = load('neox'), load('gpt2')
    assert (neox.name, neox.eot, neox.sha256) == ('gpt-neox', 0, sha256_of(neox.path))
    assert (gpt2.name, gpt2.eot) == ('gpt2', gpt2.n_vocab - 1)
    # What a prompt may spell, and a text may not.
    assert neox.encode('<|padding|>', special=True).tolist() == [1]


@pytest.mark.parametrize('name', ['neox', 'gpt2', 'bytes'])
def test_text_cannot_inject_a_token(name, load):
    t = load(name)
    text = 'a<|endoftext|><|padding|>b' * 3
    assert t.eot not in t.encode(text)
    assert t.decode(t.encode(text)) == text
    assert t.decode([*t.encode('a'), t.eot]) == 'a<|endoftext|>'


@pytest.mark.parametrize('name', ['neox', 'gpt2', 'bytes'])
def test_surrogates_and_unknown_ids_become_replacement_characters(name, load):
    t = load(name)
    assert t.decode(t.encode(json.loads(r'"a\ud800b\udc00"'))) == 'a\ufffdb\ufffd'
    # A pair of surrogates, as UTF-16 has it, is a character.
    assert t.decode(t.encode('a\ud83d\ude00')) == 'a😀'
    assert t.decode([t.n_vocab + 5, *t.encode('a')]) == '\ufffda'
    assert t.decode(t.encode('é')[:1]) in ('é', '\ufffd')

    assert t.encode('').tolist() == []
    assert t.decode([]) == ''
    assert t.encode_batch([]) == []


@pytest.mark.parametrize('name', ['neox', 'gpt2'])
def test_a_million_blanks_do_not_stop_it(name, load):
    """tiktoken's regex engine panics on them."""
    t = load(name)
    n = 1_100_000
    for text in ('x ' + '\n \t' * (n // 3), ' ' * n):
        assert t.decode(t.encode(text)) == text


def test_a_tokenizer_writes_the_file_that_it_was_read_from_even_when_that_has_changed(tmp_path):
    """Preparation reads it at the start, and writes its copy hours later."""
    path = small_bpe(tmp_path / 'bpe').path
    whole = path.read_bytes()
    ours = tokenizer.load(path)
    path.write_text('{}')
    assert ours.as_file() == whole and sha256_of(path) != ours.sha256


# ---- What is refused -----------------------------------------------------------------------------


def change(*keys, to):
    """What sets the entry of a parsed tokenizer.json to which `keys` lead."""

    def edit(file):
        for key in keys[:-1]:
            file = file[key]
        file[keys[-1]] = to

    return edit


def add_email(file):
    token = {**file['added_tokens'][2], 'content': '|||EMAIL|||', 'id': 3000}
    file['added_tokens'].append(token)


def give_eot_the_id_of_a_letter(file):
    del file['model']['vocab']['<|endoftext|>']
    file['added_tokens'][0]['id'] = file['model']['vocab']['A']


def merge_another_way(file):
    """ "many" of "m" and "any", which the letters never become."""
    vocab, model = {}, file['model']
    model['merges'] = []
    for text, number in model['vocab'].items():
        if len(text) < 2 or text.startswith('<'):
            vocab[text] = number
    for left, right in (('a', 'n'), ('m', 'an'), ('an', 'y'), ('m', 'any')):
        vocab[left + right] = 1000 + len(model['merges'])
        model['merges'].append([left, right])
    model['vocab'] = vocab


REFUSED = [
    ("['m', 'any']", merge_another_way),
    ('<|endoftext|>', change('added_tokens', 0, 'content', to='</s>')),
    ('Unigram', change('model', 'type', to='Unigram')),
    ('byte_fallback', change('model', 'byte_fallback', to=True)),
    ('"add_prefix_space": true', change('pre_tokenizer', 'add_prefix_space', to=True)),
    ('normalizer is None', change('normalizer', to=None)),
    ('runs of spaces', change('added_tokens', 4, 'content', to=' ' * 40)),
    ('|||EMAIL|||', add_email),
    ("'many' has the id 100000", change('model', 'vocab', 'many', to=100_000)),
    ("'<|endoftext|>' has the id 34", give_eot_the_id_of_a_letter),
    ('中', change('model', 'vocab', '中', to=3000)),
    ('order', lambda file: file['model']['merges'].reverse()),
    ('byte 33', lambda file: file['model']['vocab'].pop('!')),
    ('pre_tokenizer', lambda file: file.pop('pre_tokenizer')),
]


@pytest.mark.parametrize('word, edit', REFUSED)
def test_foreign_tokenizer_is_refused_by_name(word, edit, folders, tmp_path):
    file = read_json(folders['neox'] / 'tokenizer.json')
    edit(file)
    write_json(tmp_path / 'tokenizer.json', file)
    with raises_one_line(tmp_path, word):
        tokenizer.load(tmp_path)


def test_what_is_not_there_is_said(tmp_path):
    for text in ('{"broken', '[' * 200_000):
        (tmp_path / 'tokenizer.json').write_text(text)
        with raises_one_line('tokenizer.json is not a GPT-NeoX or GPT-2'):
            tokenizer.load(tmp_path)
    (tmp_path / 'empty').mkdir()
    for name in (tmp_path / 'none.json', tmp_path / 'none', tmp_path / 'empty', 'none', 'a/b/c'):
        with raises_one_line(f'no tokenizer at {name}'):
            tokenizer.load(name)


def test_a_hub_id_is_fetched_and_a_hub_that_fails_is_one_line(folders, monkeypatch):
    hub = pytest.importorskip('huggingface_hub')
    monkeypatch.setattr(hub, 'hf_hub_download', lambda name, file: str(folders['neox'] / file))
    assert tokenizer.load('someone/something').name == 'gpt-neox'

    def fail(*_):
        # The hub's client raises Exceptions of no kind that Python itself has.
        raise Exception('403 Client Error. (Request ID: 1)\n\nCannot access gated repo\nmore')

    monkeypatch.setattr(hub, 'hf_hub_download', fail)
    with raises_one_line('someone/something', 'gated', 'more'):
        tokenizer.load('someone/something')
