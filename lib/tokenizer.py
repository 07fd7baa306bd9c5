"""
Text <-> token ids, on tiktoken: the GPT-NeoX and GPT-2 vocabularies, from their tokenizer.json, and
raw bytes.

>>> t = tokenizer.load('data/slimpajama')        # a tokenizer.json, a folder with one, a hub id
>>> t.encode('Hello world')
array([12092,  1533], dtype=uint16)
>>> t.decode(t.encode('Hello world')), t.eot, t.n_vocab, t.name
('Hello world', 0, 50277, 'gpt-neox')

Ids are those of Hugging Face `tokenizers`, one by one, at over three times its speed on one core;
in rare orders of combining marks, which NFC sorts, Python's version of Unicode decides. One thing
differs on purpose: a special token spelled out in a text, like <|endoftext|>, stays
ordinary text. Data cannot inject a token; a prompt can, by encode(text, special=True).
"""

import hashlib
import itertools
import json
import re
import unicodedata
from pathlib import Path

import numpy as np

from lib.files import first_line, unreadable
from lib.hub import HUB_ID, hub_error

EOT = '<|endoftext|>'

# tiktoken's regex engine panics at about a million blanks in a row: longer runs than these are cut.
MAX_BLANKS = 200_000
LONG_BLANKS = re.compile(rf'(?<!\s)\s{{{MAX_BLANKS + 1},}}')

# GPT-2's way to cut a text into pieces, within which byte pairs merge. The possessive `++` is
# faster and changes nothing.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+"

# GPT-NeoX has tokens for runs of 2 to 24 spaces, taken out of the text before GPT-2's pattern sees
# it. In one pattern: such a run is a piece, and other white space ends where one begins. %d is the
# longest run.
NEOX_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| {2,%d}| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"
    r'|(?:(?!  )\s)+(?!\S)|(?:(?!  )\s)+'
)


def load(name_or_path):
    """
    The tokenizer `name_or_path`: a tokenizer.json, a folder with one, a hub id, or 'bytes'.

    Raises ValueError for a tokenizer.json that is not GPT-NeoX's or GPT-2's kind, and what
    find_file() raises.
    """
    if str(name_or_path) == 'bytes':
        return Bytes()
    path = find_file(name_or_path)
    return Bytes() if path.read_bytes() == Bytes.as_file() else BytePairs(path)


def find_file(name_or_path):
    """
    The Path of a tokenizer.json: itself, in a folder, or of a hub id, from which it is downloaded.

    Raises ValueError for a name that is neither a file nor a hub id, OSError when the hub cannot be read.
    """
    name, path = str(name_or_path), Path(name_or_path)
    if path.is_dir():
        path = path / 'tokenizer.json'
    if path.exists():
        return path

    # A folder, or the path of a file, is no hub id.
    if path.suffix == '.json' or not HUB_ID.fullmatch(name):
        raise ValueError(
            f'no tokenizer at {path}: give --tokenizer a tokenizer.json, a folder with one, a hub id '
            "such as openai-community/gpt2, or 'bytes'"
        )
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, 'tokenizer.json'))
    except Exception as error:  # the hub's client, and the one below it, have many ways to fail
        raise OSError(
            f'cannot get tokenizer.json of {name} from the hub ({hub_error(error)[0]}): download it '
            'once, and give --tokenizer its path, a folder that holds it, or another one'
        ) from error


class BytePairs:
    """
    A byte-level BPE from a tokenizer.json that is laid out like GPT-NeoX's (NFC, tokens for runs of
    spaces) or GPT-2's (no normalization).

    eot: id of <|endoftext|>; n_vocab: highest id + 1; n_text: likewise, of the ids of texts and of their
    end, which may be fewer; sha256: of the file; path: the file, from which load() makes it again.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.raw = self.path.read_bytes()
        self.sha256 = hashlib.sha256(self.raw).hexdigest()
        with unreadable(f'{path} is not a GPT-NeoX or GPT-2 tokenizer.json'):
            file = json.loads(self.raw)
            longest_run = check_layout(file)
            self.token_bytes, ranks = vocabulary(file)

        self.name = 'gpt-neox' if longest_run else 'gpt2'
        added = added_ids(file)
        self.eot = added[EOT]
        self.n_vocab = max(self.token_bytes) + 1
        self.n_text = max([*ranks.values(), self.eot]) + 1
        pattern = NEOX_PATTERN % longest_run if longest_run else GPT2_PATTERN
        # Training on prepared token files needs no tiktoken, so it is imported only here.
        import tiktoken

        self._tiktoken = tiktoken.Encoding(
            self.name,
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={text: i for text, i in added.items() if not text.isspace()},
        )

    def as_file(self):
        """The bytes of a tokenizer.json that makes it: those that were read, whatever the file holds
        by now."""
        return self.raw

    def encode(self, text, special=False):
        """str -> (n,) uint16 ids, without <|endoftext|>. special: whether a special token that the text
        spells out is that token.

        Lone surrogates, which are not text, become U+FFFD. Longer runs of white space are cut every
        200,000 characters (see MAX_BLANKS), the one place where ids may differ from Hugging Face's.
        """
        if self.name == 'gpt-neox':
            text = unicodedata.normalize('NFC', text)
        cuts = [0]
        for run in LONG_BLANKS.finditer(text):
            cuts += range(run.start(), run.end(), MAX_BLANKS)
        parts = []
        options = {'allowed_special': 'all' if special else set(), 'disallowed_special': ()}
        try:
            for start, end in itertools.pairwise([*cuts, len(text)]):
                parts.append(self._tiktoken.encode_to_numpy(text[start:end], **options))
        except UnicodeEncodeError:
            return self.encode(replace_surrogates(text), special)
        return np.concatenate(parts).astype(np.uint16)

    # For programs of other people: none of ours needs it.
    def encode_batch(self, texts):
        """Iterable of str -> list of what encode() gives for each."""
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        """Iterable of ids -> str: for ids of encode(s), s in NFC (GPT-2: s itself).

        Bytes that are not UTF-8 and ids outside the vocabulary (models pad theirs to a multiple of
        128) become U+FFFD.
        """
        raw = b''.join(self.token_bytes.get(int(i), b'\xff') for i in ids)
        return raw.decode('utf-8', errors='replace')


class Bytes:
    """UTF-8 bytes of the text in NFC as ids 0..255, and 256 for <|endoftext|>.

    Interface and errors are those of BytePairs.
    """

    name = 'bytes'
    eot = 256
    n_vocab = n_text = 257
    path = 'bytes'
    sha256 = hashlib.sha256(b'NFC, UTF-8 bytes, 256 = <|endoftext|>').hexdigest()
    token_bytes = {**{i: bytes([i]) for i in range(256)}, 256: EOT.encode()}

    def encode(self, text, special=False):
        text = replace_surrogates(unicodedata.normalize('NFC', text))
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    encode_batch = BytePairs.encode_batch
    decode = BytePairs.decode

    @staticmethod
    def as_file():
        """The same as a tokenizer.json, for other programs: a byte-level BPE without a merge."""
        level = {
            'type': 'ByteLevel',
            'add_prefix_space': False,
            'trim_offsets': True,
            'use_regex': False,
        }
        eot = {'id': 256, 'content': EOT, 'special': True}
        eot |= dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
        file = {
            'version': '1.0',
            'truncation': None,
            'padding': None,
            'added_tokens': [eot],
            'normalizer': {'type': 'NFC'},
            'pre_tokenizer': level,
            'post_processor': None,
            'decoder': level,
            'model': {'type': 'BPE', 'vocab': byte_alphabet(), 'merges': []},
        }
        return json.dumps(file, ensure_ascii=False).encode()


class Foreign:
    """
    Any other tokenizer.json, by Hugging Face's `tokenizers`: of a model that was imported. A text is
    encoded whole, whatever lengths the file asks for, behind the special tokens that the file puts
    before a text, and without those that it puts after one: a text goes on. No dataset is prepared
    with it.

    Interface as BytePairs; ids are int64. eot: the id that ends a text, which the file does not say.
    """

    name = 'foreign'

    def __init__(self, path, eot):
        from tokenizers import Tokenizer

        if eot is None:
            raise ValueError(
                'no eos_token_id in config.json or generation_config.json: it is unknown which token ends '
                'a text'
            )
        self.path, self.eot = Path(path), eot
        self.raw = self.path.read_bytes()
        self.sha256 = hashlib.sha256(self.raw).hexdigest()
        try:
            self.file = Tokenizer.from_str(self.raw.decode())
        except Exception as error:  # it raises nothing else
            raise ValueError(f'{path} is no tokenizer.json ({first_line(error)})') from error
        self.file.no_truncation()
        self.file.no_padding()
        self.n_vocab = max(self.file.get_vocab().values()) + 1
        self.n_text = max([*self.file.get_vocab(False).values(), eot]) + 1
        is_added = self.file.encode('a').special_tokens_mask
        self.after = sum(itertools.takewhile(bool, reversed(is_added)))  # how many it puts after

    as_file = BytePairs.as_file
    encode_batch = BytePairs.encode_batch

    def encode(self, text, special=False):
        self.file.encode_special_tokens = not special
        ids = self.file.encode(text).ids
        return np.array(ids[: len(ids) - self.after], dtype=np.int64)

    def decode(self, ids):
        # Behind a letter, because some decoders drop a space at the start of a text.
        letter = self.file.encode('a', add_special_tokens=False).ids
        start, whole = (
            self.file.decode(part, skip_special_tokens=False)
            for part in (letter, [*letter, *map(int, ids)])
        )
        return whole.removeprefix(start)


def replace_surrogates(text):
    """Pairs of surrogates joined, lone ones (JSON may spell them: "\\ud800") as U+FFFD."""
    if text.isascii():
        return text
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


# ---- tokenizer.json ------------------------------------------------------------------------------


def byte_alphabet():
    """{character: byte}: GPT-2's printable stand-ins for bytes, as vocabularies spell them."""
    alphabet = {}
    for first, last in ('!~', '¡¬', '®ÿ'):
        for byte in range(ord(first), ord(last) + 1):
            alphabet[chr(byte)] = byte
    for byte in range(256):
        if chr(byte) not in alphabet:
            # The other 68 follow from 256 on.
            alphabet[chr(256 - 188 + len(alphabet))] = byte
    return alphabet


def check_layout(file):
    """The longest run of spaces that has a token in a parsed tokenizer.json, or 0 (GPT-2's kind).

    Raises ValueError, which says what does not fit: a tokenizer that is almost one of ours would
    give almost the right ids.
    """
    model = file['model']
    options = {name for name, value in model.items() if value} - {'type', 'vocab', 'merges'}
    if model.get('type', 'BPE') != 'BPE' or options:
        raise ValueError(f'its model is {model.get("type")} with {options or "no options"}')

    level = file['pre_tokenizer'] or {}
    byte_level = level.get('type') == 'ByteLevel' and level.get('use_regex', True)
    if not byte_level or level.get('add_prefix_space'):
        raise ValueError(f'its pre-tokenizer is {json.dumps(level)[:200]}')

    runs = []
    for token in file['added_tokens']:
        text = token['content']
        if not text.strip(' '):
            runs.append(len(text))
        elif not token['special'] or token['lstrip'] or token['rstrip'] or token['single_word']:
            raise ValueError(f'it adds the token {text!r}')
    if EOT not in added_ids(file):
        raise ValueError(f'it has no {EOT}')
    # GPT-NeoX: NFC, and every run from two spaces on. GPT-2: neither.
    normalizer = (file['normalizer'] or {}).get('type')
    runs.sort()
    if normalizer != ('NFC' if runs else None) or runs != list(range(2, len(runs) + 2)):
        raise ValueError(f'its normalizer is {normalizer}, its added runs of spaces are {runs}')
    return max(runs, default=0)


def vocabulary(file):
    """{id: bytes} of every token of a parsed tokenizer.json, and tiktoken's {bytes: rank}.

    Raises ValueError for ids that two tokens share or that do not fit a uint16, KeyError for a token
    that is not spelled in GPT-2's characters for bytes.
    """
    byte_of = byte_alphabet()
    added = added_ids(file)
    vocab = dict(file['model']['vocab'])
    for text in added:
        vocab.pop(text, None)
    tokens = {}
    for text, i in [*vocab.items(), *added.items()]:
        if type(i) is not int or not 0 <= i < 2**16:
            raise ValueError(f'its token {text!r} has the id {i!r}, which is no uint16')
        # With the id of <|endoftext|> for a second token, data could inject it.
        if i in tokens:
            raise ValueError(f'its token {text!r} has the id {i} of another one')
        tokens[i] = text.encode() if text in added else bytes(byte_of[c] for c in text)

    # Runs of spaces are in the vocabulary, too; the added tokens, which come last, are those in use.
    used = [*vocab.values(), *(i for text, i in added.items() if text.isspace())]
    ranks = {tokens[i]: i for i in used}
    check_ranks(file, vocab, ranks)
    return tokens, ranks


def check_ranks(file, vocab, ranks):
    """Refuse merges that tiktoken would not make, or in another order, and missing bytes."""
    # tiktoken takes ids for ranks: the merges must make the vocabulary in the order of the ids.
    pairs = file['model']['merges']
    pairs = [pair.split(' ') if isinstance(pair, str) else list(pair) for pair in pairs]
    merged = [''.join(pair) for pair in pairs]
    if merged != sorted((text for text in vocab if len(text) > 1), key=vocab.get):
        raise ValueError('its merges are not its vocabulary in the order of the ids')
    # And it joins any two tokens that make a third, where other programs join the pairs of the file. A
    # token comes about in one way: tokens beside it do not matter as long as they do not join with a
    # part of it. So the ids are the same where that way ends in the pair of the file.
    order = {text: number for number, text in enumerate(merged)}
    for pair in pairs:
        parts = last_parts(''.join(pair), order)
        if parts != pair:
            raise ValueError(f'it merges {pair}, where the order of the ids makes {parts} first')

    # The others never occur in UTF-8.
    for byte in [*range(0xC0), *range(0xC2, 0xF5)]:
        if bytes([byte]) not in ranks:
            raise ValueError(f'it lacks a token for the byte {byte}')


def last_parts(text, order):
    """What is left of a token's characters when those that come first in `order` are merged, up to the
    last two parts."""
    parts = list(text)
    while len(parts) > 2:
        places = [order.get(a + b, len(order)) for a, b in itertools.pairwise(parts)]
        first = min(places)
        if first == len(order):
            break
        at = places.index(first)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def added_ids(file):
    """{text: id} of the tokens that a parsed tokenizer.json adds to its vocabulary."""
    return {token['content']: token['id'] for token in file['added_tokens']}
