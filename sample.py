"""
Text from a checkpoint, through the KV cache.

$ python sample.py --out_dir=out/demo/resformer --start="def main("
$ python sample.py --out_dir=out/resformer_82m --start=FILE:prompt.txt --num_samples=4 --top_k=50 --top_p=0.9
$ echo "Once upon a time" | python sample.py --out_dir=out/resformer_82m --start=- --temperature=0
"""
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import tokenizer as tokenizers
from configurator import configure, one_line_errors
from data import load_checkpoint, stranger
from model import GPT, GPTConfig
from train import Machine, TrainConfig


@dataclass
class SampleConfig:
    out_dir: str = 'out/run'  # a run's folder, one checkpoint file, or a Hugging Face folder
    start: str = ''  # the prompt; FILE:path reads a file, - standard input; '': the model begins a document
    num_samples: int = 1  # continuations, made as one batch; one alone is printed as it comes
    max_new_tokens: int = 200  # tokens of each; it ends earlier at <|endoftext|>, or where the context is full
    temperature: float = 0.8  # 0: greedy
    top_k: int = 0  # sample from the k likeliest tokens only; 0: from all
    top_p: float = 1.0  # sample from the fewest tokens that have this much of the probability
    seed: int = 1337  # of the sampling
    device: str = 'auto'  # as in train.py
    tokenizer: str = ''  # as in prepare_slimpajama.py; '': the one of the run's dataset

    def __post_init__(self):
        if self.num_samples < 1 or self.max_new_tokens < 1:
            raise ValueError('num_samples and max_new_tokens must be at least 1')


def load_run(path, tokenizer=''):
    """(model, tokenizer, checkpoint) of a run's folder or of one ckpt.pt, or of a Hugging Face folder (no checkpoint).
    ValueError or OSError where that cannot be, or where the tokenizer is not the one it was trained with."""
    path = Path(path)
    weights = [*path.glob('*.safetensors*'), *path.glob('pytorch_model*.bin*')] if path.is_dir() else []
    if weights and not (path / 'ckpt.pt').exists():
        checkpoint, model, tokenizer = None, GPT.from_pretrained(path), tokenizers.load(tokenizer or path)
    else:
        checkpoint = load_checkpoint(path / 'ckpt.pt' if path.is_dir() else path)  # older ones are for resuming
        with stranger(path):
            trained, folder = checkpoint['data']['tokenizer'], Path('data', checkpoint['settings']['dataset'])
            tokenizer = tokenizer or ('bytes' if trained['name'] == 'bytes' else folder)
            if tokenizer is folder and not folder.is_dir():  # its name would be taken for a hub id
                raise FileNotFoundError(f'there is no {folder}, with whose tokenizer {path} was trained')
            tokenizer = tokenizers.load(tokenizer)
            if tokenizer.sha256 != trained['sha256']:
                raise ValueError(f'{path} was trained with another tokenizer than {tokenizer.name}')
            model = GPT(GPTConfig(**checkpoint['model_config']))
            model.load_state_dict(checkpoint['model'])
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f'{path}: its tokenizer has {tokenizer.n_vocab:,} ids, the model {model.config.vocab_size:,}')
    return model.eval(), tokenizer, checkpoint


def main():
    with one_line_errors(ValueError, OSError):
        (settings,) = configure(SampleConfig)
        device = Machine(TrainConfig(device=settings.device, compile=False)).device
        model, tokenizer, _ = load_run(settings.out_dir, settings.tokenizer)
        prompt = settings.start
        if prompt == '-':
            prompt = sys.stdin.read()
        elif prompt.startswith('FILE:'):
            prompt = Path(prompt.removeprefix('FILE:')).read_text()
        ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eot]
        room = model.config.block_size - len(ids)
        if room < 1:
            raise ValueError(f'the prompt has {len(ids)} tokens, the model takes fewer than {model.config.block_size}')
        idx = torch.tensor([ids] * settings.num_samples, device=device)
        new_tokens = min(settings.max_new_tokens, room)
        cache = model.to(device).new_cache(settings.num_samples, len(ids) + new_tokens)
        stream = model.stream(idx, new_tokens, settings.temperature, settings.top_k, settings.top_p, cache,
                              torch.Generator(device).manual_seed(settings.seed))

    samples, shown, alone = [[] for _ in range(settings.num_samples)], 0, settings.num_samples == 1
    if alone:
        print(prompt, end='', flush=True)
    start, ended, steps = time.perf_counter(), [False] * settings.num_samples, 0
    for new in stream:
        steps += 1
        for i, token in enumerate(new.flatten().tolist()):
            ended[i] = ended[i] or token == tokenizer.eot
            if not ended[i]:
                samples[i].append(token)
        if alone:
            text = tokenizer.decode(samples[0][shown:])
            if not text.endswith('\ufffd'):  # in the middle of a character
                print(text, end='', flush=True)
                shown = len(samples[0])
        if all(ended):
            break
    seconds = time.perf_counter() - start
    if alone:
        print(tokenizer.decode(samples[0][shown:]))
    else:
        print(('\n' + '-' * 80 + '\n').join(prompt + tokenizer.decode(sample) for sample in samples))
    print(f'{steps * settings.num_samples / seconds:,.0f} tokens/s, cache {cache.nbytes:,} bytes '
          f'for {settings.num_samples} x {cache.max_len} tokens', file=sys.stderr)


if __name__ == '__main__':
    main()
