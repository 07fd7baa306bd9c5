"""
The one list of architecture variants for all tests, each small enough for the float64 reference.

A setting, or a value of one, is tested where it has a variant here; uncovered() says which have none.
`pytest tests/test_variants.py -k NAME` then checks all that must hold for it.
"""

import dataclasses

import reference
import torch

import model
from model import GPT, GPTConfig

SIZE = dict(block_size=32, vocab_size=61, n_layer=3, n_head=4, n_embd=32, n_inner=40)

# Fields without a variant, and where they are tested.
ELSEWHERE = {
    'block_size': 'test_model.py',
    'vocab_size': 'test_model.py',
    'n_head': 'test_model.py',
    'dropout': 'test_model.py: it is random in training',
}

RES = dict(v_residual=True)
RELU = dict(RES, residual_weights='relu')
SV = dict(share_v=True)
SV2 = dict(share_v=2)
KEYS2 = dict(share_k=2)
CLA = dict(**KEYS2, **SV2)
GPT2 = dict(arch='gpt2')
# Of a head of size 8 one wavelength is kept, one blended, and two are stretched.
LLAMA3 = dict(rope_scaling=(8.0, 1.0, 4.0, 100))

VARIANTS = {
    # the baselines
    'vanilla': {},
    'GQA': dict(n_kv_head=2),
    'gpt2': GPT2,
    'gpt2, odd head size, n_inner 0': dict(GPT2, n_embd=20, n_inner=0),
    'tied embeddings': dict(tie_embeddings=True),
    'other theta and epsilon, n_inner 0': dict(rope_theta=100.0, norm_eps=1e-2, n_inner=0),
    'llama3 RoPE': LLAMA3,
    'gpt2 embedding norm': dict(GPT2, embed_norm=True, norm_eps=1e-2),
    # ResFormer and SVFormer, alone and with what shrinks the cache (Fig. 10)
    'ResFormer': RES,
    'SVFormer': SV,
    'SVFormer GQA': dict(SV, n_kv_head=2),
    'SVFormer CLA keys GQA': dict(SV, **KEYS2, n_kv_head=2),
    'CLA': CLA,
    # what else can be shared (Fig. 13, Fig. 4)
    'first queries': dict(share_q=True),
    'first keys': dict(share_k=True),
    # NeuTRENO, DenseFormer
    'NeuTRENO GQA': dict(neutreno=0.4, n_kv_head=2),
    'NeuTRENO on ResFormer from all': dict(v_residual='all', neutreno=0.2),
    'NeuTRENO on CLA': dict(CLA, neutreno=0.4),
    # which projections and which layers (Figs. 6, 8)
    'queries every 2, query residual': dict(share_q=2, q_residual=True),
    'from previous, a borrower': dict(SV2, v_residual='previous', n_layer=5),
    # the weights of the mixture
    'constant lambda on q, k, v': dict(
        RES, q_residual=True, k_residual=True, residual_lambda=(0.7, 0.2)
    ),
    'learned': dict(RES, residual_weights='learned'),
    'learned from all': dict(v_residual='all', residual_weights='learned'),
    'learned from a constant': dict(RES, residual_weights='learned', residual_lambda=(2.0, 1.0)),
    'learned q, k and v': dict(
        RES, q_residual='previous', k_residual='previous', residual_weights='learned'
    ),
    'learned CLA': dict(RES, **CLA, residual_weights='learned'),
    # the values' own map (Fig. 7)
    'identity from all, GQA': dict(v_residual='all', residual_map='identity', n_kv_head=2),
    'identity from previous, a borrower': dict(
        CLA, v_residual='previous', residual_map='identity', n_layer=5
    ),
    'cross': dict(RES, residual_map='cross'),
    'cross from all, GQA': dict(v_residual='all', residual_map='cross', n_kv_head=2),
    'cross sparse, key residual': dict(
        RES, residual_map='cross', residual_layers=(2,), k_residual=True
    ),
    'cross from all, ragged sharing': dict(
        KEYS2,
        v_residual='all',
        share_v=3,
        residual_map='cross',
        n_layer=5,
    ),
    'cross NeuTRENO DenseFormer': dict(RES, residual_map='cross', neutreno=0.4, denseformer=True),
    # the family: maps of owners, sharing of some heads
    'owner map, all values': dict(v_residual='all', share_v=(0, 1, 1, 3, 0), n_layer=5),
    'keys of the middle layer, values of the first (FusedKV-Lite)': dict(
        share_k=(0, 1, 2, 2, 2), share_v=(0, 1, 0, 0, 0), n_layer=5
    ),
    'half of the heads': dict(SV, share_v_heads=2),
    'half of the heads GQA, CLA keys': dict(SV, **KEYS2, share_v_heads=1, n_kv_head=2),
    'some heads by a map, NeuTRENO': dict(
        share_v=(0, 1, 0, 1, 1), share_v_heads=3, neutreno=0.4, n_layer=5
    ),
    'ResFormer from some heads of previous': dict(
        SV2, v_residual='previous', share_v_heads=1, n_layer=5
    ),
    # sources that are no layers
    'tables': dict(v_residual='token', residual_layers=(0, 2)),
    'V_1 and tables, learned': dict(
        v_residual='first+token', residual_layers=(0, 1, 2), residual_weights='learned'
    ),
    'V_1 and a table GQA': dict(
        v_residual='first+token',
        residual_layers=(2,),
        residual_lambda=(0.3, 0.6),
        n_kv_head=2,
    ),
    'NeuTRENO on SVFormer of tables': dict(
        share_v=True, v_residual='token', residual_layers=(0,), neutreno=0.4
    ),
    'projections of x0': dict(v_residual='x0', residual_layers=(0, 2), n_kv_head=2),
    'anchor': dict(v_residual='anchor', residual_layers=(0, 1, 2), residual_lambda=(0.7, 0.4)),
    'anchor, no values of the first layer': dict(
        v_residual='anchor', residual_layers=(0, 1), residual_lambda=(1.0, 0.0)
    ),
    'anchor, learned, gpt2': dict(
        GPT2, v_residual='anchor', residual_layers=(1, 2), residual_weights='learned'
    ),
    # no values of its own
    'keys of the first, no values of its own': dict(
        RES, k_residual=True, residual_lambda=(0.7, 0.0), n_kv_head=2
    ),
    'a table under a head gate, NeuTRENO': dict(
        v_residual='token',
        residual_weights='head',
        residual_layers=(2,),
        residual_lambda=(3.0, 0.0),
        neutreno=0.4,
    ),
    # weights that follow from x
    'head gate': dict(RES, residual_weights='head'),
    'head gate from all GQA': dict(
        v_residual='all', residual_weights='head', gate_bias=True, n_kv_head=2
    ),
    'head gate of nanochat': dict(
        v_residual='token',
        residual_weights='head',
        residual_layers=(0, 2),
        gate_inputs=12,
        residual_lambda=(3.0, 1.0),
    ),
    'head gate on values, plain keys': dict(RES, residual_weights='head', k_residual=True),
    'relu gate': RELU,
    'relu gate on tables': dict(
        v_residual='token',
        residual_weights='relu',
        residual_layers=(1, 2),
        residual_lambda=(3.0, 0.7),
        k_residual=True,
    ),
    'channel gate': dict(RES, residual_weights='channel'),
    'channel gate from previous GQA': dict(
        v_residual='previous',
        residual_weights='channel',
        gate_rank=4,
        n_kv_head=2,
    ),
    # around them
    'attention residuals x0 ResFormer': dict(RES, attn_res=True, x0_residual=True, embed_norm=True),
    'gpt2 attention residuals SVFormer': dict(GPT2, **SV, attn_res=True),
    'output gate GQA': dict(output_gate=True, n_kv_head=2),
    'output gate exclusive identity NeuTRENO': dict(
        RES, residual_map='identity', neutreno=0.2, exclusive=True, output_gate=True
    ),
    'gpt2 output gate cross': dict(RES, **GPT2, residual_map='cross', output_gate=True),
    'x0 embedding norm DenseFormer': dict(x0_residual=True, embed_norm=True, denseformer=True),
    'gpt2 x0 SVFormer': dict(GPT2, **SV, x0_residual=True),
    'exclusive cross': dict(RES, residual_map='cross', exclusive=True),
    'exclusive SVFormer GQA': dict(SV, exclusive=True, n_kv_head=2),
    'q and k norm GQA': dict(qk_norm=True, n_kv_head=2, norm_eps=1e-2),
    'q and k norm, first queries, key residual': dict(qk_norm=True, share_q=True, k_residual=True),
    'modern ResFormer': dict(RES, embed_norm=True, x0_residual=True, qk_norm=True),
    # the other architecture, and everything at once
    'gpt2 ResFormer': dict(RES, **GPT2),
    'gpt2 CLA GQA': dict(CLA, **GPT2, n_kv_head=2),
    'gpt2 NeuTRENO DenseFormer': dict(GPT2, neutreno=0.4, denseformer=True),
    'everything': dict(
        KEYS2,
        v_residual='all',
        q_residual='all',
        k_residual='all',
        share_v=4,
        residual_lambda=(0.4, 0.7),
        residual_layers=(4,),
        n_layer=5,
        n_kv_head=2,
        neutreno=0.3,
        denseformer=True,
        tie_embeddings=True,
    ),
}


def config_of(name, **size):
    """The GPTConfig of a variant; `size` replaces values of SIZE, but not the variant's own."""
    return GPTConfig(**{**SIZE, **size, **VARIANTS[name]})


def make(name='vanilla', **size):
    """A variant's model with weights far from their start."""
    return reference.perturb(GPT(config_of(name, **size)))


def tokens(*shape, vocabulary=SIZE['vocab_size'], seed=0):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def in_chunks(model, idx, chunks, cache, **options):
    """The logits of idx, a chunk of the given lengths at a time, behind what the cache has seen."""
    logits = [model(chunk, cache=cache, **options)[0] for chunk in idx.split(chunks, dim=1)]
    return torch.cat(logits, dim=1)


def greedy(model, idx, count, cache=None):
    """idx (B, T) and its likeliest continuation, (B, T + count)."""
    likeliest = model.generate(idx, count, lambda logits: logits.argmax(-1, keepdim=True), cache)
    return torch.cat((idx, *likeliest), dim=1)


def covering():
    """Names of a few variants in which each setting is on, with each word that it may be: each time, of
    the one with the most that are still missing."""
    on = {}
    for name in VARIANTS:
        settings = config_of(name).variant().items()
        on[name] = {(key, value if isinstance(value, str) else True) for key, value in settings}
    missing = set().union(*on.values())
    names = []
    while missing:
        names.append(max(on, key=lambda name: len(on[name] & missing)))
        missing -= on[names[-1]]
    return names


def uncovered():
    """[what to do] for each value of a setting that no variant has: of a switch, or of one that is a word;
    of any other, for one beside its default."""
    configs = [config_of(name) for name in VARIANTS]
    todo = []
    for field in dataclasses.fields(GPTConfig):
        name, default = field.name, field.default
        values = {getattr(config, name) for config in configs}
        few = model.choices(name) or ((False, True) if isinstance(default, bool) else ())
        missing = [f'{name}={v!r}' for v in few if v not in {*values, 'first'}]  # which is True
        if not few and values == {default}:
            missing = [f'another value than {name}={default!r}']
        if name not in ELSEWHERE:
            todo += [
                f'no variant has {text}: add one to VARIANTS in tests/variants.py, and what it computes '
                'to tests/reference.py'
                for text in missing
            ]
    return todo
