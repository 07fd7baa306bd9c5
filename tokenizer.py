"""
Text <-> token ids, on tiktoken: the GPT-NeoX and GPT-2 vocabularies, from their tokenizer.json, and raw bytes.

>>> t = tokenizer.load('data/slimpajama')           # a tokenizer.json, a folder that holds one, or a hub id
>>> t.encode('Hello world')
array([12092,  1533], dtype=uint16)
>>> t.decode(t.encode('Hello world')), t.eot, t.n_vocab, t.name
('Hello world', 0, 50277, 'gpt-neox')

Ids are those of Hugging Face `tokenizers`, one by one, at over three times its speed on one core. One thing differs
on purpose: a special token spelled out in a text, like <|endoftext|>, stays ordinary text. Data cannot inject a token.
"""
import hashlib
import itertools
import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import tiktoken

EOT = '<|endoftext|>'
MAX_BLANKS = 200_000  # tiktoken's regex engine panics at about a million blanks in a row: longer runs are cut
LONG_BLANKS = re.compile(rf'(?<!\s)\s{{{MAX_BLANKS + 1},}}')

# GPT-2's way to cut a text into pieces, within which byte pairs merge (possessive `++` is faster and changes nothing)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+"
# GPT-NeoX has tokens for runs of 2 to 24 spaces, taken out of the text before GPT-2's pattern sees it. In one pattern:
# such a run is a piece, and other white space ends where one begins. %d is the longest run.
NEOX_PATTERN = (r"'(?:[sdmt]|ll|ve|re)| {2,%d}| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"
                r"|(?:(?!  )\s)+(?!\S)|(?:(?!  )\s)+")


def load(name_or_path):
    """
    The tokenizer `name_or_path`: a tokenizer.json, a folder that holds one, a Hugging Face hub id, or 'bytes'.

    Raises ValueError for a tokenizer.json that is not GPT-NeoX's or GPT-2's kind, and for a name that is neither
    a file nor a hub id; OSError when the hub cannot be read.
    """
    if str(name_or_path) == 'bytes':
        return Bytes()
    path = Path(name_or_path)
    if path.is_dir() and not (path / 'tokenizer.json').is_file():
        raise ValueError(f"no tokenizer.json in {path}: give a folder that holds one, the file, a hub id, or 'bytes'")
    if path.exists():
        path = path / 'tokenizer.json' if path.is_dir() else path
        ours = path.read_bytes() == json.dumps(Bytes.json(), ensure_ascii=False).encode()
        return Bytes() if ours else BytePairs(path)
    if not re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', str(name_or_path)) or path.suffix == '.json':
        raise ValueError(f"no tokenizer at {path}: give a tokenizer.json, a folder with one, a hub id, or 'bytes'")
    try:
        from huggingface_hub import hf_hub_download
        return BytePairs(hf_hub_download(str(name_or_path), 'tokenizer.json'))
    except (ImportError, OSError, RuntimeError) as error:  # what the hub's client may raise on its many ways to fail
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(f'cannot get tokenizer.json of {name_or_path} from the hub ({reason}): download it once and '
                      f'give its path, or a folder that holds it') from error


class BytePairs:
    """A byte-level BPE from a tokenizer.json, laid out like GPT-NeoX's (NFC, tokens for runs of spaces) or GPT-2's
    (no normalization). `eot`: id of <|endoftext|>; `n_vocab`: highest id + 1; `sha256`: of the file; `path`: the file.
    """

    def __init__(self, path):
        self.path = Path(path)
        raw = self.path.read_bytes()
        self.sha256 = hashlib.sha256(raw).hexdigest()
        try:
            file = json.loads(raw)
            self.name, longest_run = recognize(file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            detail = f'{type(error).__name__}: {error}' if isinstance(error, KeyError) else error
            raise ValueError(f'{path} is not a GPT-NeoX or GPT-2 tokenizer.json: {detail}') from error

        unicode_to_byte = {c: b for b, c in byte_alphabet().items()}
        added = {token['content']: token['id'] for token in file['added_tokens']}
        vocab = {text: i for text, i in file['model']['vocab'].items() if text not in added}
        self.token_bytes = {i: bytes(unicode_to_byte[c] for c in text) for text, i in vocab.items()}
        ranks = {token: i for i, token in self.token_bytes.items()}
        for text, i in added.items():
            self.token_bytes[i] = text.encode()
            if text.isspace():  # the same string is in the vocabulary, too; the added token is the one in use
                ranks[text.encode()] = i
        self.eot = added[EOT]
        self.n_vocab = max(self.token_bytes) + 1
        pattern = NEOX_PATTERN % longest_run if longest_run else GPT2_PATTERN
        # encode_to_numpy needs a special token to look for; encode() below never lets it act
        self._tiktoken = tiktoken.Encoding(self.name, pat_str=pattern, mergeable_ranks=ranks,
                                           special_tokens={EOT: self.eot})

    def encode(self, text):
        """str -> (n,) uint16 ids, without <|endoftext|>. Lone surrogates, which are not text, become U+FFFD.
        White space is cut every 200,000 characters (see MAX_BLANKS), the one place where ids may differ from HF's."""
        if self.name == 'gpt-neox':
            text = unicodedata.normalize('NFC', text)
        if len(text) > MAX_BLANKS:
            cuts = [cut for run in LONG_BLANKS.finditer(text) for cut in range(run.start(), run.end(), MAX_BLANKS)]
            if cuts:
                parts = (text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)]))
                return np.concatenate([self._encode(part) for part in parts])
        return self._encode(text)

    def _encode(self, text):
        try:
            ids = self._tiktoken.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            ids = self._tiktoken.encode_to_numpy(replace_surrogates(text), disallowed_special=())
        return ids.astype(np.uint16)

    def encode_batch(self, texts):
        """Iterable of str -> list of uint16 arrays, on one thread: parallel programs start one process per core."""
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        """Iterable of ids -> str: for ids of encode(s), s in NFC (GPT-2: s itself). Bytes that are not UTF-8 and ids
        outside the vocabulary (models pad theirs to a multiple of 128) become U+FFFD."""
        return b''.join(self.token_bytes.get(int(i), b'\xff') for i in ids).decode('utf-8', errors='replace')


class Bytes:
    """UTF-8 bytes of the text in NFC as ids 0..255, and 256 for <|endoftext|>. Interface and errors as in BytePairs."""
    name, eot, n_vocab, path = 'bytes', 256, 257, None
    sha256 = hashlib.sha256(b'NFC, UTF-8 bytes, 256 = <|endoftext|>').hexdigest()

    def encode(self, text):
        text = replace_surrogates(unicodedata.normalize('NFC', text))
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    encode_batch = BytePairs.encode_batch

    @staticmethod
    def json():
        """The same as a tokenizer.json, for other programs: a byte-level BPE without a merge."""
        level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
        eot = {'id': 256, 'content': EOT, 'special': True,
               **dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)}
        return {'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': [eot],
                'normalizer': {'type': 'NFC'}, 'pre_tokenizer': level, 'post_processor': None, 'decoder': level,
                'model': {'type': 'BPE', 'vocab': {c: b for b, c in byte_alphabet().items()}, 'merges': []}}

    def decode(self, ids):
        tokens = (bytes([i]) if i < 256 else EOT.encode() if i == 256 else b'\xff' for i in map(int, ids))
        return b''.join(tokens).decode('utf-8', errors='replace')


def replace_surrogates(text):
    """Pairs of surrogates joined, lone ones (JSON may spell them: "\\ud800") as U+FFFD."""
    return text if text.isascii() else text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def recognize(file):
    """(name, longest run of spaces with a token of its own, or 0) of a parsed tokenizer.json. ValueError says what
    does not fit: a tokenizer that is almost one of ours would give almost the right ids."""
    model, pre, normalizer = file['model'], file['pre_tokenizer'] or {}, (file['normalizer'] or {}).get('type')
    if model.get('type', 'BPE') != 'BPE' or not model.get('merges'):
        raise ValueError(f"its model is {model.get('type')}, not BPE")
    if pre.get('type') != 'ByteLevel' or pre.get('add_prefix_space') or not pre.get('use_regex', True):
        raise ValueError(f'its pre-tokenizer is {json.dumps(pre)[:200]}')
    options = ('dropout', 'unk_token', 'continuing_subword_prefix', 'end_of_word_suffix', 'fuse_unk', 'byte_fallback',
               'ignore_merges')
    if used := [option for option in options if model.get(option)]:
        raise ValueError(f'its BPE has {used[0]}={model[used[0]]!r}')

    added = {token['content']: token for token in file['added_tokens']}
    runs = sorted(len(text) for text in added if not text.strip(' '))
    for text, token in added.items():
        if text.strip(' ') and not token['special'] or token['lstrip'] or token['rstrip'] or token['single_word']:
            raise ValueError(f'it adds the token {text!r}')
    if EOT not in added:
        raise ValueError(f'it has no {EOT}')
    if (normalizer, bool(runs)) not in (('NFC', True), (None, False)) or runs != list(range(2, len(runs) + 2)):
        raise ValueError(f'its normalizer is {normalizer}, its added runs of spaces are {runs}')

    vocab = model['vocab']
    top = max(max(vocab.values()), max(token['id'] for token in added.values()))
    if top > 65_535:
        raise ValueError(f'it has {top + 1:,} ids, and a uint16 holds 65,536')
    # tiktoken takes ids for ranks: the merges must be listed in the order of the ids they make
    pairs = [merge.split(' ') if isinstance(merge, str) else merge for merge in model['merges']]
    made = [vocab[left + right] for left, right in pairs]
    if any(a >= b for a, b in itertools.pairwise(made)):
        raise ValueError('its merges are not in the order of their ids')
    utf8 = {c for b, c in byte_alphabet().items() if b not in (0xC0, 0xC1) and b < 0xF5}
    if missing := utf8 - set(vocab):
        raise ValueError(f'it lacks tokens for {len(missing)} bytes')
    return ('gpt-neox' if runs else 'gpt2'), max(runs, default=0)


def byte_alphabet():
    """{byte: character}: GPT-2's printable stand-ins for the 256 bytes, in which vocabularies are written."""
    printable = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
