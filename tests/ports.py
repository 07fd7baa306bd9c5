"""Ports for the conformance kit: model.py itself, its mixing alone, and ports that lack something."""

import sys
from unittest import mock

import numpy as np
import torch

import model as model_py


class Ours:
    """Our own model, or a changed copy of model.py."""

    module = model_py

    def __init__(self, config, weights):
        module = self.module
        self.model = module.GPT(module.GPTConfig(**vars(config))).eval()
        self.model.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})

    def __call__(self, ids):
        with torch.no_grad():
            return self.model(torch.tensor(ids))[0].numpy()

    def values(self, ids):
        layers = []

        def attend_cross(q, keys, values, *others):
            layers.append(values[-1].detach().numpy())
            return original(q, keys, values, *others)

        original = self.module.attend_cross
        with mock.patch.object(self.module, 'attend_cross', attend_cross):
            self(ids)
        return layers

    def gradients(self, ids, targets):
        self.model.zero_grad()
        self.model(torch.tensor(ids), torch.tensor(targets))[1].backward()
        named = self.model.named_parameters()
        return {name: None if p.grad is None else p.grad.numpy() for name, p in named}

    def decode(self, chunks):
        length = sum(chunk.shape[1] for chunk in chunks)
        cache = self.model.new_cache(len(chunks[0]), length)
        with torch.no_grad():
            logits = [self.model(torch.tensor(chunk), cache=cache)[0] for chunk in chunks]
        return np.concatenate(logits, axis=1), cache.nbytes / 4


def mixing_of(config, module=model_py):
    """A port of a mixing: that of layer 1's values in our own model."""
    part = module.GPT(module.GPTConfig(**vars(config))).transformer.h[1].attn.v

    def mix(own, source, x, weights):
        for name, p in part.named_parameters(prefix='attn.v'):
            p.data = torch.tensor(weights[name]) if name in weights else p.data.double()
        t = {'own': own, 'source': source, 'x': x}
        t = {name: torch.tensor(array, requires_grad=True) for name, array in t.items()}
        values = part.mix(t['own'], [t['source']], t['x'])

        def backward(gradient):
            part.zero_grad()
            values.backward(torch.tensor(gradient))
            named = dict(part.named_parameters(prefix='attn.v'))
            t.update((name, named[name]) for name in weights if name in named)
            return {name: p.grad.numpy() for name, p in t.items() if p.grad is not None}

        return values.detach().numpy(), backward

    return mix


def logits_alone(config, weights):
    return Ours(config, weights).__call__


def nothing(config, weights):
    raise NotImplementedError


def leaves(config, weights):
    sys.exit(0)


leaves.variants = 'vanilla,resformer'
