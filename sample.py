"""
Text from a run, through the KV cache.

$ python sample.py --out_dir=out/demo --start="def main("
$ python sample.py --out_dir=out/resformer_82m --start="$(cat prompt.txt)" --top_k=50 --seed=2
$ python sample.py --out_dir=out/resformer_82m --start="Once upon a time" --temperature=0
"""

import sys
import time
from dataclasses import dataclass

from configurator import configure

import torch
import torch.nn.functional as F

from lib.files import one_line_errors
from lib.machine import Machine, advise_on_memory
from lib.tokenizer import EOT
from lib.trained import load_run
from model import refuse


@dataclass
class SampleConfig:
    out_dir: str = 'out/run'  # a run's folder, or one checkpoint file
    start: str = ''  # prompt, with <|endoftext|> and its like; "..." as in Python; '': new text
    max_new_tokens: int = 200  # fewer at <|endoftext|> or where the context is full
    temperature: float = 0.8  # 0: greedy
    top_k: int = 0  # sample from the k likeliest tokens only; 0: from all
    top_p: float = 1.0  # sample from the fewest tokens that have this much of the probability
    seed: int = 1337  # of the sampling
    device: str = 'auto'  # as in train.py
    tokenizer: str = ''  # as in prepare_slimpajama.py; '': the one of the run's dataset

    def __post_init__(self):
        for name, allowed in (
            ('max_new_tokens', self.max_new_tokens >= 1),
            ('temperature', self.temperature >= 0),
            ('top_k', self.top_k >= 0),
            ('top_p', 0 < self.top_p <= 1),
        ):
            refuse(not allowed, f'{name}={getattr(self, name)} is out of range; see --help')
        for name in ('top_k', 'top_p', 'seed'):
            refuse(
                self.temperature == 0 and getattr(self, name) != getattr(SampleConfig, name),
                f'{name} does nothing at temperature=0, where the likeliest token is taken; drop one '
                'of them',
            )


def prompt_ids(prompt, tokenizer):
    """The ids of a prompt, in which <|endoftext|> is one token, and so are the tokenizer's own special
    tokens; an empty one is a new document."""
    ids, *others = (tokenizer.encode(part, special=True).tolist() for part in prompt.split(EOT))
    for part in others:
        ids += [tokenizer.eot, *part]
    return ids or [tokenizer.eot]


def draw_token(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """One token per row of logits (B, V) -> (B, 1).

    It is drawn from the top_k likeliest (0: all), and among these from the fewest that have top_p of the
    probability. At temperature 0, it is the likeliest.
    """
    is_broken = not logits.isfinite().all()
    refuse(is_broken, 'the logits are not finite: the weights are damaged, or overflow')
    if temperature < 1e-6:  # logits divided by less may overflow
        return logits.argmax(dim=-1, keepdim=True)
    probs = F.softmax(logits / temperature, dim=-1)
    if not top_k and top_p == 1:
        return torch.multinomial(probs, 1, generator=generator)

    V = probs.size(-1)
    probs, order = probs.topk(min(top_k or V, V))
    if top_p < 1:
        # A token stays if the likelier ones together have less than top_p, and the likeliest one even
        # where top_p rounds to 0.
        before = probs.cumsum(dim=-1) - probs
        total = probs.sum(dim=-1, keepdim=True)
        probs = probs.masked_fill((before > 0) & (before >= top_p * total), 0.0)
    return order.gather(1, torch.multinomial(probs, 1, generator=generator))


def print_sample(prompt, new_tokens, tokenizer):
    """Print a prompt and its continuation as it comes, up to <|endoftext|>, and never a part of a
    character. Returns the number of steps."""
    tokens, shown, steps = [], 0, 0
    for steps, new in enumerate(new_tokens, 1):
        if steps == 1:  # nothing was refused
            print(prompt, end='', flush=True)
        if new.item() == tokenizer.eot:
            break
        tokens.append(new.item())
        text = tokenizer.decode(tokens[shown:])
        if not text.endswith('\ufffd'):
            print(text, end='', flush=True)
            shown = len(tokens)
    print(tokenizer.decode(tokens[shown:]))
    return steps


def main():
    with one_line_errors(), advise_on_memory('Lower --max_new_tokens.'):
        (settings,) = configure(SampleConfig, doc=__doc__)
        device = Machine(settings.device, tf32=True, attention='flash').device
        model, tokenizer, _ = load_run(settings.out_dir, settings.tokenizer)
        model.to(device)
        ids = prompt_ids(settings.start, tokenizer)
        refuse(
            max(ids) >= model.config.vocab_size,
            'the prompt spells a token that the model lacks; leave it out',
        )
        block_size = model.config.block_size
        room = block_size - len(ids)
        refuse(
            room < 1,
            f'the prompt has {len(ids)} tokens, the model takes fewer than {block_size}; shorten it',
        )
        new_tokens = min(settings.max_new_tokens, room)
        generator = torch.Generator(device).manual_seed(settings.seed % 2**63)

        def choose_known(logits):
            """Of the ids that the tokenizer has: the vocabulary may be padded."""
            logits = logits[:, : tokenizer.n_vocab].float()
            how = settings.temperature, settings.top_k, settings.top_p
            return draw_token(logits, *how, generator)

        began = time.perf_counter()
        cache = model.new_cache(1, len(ids) + new_tokens)
        idx = torch.tensor([ids], device=device)
        tokens = model.generate(idx, new_tokens, choose_known, cache)
        count = print_sample(settings.start, tokens, tokenizer)
        speed = count / (time.perf_counter() - began)
        print(
            f'{speed:,.0f} tokens/s, cache {cache.nbytes:,} bytes for {cache.max_len} tokens',
            file=sys.stderr,
        )


if __name__ == '__main__':
    main()
