"""
Text from a checkpoint.

$ python sample.py --out_dir=out/demo/resformer --start="def main("
$ python sample.py --out_dir=out/resformer_82m --start=FILE:prompt.txt --num_samples=4 --top_k=50
"""
from dataclasses import dataclass
from pathlib import Path

import torch

import tokenizer as tokenizers
from configurator import configure, one_line_errors
from model import GPT, GPTConfig
from train import Machine, TrainConfig, load_checkpoint


@dataclass
class SampleConfig:
    out_dir: str = 'out/run'  # a run's folder, or one checkpoint file
    start: str = ''  # the prompt; FILE:path reads it from a file; '': the model begins a document
    num_samples: int = 1  # continuations, made as one batch
    max_new_tokens: int = 200  # tokens of each; it ends earlier at <|endoftext|>
    temperature: float = 0.8  # 0: greedy
    top_k: int = 0  # sample from the k likeliest tokens only; 0: from all
    seed: int = 1337  # of the sampling
    device: str = 'auto'  # as in train.py
    tokenizer: str = ''  # as in prepare_slimpajama.py; '': the one of the run's dataset

    def __post_init__(self):
        if self.num_samples < 1 or self.max_new_tokens < 1:
            raise ValueError('num_samples and max_new_tokens must be at least 1')
        if self.temperature < 0 or self.top_k < 0:
            raise ValueError('temperature and top_k must not be negative')


def main():
    with one_line_errors(ValueError, OSError):
        (settings,) = configure(SampleConfig)
        device = Machine(TrainConfig(device=settings.device, compile=False)).device
        path = Path(settings.out_dir)
        checkpoint = load_checkpoint(path if path.suffix == '.pt' else path / 'ckpt.pt')
        trained = checkpoint['data']['tokenizer']
        folder = 'bytes' if trained['name'] == 'bytes' else str(Path('data', checkpoint['settings']['dataset']))
        tokenizer = tokenizers.load(settings.tokenizer or folder)
        if tokenizer.sha256 != trained['sha256']:
            raise ValueError(f'{path} was trained with another tokenizer than {tokenizer.name}')
        prompt = settings.start
        if prompt.startswith('FILE:'):
            prompt = Path(prompt.removeprefix('FILE:')).read_text()

    model = GPT(GPTConfig(**checkpoint['model_config']))
    model.load_state_dict(checkpoint['model'])
    model.to(device).eval()
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eot]
    idx = torch.tensor([ids] * settings.num_samples, device=device)
    generator = torch.Generator(device).manual_seed(settings.seed)
    out = model.generate(idx, settings.max_new_tokens, settings.temperature, settings.top_k, generator=generator)
    for sample in out[:, len(ids):].tolist():
        ended = sample.index(tokenizer.eot) if tokenizer.eot in sample else len(sample)
        print(prompt + tokenizer.decode(sample[:ended]))
        print('-' * 80)


if __name__ == '__main__':
    main()
