"""
Text <-> token ids, on tiktoken: the GPT-NeoX and GPT-2 vocabularies, from their tokenizer.json, and
raw bytes.

>>> t = tokenizer.load('data/slimpajama')        # a tokenizer.json, a folder with one, a hub id
>>> t.encode('Hello world')
array([12092,  1533], dtype=uint16)
>>> t.decode(t.encode('Hello world')), t.eot, t.n_vocab, t.name
('Hello world', 0, 50277, 'gpt-neox')

Ids are those of Hugging Face `tokenizers`, one by one, at over three times its speed on one core.
One thing differs on purpose: a special token spelled out in a text, like <|endoftext|>, stays
ordinary text. Data cannot inject a token.
"""

import hashlib
import itertools
import json
import re
import unicodedata
from pathlib import Path

import numpy as np

from configurator import first_line

EOT = '<|endoftext|>'

# The id of a repository on the Hugging Face hub.
HUB_ID = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*')

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

    Raises ValueError for a tokenizer.json that is not GPT-NeoX's or GPT-2's kind, and for a name
    that is neither a file nor a hub id; OSError when the hub cannot be read.
    """
    name = str(name_or_path)
    if name == 'bytes':
        return Bytes()

    path = Path(name)
    if path.is_dir():
        if not (path / 'tokenizer.json').is_file():
            raise ValueError(
                f'no tokenizer.json in {path}: '
                "give a folder that holds one, the file, a hub id, or 'bytes'"
            )
        path = path / 'tokenizer.json'
    if path.exists():
        ours = Bytes.as_file()
        return Bytes() if path.read_bytes() == ours else BytePairs(path)

    if path.suffix == '.json' or not HUB_ID.fullmatch(name):
        raise ValueError(
            f'no tokenizer at {path}: '
            "give a tokenizer.json, a folder with one, a hub id, or 'bytes'"
        )
    return BytePairs(download(name))


def download(name):
    """The path of the tokenizer.json of a hub repository."""
    try:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(name, 'tokenizer.json')
    except Exception as error:  # the hub's client, and the one below it, have many ways to fail
        raise OSError(
            f'cannot get tokenizer.json of {name} from the hub ({first_line(error)}): '
            'download it once and give its path, or a folder that holds it'
        ) from error


class BytePairs:
    """
    A byte-level BPE from a tokenizer.json that is laid out like GPT-NeoX's (NFC, tokens for runs of
    spaces) or GPT-2's (no normalization).

    eot: id of <|endoftext|>; n_vocab: highest id + 1; sha256: of the file; path: the file.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.raw = self.path.read_bytes()
        self.sha256 = hashlib.sha256(self.raw).hexdigest()
        try:
            file = json.loads(self.raw)
            self.name, longest_run = recognize(file)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            # The message of a KeyError is nothing but the key.
            reason = f'KeyError: {error}' if isinstance(error, KeyError) else error
            raise ValueError(
                f'{path} is not a GPT-NeoX or GPT-2 tokenizer.json: {reason}'
            ) from error

        self.token_bytes, ranks = vocabulary(file)
        self.eot = added_ids(file)[EOT]
        self.n_vocab = max(self.token_bytes) + 1
        pattern = NEOX_PATTERN % longest_run if longest_run else GPT2_PATTERN
        # Training on prepared token files needs no tiktoken, so it is imported only here.
        try:
            import tiktoken
        except ImportError:
            raise OSError(f'{self.name} text needs tiktoken: pip install tiktoken') from None
        self._tiktoken = tiktoken.Encoding(
            self.name,
            pat_str=pattern,
            mergeable_ranks=ranks,
            # encode_to_numpy needs a special token to look for; encode() below turns it off.
            special_tokens={EOT: self.eot},
        )

    def as_file(self):
        """The bytes of a tokenizer.json that makes it: those that were read, whatever the file holds
        by now."""
        return self.raw

    def encode(self, text):
        """str -> (n,) uint16 ids, without <|endoftext|>.

        Lone surrogates, which are not text, become U+FFFD. White space is cut every 200,000
        characters (see MAX_BLANKS), the one place where ids may differ from Hugging Face's.
        """
        if self.name == 'gpt-neox':
            text = unicodedata.normalize('NFC', text)
        if len(text) <= MAX_BLANKS:
            return self._encode(text)

        cuts = [0]
        for run in LONG_BLANKS.finditer(text):
            cuts += range(run.start(), run.end(), MAX_BLANKS)
        cuts.append(len(text))
        parts = [self._encode(text[start:end]) for start, end in itertools.pairwise(cuts)]
        return np.concatenate(parts)

    def _encode(self, text):
        try:
            ids = self._tiktoken.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            text = replace_surrogates(text)
            ids = self._tiktoken.encode_to_numpy(text, disallowed_special=())
        return ids.astype(np.uint16)

    def encode_batch(self, texts):
        """Iterable of str -> list of uint16 arrays, on one thread.

        Parallel programs start one process per core instead.
        """
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
    n_vocab = 257
    path = None
    sha256 = hashlib.sha256(b'NFC, UTF-8 bytes, 256 = <|endoftext|>').hexdigest()

    def encode(self, text):
        text = replace_surrogates(unicodedata.normalize('NFC', text))
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    encode_batch = BytePairs.encode_batch

    def decode(self, ids):
        raw = b''.join(self.token(int(i)) for i in ids)
        return raw.decode('utf-8', errors='replace')

    def token(self, i):
        if i < 256:
            return bytes([i])
        return EOT.encode() if i == 256 else b'\xff'

    @staticmethod
    def as_file():
        return json.dumps(Bytes.json(), ensure_ascii=False).encode()

    @staticmethod
    def json():
        """The same as a tokenizer.json, for other programs: a byte-level BPE without a merge."""
        level = {
            'type': 'ByteLevel',
            'add_prefix_space': False,
            'trim_offsets': True,
            'use_regex': False,
        }
        eot = {
            'id': 256,
            'content': EOT,
            'special': True,
            'single_word': False,
            'lstrip': False,
            'rstrip': False,
            'normalized': False,
        }
        vocab = {character: byte for byte, character in byte_alphabet().items()}
        return {
            'version': '1.0',
            'truncation': None,
            'padding': None,
            'added_tokens': [eot],
            'normalizer': {'type': 'NFC'},
            'pre_tokenizer': level,
            'post_processor': None,
            'decoder': level,
            'model': {'type': 'BPE', 'vocab': vocab, 'merges': []},
        }


def replace_surrogates(text):
    """Pairs of surrogates joined, lone ones (JSON may spell them: "\\ud800") as U+FFFD."""
    if text.isascii():
        return text
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


# ---- tokenizer.json ------------------------------------------------------------------------------


def byte_alphabet():
    """{byte: character}: GPT-2's printable stand-ins for bytes, as vocabularies spell them."""
    alphabet = {}
    for first, last in ('!~', '¡¬', '®ÿ'):
        for byte in range(ord(first), ord(last) + 1):
            alphabet[byte] = chr(byte)

    others = [byte for byte in range(256) if byte not in alphabet]
    for n, byte in enumerate(others):
        alphabet[byte] = chr(256 + n)
    return alphabet


def vocabulary(file):
    """{id: bytes} of every token of a parsed tokenizer.json, and tiktoken's {bytes: rank}."""
    byte_of = {character: byte for byte, character in byte_alphabet().items()}
    added = added_ids(file)

    tokens = {}
    for text, i in file['model']['vocab'].items():
        if text not in added:
            tokens[i] = bytes(byte_of[character] for character in text)
    ranks = {token: i for i, token in tokens.items()}

    for text, i in added.items():
        tokens[i] = text.encode()
        if text.isspace():
            # The vocabulary has the same string, too; the added token is the one in use.
            ranks[text.encode()] = i
    return tokens, ranks


def added_ids(file):
    """{text: id} of the tokens that a parsed tokenizer.json adds to its vocabulary."""
    return {token['content']: token['id'] for token in file['added_tokens']}


def recognize(file):
    """The name of a parsed tokenizer.json's kind, and its longest run of spaces with a token, or 0.

    Raises ValueError, which says what does not fit: a tokenizer that is almost one of ours would
    give almost the right ids.
    """
    check_model(file['model'], file['pre_tokenizer'] or {})
    longest_run = check_added_tokens(file)
    check_ids(file)
    return ('gpt-neox' if longest_run else 'gpt2'), longest_run


def check_model(model, pre_tokenizer):
    if model.get('type', 'BPE') != 'BPE':
        raise ValueError(f'its model is {model["type"]}, not BPE')
    if not model.get('merges'):
        raise ValueError('its BPE model has no merges')

    byte_level = pre_tokenizer.get('type') == 'ByteLevel' and pre_tokenizer.get('use_regex', True)
    if not byte_level or pre_tokenizer.get('add_prefix_space'):
        raise ValueError(f'its pre-tokenizer is {json.dumps(pre_tokenizer)[:200]}')

    for option in (
        'dropout',
        'unk_token',
        'continuing_subword_prefix',
        'end_of_word_suffix',
        'fuse_unk',
        'byte_fallback',
        'ignore_merges',
    ):
        if model.get(option):
            raise ValueError(f'its BPE has {option}={model[option]!r}')


def check_added_tokens(file):
    """Returns the longest run of spaces that has a token of its own, or 0."""
    added = {token['content']: token for token in file['added_tokens']}
    for text, token in added.items():
        ordinary = text.strip(' ') and not token['special']
        if ordinary or token['lstrip'] or token['rstrip'] or token['single_word']:
            raise ValueError(f'it adds the token {text!r}')
    if EOT not in added:
        raise ValueError(f'it has no {EOT}')

    # GPT-NeoX: NFC, and every run from two spaces on. GPT-2: neither.
    normalizer = (file['normalizer'] or {}).get('type')
    runs = sorted(len(text) for text in added if not text.strip(' '))
    layout = 'NFC' if runs else None
    if normalizer != layout or runs != list(range(2, len(runs) + 2)):
        raise ValueError(f'its normalizer is {normalizer}, its added runs of spaces are {runs}')
    return max(runs, default=0)


def check_ids(file):
    """Refuse ids that two tokens share or that do not fit a uint16, tokens that are not bytes, and
    merges that tiktoken would make in another order."""
    vocab = file['model']['vocab']
    added = added_ids(file)
    # With the id of <|endoftext|> for a second token, data could inject it.
    texts = {}
    for text, i in itertools.chain(vocab.items(), added.items()):
        if type(i) is not int or i < 0:
            raise ValueError(f'its token {text!r} has the id {i!r}')
        if texts.setdefault(i, text) != text:
            raise ValueError(f'its tokens {texts[i]!r} and {text!r} have the same id, {i}')
    top = max([*vocab.values(), *added.values()])
    if top > 65_535:
        raise ValueError(f'it has {top + 1:,} ids, and a uint16 holds 65,536')

    # tiktoken takes ids for ranks: the merges must be listed in the order of the ids they make.
    ids = []
    for merge in file['model']['merges']:
        left, right = merge.split(' ') if isinstance(merge, str) else merge
        ids.append(vocab[left + right])
    if any(first >= second for first, second in itertools.pairwise(ids)):
        raise ValueError('its merges are not in the order of their ids')

    alphabet = byte_alphabet()
    characters = set(alphabet.values())
    for text in vocab:
        if text not in added and not characters.issuperset(text):
            raise ValueError(f"its token {text!r} is not spelled in GPT-2's characters for bytes")

    # These bytes never occur in UTF-8.
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    missing = []
    for byte, character in alphabet.items():
        if byte not in never and character not in vocab:
            missing.append(byte)
    if missing:
        raise ValueError(f'it lacks tokens for {len(missing)} bytes')
