"""NeuTRENO on ResFormer, written from the paper's equations alone, with mistake 8 of blind_mistakes.txt.

random.Random(20261123).randint(1, 8) drew the mistake.
"""

import torch
import torch.nn.functional as F


def build(config, weights):
    if not config.neutreno:
        raise NotImplementedError
    w = {name: torch.tensor(weight) for name, weight in weights.items()}
    heads, size = config.n_head, config.n_embd // config.n_head

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], w[name], config.norm_eps)

    def rotated(x):
        frequencies = config.rope_theta ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(x.shape[2])[:, None] * frequencies
        first, second = x.chunk(2, dim=3)
        turned = first * angles.cos() - second * angles.sin()
        return torch.cat((turned, second * angles.cos() + first * angles.sin()), dim=3)

    def logits(ids):
        x = w['transformer.wte.weight'][torch.tensor(ids)]
        B, T, C = x.shape
        first_v = None
        for n in range(config.n_layer):
            name = f'transformer.h.{n}'
            qkv = norm(x, f'{name}.ln_1.weight') @ w[f'{name}.attn.c_attn.weight'].T
            q, k, projected = (
                part.view(B, T, heads, size).transpose(1, 2) for part in qkv.split(C, dim=2)
            )
            if first_v is None:
                first_v = projected
            v = (projected + first_v) / 2 if config.v_residual and n else projected
            y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
            y = y + config.neutreno * (first_v - projected)  # Eq. 8; right is first_v - v
            x = x + y.transpose(1, 2).reshape(B, T, C) @ w[f'{name}.attn.c_proj.weight'].T
            gate, up = (norm(x, f'{name}.ln_2.weight') @ w[f'{name}.mlp.c_fc.weight'].T).chunk(
                2, dim=2
            )
            x = x + (F.silu(gate) * up) @ w[f'{name}.mlp.c_proj.weight'].T
        x = norm(x, 'transformer.ln_f.weight')
        return (x @ w['lm_head.weight'].T).numpy()

    return logits
